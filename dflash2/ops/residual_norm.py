"""The end of a sublayer and the norm before the next one.

h'[i] = h[i] + sum over o of (base[o] + delta[i, o, group]) * a[i - o]        (no convolution: h[i] + a[i])
x[i]  = weight * h'[i] / sqrt(mean(h'[i]^2) + eps)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash2.ops.backend import Backend, choose_backend
from dflash2.ops.grouped_conv import grouped_conv_reference

__all__ = ["residual_norm", "residual_norm_reference", "rms_norm"]


def residual_norm(
    h: Tensor, a: Tensor, bias: Tensor | None, base: Tensor | None, delta: Tensor | None, weight: Tensor, eps: float,
    block_rows: int, finite: Tensor | None = None, *, settled: bool = False, backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add a sublayer's convolved output to the residual stream, and norm it.

    Args:
        h: residual stream, floating ``[N, H]``, contiguous; N is a multiple of ``block_rows``.
        a: the sublayer's output in parts ``[S, N, H]``, as `block_linear` gives it.
        bias: ``[H]``, added to the sum of a, or None.
        base: ``[K, H]``, or None for a network without convolutions.
        delta: ``[N, K, H/G]``, coefficients of each row, or None.
        weight: of the norm, ``[H]``.
        eps: of the norm.
        block_rows: n, rows of a block; nothing crosses into another block.
        finite: bool ``[N/n]`` for the last norm of the network: set to False where a block holds NaN or infinity, else
            left as it is. Then rows 1.. of each block are normed alone, and h' is not written.
        settled: of ``base`` and ``weight``, as in `block_linear`.

    Returns:
        h' and x, each ``[N, H]`` in h's dtype; with ``finite`` h itself and x ``[N - N/n, H]``.

    Raises:
        ValueError: the backend cannot run here.
    """
    if choose_backend(backend, h, weight) == "torch":
        return residual_norm_reference(h, a, bias, base, delta, weight, eps, block_rows, finite)
    from dflash2.kernels import residual_norm as kernel

    return kernel.residual_norm(h, a, bias, base, delta, weight, eps, block_rows, finite, settled)


def residual_norm_reference(
    h: Tensor, a: Tensor, bias: Tensor | None, base: Tensor | None, delta: Tensor | None, weight: Tensor, eps: float,
    block_rows: int, finite: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, in torch; rounds where the network's modules round."""
    total = a.sum(0)
    out = (total if bias is None else total + bias.to(total.dtype)).to(h.dtype).unflatten(0, (-1, block_rows))
    if base is not None and delta is not None:
        out = grouped_conv_reference(out, base, delta.unflatten(0, (-1, block_rows)))
    h_out = h + out.flatten(0, 1)
    if finite is None:
        return h_out, rms_norm(h_out, weight, eps)
    blocks = h_out.unflatten(0, (-1, block_rows))
    finite.logical_and_(blocks.isfinite().flatten(1).all(1))
    return h, rms_norm(blocks[:, 1:].flatten(0, 1), weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis in fp32 (fp64), rounded to x's dtype, times the weight."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)
