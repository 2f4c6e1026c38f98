"""Grouped convolution along a block: K taps per channel, corrected per row and per group of G channels.

    y[i, ch] = sum over o in 0..K-1 of (base[o, ch] + delta[i, o, ch // G]) * x[i - o, ch],   x[j] = 0 for j < 0

Row i counts inside its own block: row 0 uses tap 0 only, and nothing crosses into another block or the context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash2.ops.backend import Backend, choose_backend

__all__ = ["grouped_conv", "grouped_conv_reference"]


def grouped_conv(x: Tensor, base: Tensor, delta: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Convolve every block of rows with token-dependent taps.

    Args:
        x: ``[..., n, H]`` floating point; the n rows of a block, any leading dimensions.
        base: ``[K, H]``, the taps that all rows share. K may exceed n.
        delta: ``[..., n, K, H/G]``, what row i adds to its own taps, one value for each group of G channels.
        backend: ``"auto"`` (the kernel on a GPU when no gradient is needed), ``"torch"`` or ``"triton"``.

    Returns:
        ``[..., n, H]`` in the dtype of ``x``. Sums are in fp32 (fp64 for fp64 inputs) and rounded once.

    Raises:
        ValueError: shapes or devices do not fit, or the backend cannot run here.
    """
    _check(x, base, delta)
    if choose_backend(backend, x, base, delta) == "torch":
        return grouped_conv_reference(x, base, delta)
    from dflash2.kernels import grouped_conv as kernel

    return kernel.grouped_conv(x, base, delta)


def grouped_conv_reference(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """The definition, in torch; differentiable in all three arguments. Shapes as in `grouped_conv`, unchecked."""
    n, groups = x.shape[-2], delta.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    by_group = (groups, x.shape[-1] // groups)
    rows = x.to(dtype).unflatten(-1, by_group)
    taps = base.to(dtype).unflatten(-1, by_group) + delta.to(dtype).unsqueeze(-1)
    y = taps[..., 0, :, :] * rows
    for o in range(1, min(base.shape[0], n)):
        # Rows before the block are left out, not multiplied by zero: a NaN there would survive that.
        y[..., o:, :, :] += taps[..., o:, o, :, :] * rows[..., : n - o, :, :]
    return y.flatten(-2).to(x.dtype)


def _check(x: Tensor, base: Tensor, delta: Tensor) -> None:
    shapes = f"x {list(x.shape)}, base {list(base.shape)}, delta {list(delta.shape)}"
    if x.dim() < 2 or base.dim() != 2 or delta.dim() != x.dim() + 1:
        raise ValueError(f"grouped_conv got {shapes}; expected x [..., n, H], base [K, H], delta [..., n, K, H/G].")
    taps, hidden = base.shape
    if x.shape[-1] != hidden or delta.shape[:-1] != (*x.shape[:-1], taps) or taps == 0:
        raise ValueError(f"grouped_conv got {shapes}; rows, taps K >= 1 and channels H must agree.")
    if delta.shape[-1] == 0 or hidden % delta.shape[-1] != 0:
        raise ValueError(f"grouped_conv got {shapes}; the groups of delta must divide the {hidden} channels.")
    if not x.device == base.device == delta.device:
        raise ValueError(
            f"grouped_conv got x on {x.device}, base on {base.device}, delta on {delta.device}; move them together."
        )
