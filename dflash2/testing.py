"""For tests: how close a kernel must be to its definition, and what stands in for an accelerator without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash2 import positions

__all__ = ["NoHostReads", "assert_kernel_close", "cpu_as_device"]


@contextmanager
def cpu_as_device() -> Iterator[None]:
    """CPU tensors of positions, lengths and temperatures count as an accelerator's: the device form runs on the CPU."""
    before = set(positions.HOST_DEVICES)
    positions.HOST_DEVICES.clear()
    try:
        yield
    finally:
        positions.HOST_DEVICES.update(before)


class NoHostReads(TorchDispatchMode):
    """A context in which no operation may look at the values of a tensor from the host, as in a CUDA graph capture."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Refuse what reads values; run the rest."""
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if name in self.READS or masked:
            raise AssertionError(f"{func} makes the host wait for the device.")
        return func(*args, **(kwargs or {}))


def assert_kernel_close(actual: Tensor, reference: Tensor, exact: Tensor, terms: int = 0) -> None:
    """Hold a kernel to twice what its reference gets wrong in the same dtype, plus one rounding step.

    Args:
        actual: the kernel's result, any shape, in the dtype under test.
        reference: the torch reference on the same inputs, same shape and dtype.
        exact: the reference on the same inputs in fp64, same shape.
        terms: of the fp32 sums inside, where the reference adds them up in blocks and the kernel one after another:
            sqrt(terms) more roundings of the largest value.

    Raises:
        AssertionError: shape or dtype differ, or an element is further from ``exact`` than the bound.
    """
    if actual.shape != exact.shape or actual.dtype != reference.dtype:
        raise AssertionError(
            f"got {list(actual.shape)} {actual.dtype}; expected {list(exact.shape)} {reference.dtype}."
        )
    if actual.numel() == 0:
        return
    exact = exact.double()
    step = torch.finfo(actual.dtype).eps * exact.abs()
    order = terms**0.5 * torch.finfo(torch.float32).eps * exact.abs().max()
    bound = 2 * ((reference.double() - exact).abs().max() + step) + order
    error = (actual.double() - exact).abs()
    if not bool((error <= bound).all()):  # so that a NaN fails
        worst = int((error / bound.clamp_min(torch.finfo(torch.float64).tiny)).nan_to_num(nan=float("inf")).argmax())
        raise AssertionError(
            f"element {worst} is off by {error.flatten()[worst]:.3g}; the bound there is {bound.flatten()[worst]:.3g}."
        )
