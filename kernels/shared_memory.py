"""How much shared memory a program may take on a device: settings measured at one shape must run at all others."""

from functools import cache

import torch
import triton

#: Without a GPU (the interpreter): a data centre GPU's, from Hopper on.
_NO_GPU = 227 * 1024


def shared_bytes(device: torch.device) -> int:
    """Of one program, on this device: 99 KiB on most cards, 163 on an A100, 227 from an H100 on."""
    return _shared_bytes(device.index or 0) if device.type == "cuda" else _NO_GPU


@cache
def _shared_bytes(index: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
