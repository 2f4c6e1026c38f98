"""The memory's own speed, measured before anything is held against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from dflash2.bench.timing import Timer

__all__ = ["Ceilings", "measure_ceilings"]

#: Some 80 times the L2 cache of an H200: what is left in it from the run before does not count.
BYTES = 4 << 30


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second.

    Attributes:
        read_bytes_per_s: the best of all ways tried to read a large buffer once.
        copy_bytes_per_s: of a device-to-device copy, bytes read plus bytes written.
        ways: what each way of reading gave.
    """

    read_bytes_per_s: float
    copy_bytes_per_s: float
    ways: dict[str, float] = field(default_factory=dict)


def measure_ceilings(timer: Timer, num_bytes: int = BYTES) -> Ceilings:
    """Read a buffer of ``num_bytes``, a multiple of 64 KiB, in several ways, and copy half of it to the other half."""
    numbers = torch.empty(num_bytes // 4, dtype=torch.int32, device=timer.device).random_()
    ways = {
        name: num_bytes / timer.measure(timer.captured([run]), samples=20).median_us * 1e6
        for name, run in _ways(numbers).items()
    }
    half = numbers.numel() // 2
    # Not captured: in a graph a copy is a node for the copy engines, at two thirds of the rate.
    copy = timer.measure(lambda: numbers[half:].copy_(numbers[:half]), samples=20)
    return Ceilings(max(ways.values()), num_bytes / copy.median_us * 1e6, ways)


def _ways(numbers: Tensor) -> dict[str, Callable[[], Tensor]]:
    # As 16-bit numbers random bits hold infinities and NaNs, which cost no more.
    ways = {
        "torch.sum float32": lambda: numbers.view(torch.float32).sum(),
        "torch.sum bfloat16": lambda: numbers.view(torch.bfloat16).sum(),
        "torch.amax int32": lambda: numbers.amax(),
    }
    if not numbers.is_cuda:
        return ways
    from dflash2.kernels import read_bandwidth as kernel

    for s in kernel.CANDIDATES:
        name = f"triton {s['PROGRAMS']}x{s['BLOCK']} elements, {s['num_warps']} warps, {s['num_stages']} stages"
        ways[name] = partial(kernel.read, numbers, s)
    return ways
