"""Rows as 16-bit integers in two int8 planes, which integer tensor cores multiply with int8 weights.

    x = scale * (256 * hi + lo),   one scale for each GROUP channels of a row

The rounding is at most 2^-16 of the largest value of a group; bfloat16 itself rounds each value by 2^-9.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["GROUP", "LIMIT", "Int16Rows", "int16_rows"]

GROUP = 128
#: 256 * 127 + 127, so that both halves fit int8.
LIMIT = 32639


class Int16Rows(NamedTuple):
    """N rows of K channels, K a multiple of `GROUP`.

    Attributes:
        planes: int8 ``[2, N, K]``, hi and lo.
        scale: fp32 ``[N, K/GROUP]``; infinite for a group that holds NaN or infinity.
        dtype: of the rows.
    """

    planes: Tensor
    scale: Tensor
    dtype: torch.dtype

    def float(self) -> Tensor:
        """The rows that the integers stand for, fp32 ``[N, K]``."""
        whole = (256 * self.planes[0].float() + self.planes[1].float()).unflatten(1, (-1, GROUP))
        return (whole * self.scale[..., None]).flatten(1)


def int16_rows(x: Tensor) -> Int16Rows:
    """The definition, in torch: of ``x [N, K]`` floating point, K a multiple of `GROUP` (else torch raises)."""
    groups = x.float().unflatten(1, (-1, GROUP))
    largest = groups.abs().nan_to_num(nan=torch.inf).amax(-1)
    q = torch.floor(groups * (LIMIT / largest.clamp_min(1e-30))[..., None] + 0.5).nan_to_num(0.0).to(torch.int32)
    hi = (q + 128) >> 8
    planes = torch.stack((hi, q - 256 * hi)).to(torch.int8).flatten(2)
    return Int16Rows(planes, largest / LIMIT, x.dtype)
