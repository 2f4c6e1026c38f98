"""Which implementation an operation runs: the torch reference, or the Triton kernel."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Backend", "check_devices", "choose_backend"]

Backend = Literal["auto", "torch", "triton"]

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def choose_backend(backend: str, *tensors: Tensor, dots: bool = False) -> Literal["torch", "triton"]:
    """Decide between the reference and the kernel; a kernel asked for by name is never replaced.

    Args:
        backend: ``"torch"`` or ``"triton"`` is taken at its word; ``"auto"`` takes the kernel wherever it can run on a
            GPU, and the reference elsewhere (kernels have no backward pass).
        tensors: all floating-point inputs of the operation.
        dots: the kernel multiplies matrices; Triton's interpreter takes bfloat16 for integers there.

    Returns:
        ``"torch"`` or ``"triton"``.

    Raises:
        ValueError: the name is unknown, or the kernel was asked for and cannot run; the message says why.
    """
    if backend == "torch":
        return "torch"
    if backend not in ("auto", "triton"):
        raise ValueError(f"backend is {backend!r}; expected 'auto', 'torch' or 'triton'.")
    obstacle = _obstacle(tensors, dots)
    if backend == "triton":
        if obstacle is not None:
            raise ValueError(f"backend='triton' cannot run here: {obstacle}; use backend='auto' or 'torch'.")
        return "triton"
    return "triton" if obstacle is None and tensors[0].is_cuda else "torch"


def check_devices(op: str, *tensors: Tensor | None) -> None:
    """Refuse tensors on several devices.

    Raises:
        ValueError: naming the operation and the devices.
    """
    devices = {str(t.device) for t in tensors if t is not None}
    if len(devices) > 1:
        raise ValueError(f"{op} got tensors on {sorted(devices)}; move them together.")


def _obstacle(tensors: tuple[Tensor, ...], dots: bool) -> str | None:
    """Why the kernel cannot take these tensors, or None."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "a gradient is needed and kernels have none"
    for tensor in tensors:
        if tensor.dtype not in _KERNEL_DTYPES:
            return f"a tensor is {tensor.dtype} and kernels take float16, bfloat16 or float32"
        if not tensor.is_cuda and not (tensor.device.type == "cpu" and _interpreted()):
            return f"a tensor is on {tensor.device} and kernels need CUDA (or the CPU with TRITON_INTERPRET=1)"
        if dots and not tensor.is_cuda and tensor.dtype == torch.bfloat16:
            return "Triton's interpreter cannot multiply bfloat16 matrices (float16 and float32 it can)"
    if not _has_triton():
        return "triton is not installed"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
