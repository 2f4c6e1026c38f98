"""Positions and lengths in their two forms: integers the host knows, or tensors that only the device knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash2.errors import PositionError

__all__ = ["host_integers", "integers_on_device", "on_device", "whole_number"]


MAX_POSITION = 2**62

#: Devices whose tensors can be read without waiting. `dflash2.testing.cpu_as_device` empties it for a while.
HOST_DEVICES = {"cpu"}


def on_device(value: Any) -> bool:
    """Whether reading the value would wait for an accelerator. CPU tensors are host integers."""
    return isinstance(value, Tensor) and value.device.type not in HOST_DEVICES


def whole_number(name: str, value: Any) -> int:
    """A position or length as an int.

    Raises:
        PositionError: it is no whole number in [0, 2^62), which leaves room to add two of them in int64.
    """
    try:
        number = -1 if isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):  # None, words, NaN, infinity
        number = -1
    if number != value or not 0 <= number < MAX_POSITION:
        raise PositionError(f"{name} holds {value!r}: expected whole numbers >= 0 (below 2^62).")
    return number


def host_integers(name: str, values: Sequence[int] | Tensor, count: int) -> list[int]:
    """``count`` integers >= 0 as a list.

    Raises:
        PositionError: another number of them, or one that is no whole number >= 0.
    """
    found = values.flatten().tolist() if isinstance(values, Tensor) else list(values)
    if len(found) != count:
        raise PositionError(f"{name} has {len(found)} entries: expected one for each of {count} sequences.")
    return [whole_number(name, v) for v in found]


def integers_on_device(values: Sequence[int] | Tensor, count: int, device: torch.device) -> Tensor:
    """int64 ``[count]`` on ``device``; host integers are checked and uploaded, device tensors are taken as they are."""
    if on_device(values) and isinstance(values, Tensor):
        if values.shape != (count,):
            raise PositionError(f"positions have shape {list(values.shape)}: expected [{count}].")
        return values.to(torch.int64)
    return torch.tensor(host_integers("positions", values, count), dtype=torch.int64, device=device)
