"""Drafters to start from and to publish, and the state from which a killed run goes on as if nothing had happened."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash2.config import DFlash2Config
from dflash2.drafter import DFlash2Drafter
from dflash2.errors import CheckpointError, ConfigError

__all__ = ["load_resume", "publish", "save_resume", "start_from"]

RESUME = "resume.pt"
#: Fields that do not change what weights mean, and the one that `windows` and `causal` spell out.
NO_MEANING = ("dtype", "extra", "layer_types", "max_position_embeddings", "num_target_layers")


def publish(drafter: DFlash2Drafter, weights: dict[str, Tensor], folder: Path) -> None:
    """Save a drafter in the published layout and the config's dtype, with other weights than it works with.

    Args:
        drafter: what belongs to it besides weights.
        weights: by parameter name; not changed.
        folder: where to.
    """
    published = DFlash2Drafter(drafter.config, device="meta")
    dtype = published.dtype
    published.load_state_dict(weights, assign=True)
    published.mask_embedding = drafter.mask_embedding
    published.to(dtype).save_pretrained(folder)


def start_from(drafter: DFlash2Drafter, source: str) -> None:
    """Fill a drafter with the weights, and the mask embedding, of a saved one.

    Args:
        drafter: on the CPU or where it will train.
        source: folder, name or hub id, as `DFlash2Drafter.from_pretrained` takes it.

    Raises:
        ConfigError: the saved one was made for other rules; all differences are named.
        CheckpointError: it cannot be read.
    """
    mine, theirs = _meaning(drafter.config), _meaning(DFlash2Config.from_pretrained(source))
    differ = [f"{name}: {theirs[name]!r} there, {mine[name]!r} here" for name in mine if theirs[name] != mine[name]]
    if differ:
        raise ConfigError(
            f"init_from={source} has another configuration than this run:\n  - "
            + "\n  - ".join(differ)
            + "\nSet these under drafter to what the file says, or start from another drafter."
        )
    saved = DFlash2Drafter.from_pretrained(source, dtype=drafter.dtype, device=drafter.device)
    drafter.load_state_dict(saved.state_dict())
    drafter.mask_embedding = saved.mask_embedding


def _meaning(config: DFlash2Config) -> dict[str, Any]:
    """The fields that weights were trained under, spelt one way."""
    values = {name: value for name, value in asdict(config).items() if name not in NO_MEANING}
    rope = {"rope_type": "default", **config.rope_parameters}
    return values | {"sliding_window": config.windows, "is_causal": config.causal, "rope_parameters": rope}


def save_resume(folder: Path, state: dict[str, Any]) -> None:
    """Write the state; the old one stays until the new one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{RESUME}.{os.getpid()}"
    try:
        torch.save(state, temporary)
        os.replace(temporary, folder / RESUME)
    finally:
        temporary.unlink(missing_ok=True)


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
