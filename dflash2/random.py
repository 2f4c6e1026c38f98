"""Independent uniform numbers for drafting, acceptance and replacement, whatever seeds the caller uses."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["Stream", "random_bits", "uniform", "uniform_of"]

_LOW_63_BITS = 2**63 - 1


class Stream(IntEnum):
    """What the numbers are for. The same generator state gives unrelated numbers in two streams."""

    DRAFT = 1
    ACCEPT = 2
    REPLACE = 3


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64 with wrap-around."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & (_LOW_63_BITS >> (shift - 1)))) * _signed(factor)
    return x ^ ((x >> 31) & (_LOW_63_BITS >> 30))


def random_bits(shape: tuple[int, ...], generator: torch.Generator | None, device: torch.device) -> Tensor:
    """What `uniform_of` makes numbers of: int64 of ``shape``."""
    where = generator.device if generator is not None else device
    return torch.randint(0, _LOW_63_BITS, shape, generator=generator, device=where, dtype=torch.int64).to(device)


def uniform_of(bits: Tensor, stream: Stream) -> Tensor:
    """Uniform on [0, 1), float64, from `random_bits`.

    A caller may seed the generators of draft and verification alike. Their raw bits would then be the same numbers, and
    a residual draw that repeats the draft's noise is not lossless. So the bits are hashed with the stream's number.
    """
    hashed = _mix(bits + _signed(stream * 0x9E3779B97F4A7C15 % 2**64))
    return ((hashed >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53


def uniform(shape: tuple[int, ...], stream: Stream, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Uniform on [0, 1), float64 of ``shape``: see `uniform_of`."""
    return uniform_of(random_bits(shape, generator, device), stream)
