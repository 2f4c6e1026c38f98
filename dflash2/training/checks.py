"""What is checked before a run begins: what would otherwise show as a bad drafter, hours later."""

from __future__ import annotations

from collections.abc import Sequence

from dflash2.config import DFlash2Config
from dflash2.drafter import DFlash2Drafter
from dflash2.errors import ConfigError
from dflash2.target import misfits
from dflash2.training.config import TrainConfig
from dflash2.training.data import Documents
from dflash2.training.target import FrozenTarget

__all__ = ["check_fit", "check_split", "freeze"]


def freeze(drafter: DFlash2Drafter, parts: Sequence[str]) -> None:
    """Take parameters whose name contains one of the parts out of training."""
    for part in parts:
        named = [p for name, p in drafter.named_parameters() if part in name]
        if not named:
            raise ConfigError(f"frozen={list(parts)}: no parameter's name contains {part!r}.")
        for p in named:
            p.requires_grad_(False)


def check_split(config: TrainConfig, processes: int) -> None:
    """Every process gets as many rows in every part of a step."""
    if config.rows_per_step % (processes * config.accumulate):
        raise ConfigError(
            f"rows_per_step={config.rows_per_step} cannot be split over {processes} processes in "
            f"accumulate={config.accumulate} parts: make it a multiple of {processes * config.accumulate}."
        )


def check_fit(shape: DFlash2Config, target: FrozenTarget, documents: Documents) -> None:
    """Drafter, target and documents belong together, and the mask token is no text."""
    if problems := misfits(shape, target.model.config):
        raise ConfigError("drafter does not fit the target: " + "; ".join(problems) + ". Change it under drafter.")
    if len(documents.tokens) and (most := int(documents.tokens.max())) >= shape.vocab_size:
        raise ConfigError(
            f"shards hold token {most}, and the target's vocabulary ends at {shape.vocab_size - 1}: they were written "
            "for another target."
        )
    masks = int((documents.tokens == shape.mask_token_id).sum())
    if masks:
        raise ConfigError(
            f"shards hold the mask token {shape.mask_token_id} {masks} times: a drafter could not tell it from text. "
            "Set drafter.mask_token_id to an id that does not occur."
        )
