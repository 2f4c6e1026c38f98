"""How close a kernel must be to its definition, derived from data and not chosen by hand."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_kernel_close"]


def assert_kernel_close(actual: Tensor, reference: Tensor, exact: Tensor) -> None:
    """Hold a kernel to twice what its reference gets wrong in the same dtype, plus one rounding step.

    Args:
        actual: the kernel's result, any shape, in the dtype under test.
        reference: the torch reference on the same inputs, same shape and dtype.
        exact: the reference on the same inputs in fp64, same shape.

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
    bound = 2 * ((reference.double() - exact).abs().max() + step)
    error = (actual.double() - exact).abs()
    if not bool((error <= bound).all()):  # so that a NaN fails
        worst = int((error / bound.clamp_min(torch.finfo(torch.float64).tiny)).nan_to_num(nan=float("inf")).argmax())
        raise AssertionError(
            f"element {worst} is off by {error.flatten()[worst]:.3g}; the bound there is {bound.flatten()[worst]:.3g}."
        )
