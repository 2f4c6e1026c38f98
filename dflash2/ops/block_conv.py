"""The convolution before a sublayer, with the sums of its coefficients (see `dflash2.ops.grouped_conv`)."""

from __future__ import annotations

from torch import Tensor

from dflash2.ops.backend import Backend, choose_backend
from dflash2.ops.grouped_conv import grouped_conv_reference
from dflash2.ops.int16_rows import Int16Rows, int16_rows

__all__ = ["block_conv", "block_conv_reference"]


def block_conv(
    x: Tensor, base: Tensor, delta: Tensor, block_rows: int, *, int16: bool = False, settled: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor | Int16Rows, Tensor]:  # fmt: skip
    """Convolve the rows of blocks, and round the coefficients that the convolution after the sublayer will use.

    Args:
        x: floating ``[N, H]``, contiguous; N is a multiple of ``block_rows``.
        base: floating ``[K, H]``.
        delta: ``[S, N, 2*K*H/G]`` from `block_linear`: both sides' coefficients, this one's first.
        block_rows: n, rows of a block.
        int16: return the rows as `Int16Rows`; H is a multiple of its group.
        settled: of ``base``, as in `block_linear`.
        backend: ``"auto"`` (the kernel on a GPU), ``"torch"`` or ``"triton"``.

    Returns:
        ``[N, H]`` and the other side's coefficients ``[N, K, H/G]``, both in x's dtype.

    Raises:
        ValueError: the backend cannot run here.
    """
    if choose_backend(backend, x, base) == "torch":
        y, after = block_conv_reference(x, base, delta, block_rows)
        return int16_rows(y) if int16 else y, after
    from dflash2.kernels import block_conv as kernel

    y, scale, after = kernel.block_conv(x, base, delta, block_rows, int16, settled)
    return y if scale is None else Int16Rows(y, scale, x.dtype), after


def block_conv_reference(x: Tensor, base: Tensor, delta: Tensor, block_rows: int) -> tuple[Tensor, Tensor]:
    """The definition, in torch."""
    sides = delta.sum(0).to(x.dtype).unflatten(-1, (2, base.shape[0], -1))
    blocks = (-1, block_rows)
    y = grouped_conv_reference(x.unflatten(0, blocks), base, sides[:, 0].unflatten(0, blocks))
    return y.flatten(0, 1), sides[:, 1]
