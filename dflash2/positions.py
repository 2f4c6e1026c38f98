"""What a call says of its requests: integers the host knows, or tensors that only the device knows."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from dflash2.errors import PositionError

__all__ = [
    "LastUpload",
    "as_list",
    "host_integers",
    "integers_on_device",
    "is_integer",
    "on_device",
    "per_request",
    "integer_ids",
    "upload",
    "whole_number",
]

MAX_POSITION = 2**62

#: Devices whose tensors can be read without waiting. `dflash2.testing.cpu_as_device` empties it for a while.
HOST_DEVICES = {"cpu"}


def on_device(value: Any) -> bool:
    """Whether reading the value would wait for an accelerator. CPU tensors are host integers."""
    return isinstance(value, Tensor) and value.device.type not in HOST_DEVICES


def is_integer(value: object) -> bool:
    """Whether it is an integer of Python or NumPy; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def whole_number(name: str, value: Any) -> int:
    """A position or length as an int.

    Raises:
        PositionError: it is no whole number in [0, 2^62), which leaves room to add two of them in int64.
    """
    try:
        number = -1 if isinstance(value, bool) else int(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # None, words, NaN, several numbers, infinity
        number = -1
    if not 0 <= number < MAX_POSITION or number != value:
        raise PositionError(f"{name} holds {value!r}: expected whole numbers >= 0 (below 2^62).")
    return number


def as_list(name: str, values: Any) -> list[Any]:
    """One entry per sequence, from a list, an array or a tensor.

    Raises:
        PositionError: it is a single thing.
    """
    if isinstance(values, Tensor):
        return values.flatten().tolist()
    try:
        return list(values)
    except TypeError:
        raise PositionError(f"{name} is {values!r}: expected one for each sequence, as a list or tensor.") from None


def integer_ids(name: str, values: Any) -> Tensor:
    """Ids in whatever integers they come, as int64 of the same shape, where they are.

    Raises:
        ValueError: they are no integers of 64 bits.
    """
    try:
        ids = values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
        if not ids.numel():
            return ids.to(torch.int64)
        if not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
            return ids.to(torch.int64)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # None, words, ragged lists, more than 64 bits
        pass
    found = values.dtype if isinstance(values, Tensor) else str(values)[:60]
    raise ValueError(f"{name}: expected integers, found {found}.")


def per_request(name: str, value: Any, count: int) -> Tensor:
    """One setting for all requests or one for each: fp32 ``[]`` or ``[count]``, where it is. On a device NaN is 0.

    Raises:
        ValueError: another number of them, or one that the host can see is not finite.
    """
    try:
        setting = torch.as_tensor(value, dtype=torch.float32, device=getattr(value, "device", "cpu"))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}={value!r}: expected a number or one for each of {count}.") from None
    if setting.shape not in ((), (count,)):
        raise ValueError(f"{name} has shape {list(setting.shape)}: expected a number or one for each of {count}.")
    if on_device(setting):
        return setting.nan_to_num(0.0, 0.0, 0.0)
    if not bool(setting.isfinite().all()):
        raise ValueError(f"{name}={value!r}: expected finite numbers.")
    return setting


def host_integers(name: str, values: Sequence[int] | Tensor, count: int) -> list[int]:
    """``count`` integers >= 0 as a list.

    Raises:
        PositionError: another number of them, or one that is no whole number >= 0.
    """
    found = as_list(name, values)
    if len(found) != count:
        raise PositionError(f"{name} has {len(found)} entries: expected one for each of {count} sequences.")
    return [whole_number(name, v) for v in found]


def upload(numbers: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """int64 on the device, in one copy that does not wait for what is queued there."""
    host = torch.as_tensor(numbers, dtype=torch.int64)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class LastUpload:
    """`upload`, unless the numbers are those of the last call: decoding says the same ones again and again."""

    def __init__(self, device: torch.device):
        self._device, self._there = device, upload([], device)
        self._numbers: list[int] = []

    def __call__(self, numbers: list[int]) -> Tensor:
        """int64 on the device, not to be written to."""
        if self._numbers != numbers:
            self._numbers, self._there = list(numbers), upload(numbers, self._device)
        return self._there


def integers_on_device(name: str, values: Sequence[int] | Tensor, count: int, device: torch.device) -> Tensor:
    """int64 ``[count]`` on ``device``; host integers are checked and uploaded, device tensors are taken as they are."""
    if on_device(values) and isinstance(values, Tensor):
        if values.shape != (count,):
            raise PositionError(f"{name} has shape {list(values.shape)}: expected [{count}], one for each sequence.")
        return values.to(torch.int64)
    return upload(host_integers(name, values, count), device)
