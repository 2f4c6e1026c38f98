"""One sequence's context rows outside of any KV, for another process or pool."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dflash2.errors import ConfigError
from dflash2.positions import whole_number

__all__ = ["SequenceState"]


@dataclass
class SequenceState:
    """Rows on the CPU: what `WindowKV.export_state` gives and `import_state` takes.

    Attributes:
        next_position: where the next append must start.
        positions: int64 ``[N]``, ascending.
        keys, values: ``[L, N, nkv, hd]``.
        tokens: ids of positions 0 .. next-1 where they are all known, else None.
    """

    next_position: int
    positions: Tensor
    keys: Tensor
    values: Tensor
    tokens: list[int] | None = None

    def check(self, row_shape: tuple[int, int, int]) -> None:
        """Rows come from outside: a position that is there twice, or not before the next, would become readable.

        Args:
            row_shape: (L, nkv, hd) of the KV that is to hold them.

        Raises:
            ConfigError: the rows are another drafter's, or not as `WindowKV.export_state` gives them.
        """
        layers, heads, head_dim = row_shape
        expected = (layers, len(self.positions), heads, head_dim)
        if tuple(self.keys.shape) != expected or tuple(self.values.shape) != expected:
            raise ConfigError(f"imported rows have shape {tuple(self.keys.shape)}, this drafter expects {expected}.")
        if self.positions.dtype != torch.int64:
            raise ConfigError(f"imported positions are {self.positions.dtype}: expected int64. Export the state again.")
        found, end = self.positions.tolist(), whole_number("next_position", self.next_position)
        if found and (found[0] < 0 or found[-1] >= end or any(a >= b for a, b in pairwise(found))):
            raise ConfigError(
                f"imported positions {found[:3]}..{found[-3:]} must ascend within [0, next_position={end}). Export "
                "the state again."
            )
        if self.tokens is not None and len(self.tokens) != end:
            raise ConfigError(
                f"imported state has {len(self.tokens)} tokens: expected those of positions 0 to {end - 1}, or None."
            )


torch.serialization.add_safe_globals([SequenceState])  # torch.load takes it without weights_only=False
