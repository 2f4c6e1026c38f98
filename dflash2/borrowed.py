"""What a drafter borrows from its target: shared, never copied, and no part of the drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash2.config import MAX_PADDED_ROWS, DFlash2Config
from dflash2.errors import ConfigError

__all__ = ["Borrowed", "check_table"]


class Borrowed(list[Any]):
    """A list, so that what is in it is not taken for a part of the drafter.

    A deep copy of the drafter shares it too; a pickle leaves it out, and the drafter in it is not bound.
    """

    def __deepcopy__(self, memo: object) -> Borrowed:
        return self

    def __reduce__(self) -> tuple[type[Borrowed], tuple[()]]:
        return Borrowed, ()


def check_table(name: str, table: Tensor, c: DFlash2Config, device: torch.device) -> None:
    """Refuse an embedding table or head that is not ``[V', H]`` for this drafter, on its device.

    Raises:
        ConfigError: saying what was found and expected.
    """
    shape = tuple(table.shape)
    rows = range(c.vocab_size, c.vocab_size + MAX_PADDED_ROWS)
    if len(shape) != 2 or shape[1] != c.hidden_size or shape[0] not in rows:
        raise ConfigError(
            f"{name} has shape {list(shape)}: this drafter needs [{c.vocab_size}, {c.hidden_size}] (up to "
            f"{MAX_PADDED_ROWS - 1} padded rows). It was trained for another target."
        )
    if table.device != device:
        raise ConfigError(
            f"{name} is on {table.device} and the drafter on {device}: they are shared, not copied. Load both on one "
            "device."
        )
