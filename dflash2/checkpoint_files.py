"""Where the files that travel with the package lie, the same in a checkout, an editable install and a wheel."""

from __future__ import annotations

from pathlib import Path

from dflash2.errors import CheckpointError

__all__ = ["checkpoint_path", "packaged_checkpoints"]

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
