"""Weights in the published layout, and the state from which a killed run goes on as if nothing had happened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash2.config import DFlash2Config
from dflash2.errors import CheckpointError

__all__ = ["load_resume", "load_weights", "save_resume", "save_weights"]

RESUME = "resume.pt"


def save_weights(folder: Path, config: DFlash2Config, weights: dict[str, Tensor]) -> None:
    """``model.safetensors`` in the config's dtype, and ``config.json``. Each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config.dtype)
    tensors = {name: w.detach().to("cpu", dtype).contiguous() for name, w in weights.items()}
    _replace(folder / "model.safetensors", lambda p: save_file(tensors, p, metadata={"format": "pt"}))
    _replace(folder / "config.json", lambda p: Path(p).write_text(config.to_json()))


def load_weights(network: nn.Module, folder: Path) -> None:
    """Fill a network from a drafter's folder.

    Raises:
        CheckpointError: names or shapes differ.
    """
    try:
        network.load_state_dict(load_file(folder / "model.safetensors"))
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"init_from={folder}: {error}. Give a drafter of this run's shape.") from error


def save_resume(folder: Path, state: dict[str, Any]) -> None:
    """Write the state; the old one stays until the new one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / RESUME, lambda p: torch.save(state, p))


def load_resume(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The state in ``folder``, or None when there is none.

    Args:
        folder: of the run.
        settings: what must be the same for the run to go on as it was.

    Raises:
        CheckpointError: the state belongs to other settings.
    """
    path = folder / RESUME
    if not path.exists():
        return None
    state = torch.load(path, map_location="cpu", weights_only=True)
    differ = sorted(k for k, v in settings.items() if state["settings"].get(k) != v)
    if differ:
        raise CheckpointError(
            f"{path} was written with other values of {differ}. Use another out folder, or the old settings."
        )
    return state


def _replace(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
