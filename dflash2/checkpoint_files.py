"""Where checkpoints lie: in a folder, in the package (checkout, editable install or wheel alike), or on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash2.errors import CheckpointError

__all__ = ["checkpoint_path", "config_file", "find", "packaged_checkpoints"]

#: The drafter for the embedded target.
DEFAULT_DRAFTER = "smollm2-135m-dflash2"
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
MASK_EMBEDDING = ("mask_embedding.safetensors", "mask_embedding.pt")
HUB_FILES = [CONFIG, "*.safetensors", "*.safetensors.index.json", "mask_embedding.pt"]

_CHECKPOINTS = Path(__file__).parent / "checkpoints"


def packaged_checkpoints() -> list[str]:
    """Names of the drafters that travel with the package, sorted."""
    return sorted(config.parent.name for config in _CHECKPOINTS.glob("*/config.json"))


def checkpoint_path(name: str) -> Path:
    """Folder of a drafter that travels with the package.

    Args:
        name: a name from ``packaged_checkpoints()``, such as ``"smollm2-135m-dflash2"``.

    Returns:
        The folder, absolute, holding ``config.json`` and ``model.safetensors``.

    Raises:
        CheckpointError: no such drafter is packaged; the message lists those that are.
    """
    names = packaged_checkpoints()
    if name not in names:
        raise CheckpointError(
            f"No packaged drafter is called {name!r}; packaged here: {', '.join(names) or 'none'}. "
            "Give one of these names, the path of a folder, or a Hugging Face Hub id."
        )
    return (_CHECKPOINTS / name).resolve()


def find(source: str | Path) -> Path:
    """The folder of a checkpoint: a local folder first, then a packaged one, then the hub.

    Raises:
        CheckpointError: none of them has it.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path
    if str(source) in packaged_checkpoints():
        return checkpoint_path(str(source))
    if str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise CheckpointError(
            f"{source}: no such folder. Give a folder, a hub id like owner/name, or a packaged drafter: "
            f"{', '.join(packaged_checkpoints()) or 'none'}."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source), allow_patterns=HUB_FILES))
    except Exception as e:  # the hub client raises many kinds: offline, not found, gated, interrupted
        raise CheckpointError(
            f"{source}: there is no such folder, and the hub did not give it ({type(e).__name__}: {e}). Check the name "
            "and the network, or download it and pass the folder."
        ) from e


def config_file(source: str | Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a folder, a hub id, or the file itself."""
    path = find(source)
    path = path / CONFIG if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: a checkpoint folder holds {CONFIG} and {WEIGHTS}.") from None
    except (ValueError, OSError) as e:
        raise CheckpointError(f"{path} cannot be read as JSON: {e}. Copy it again.") from e
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}, expected an object.")
    return raw
