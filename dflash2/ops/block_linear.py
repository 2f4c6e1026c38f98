"""Linear maps of block rows: so few rows that reading the weights is all the time there is.

    y[n, o] = scale[o] * sum over k of x[n, k] * weight[o, k]

Sums are fp32 and may come in parts, which the operation that reads them adds up: a small weight would otherwise not
give every multiprocessor of a GPU something to read. With int8 weights the kernels multiply whole numbers, so that no
weight is converted: rows come as `Int16Rows`, or are made so on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.ops.backend import Backend, choose_backend
from dflash2.ops.int16_rows import Int16Rows
from dflash2.ops.launch import launch_settings

__all__ = ["MOST_ROWS", "block_linear", "block_linear_reference", "gated_linear", "gated_linear_reference"]

#: With more, products are cuBLAS's, of int8 weights made 16-bit: reading the weights no longer hides the arithmetic.
MOST_ROWS = 64

Scales = Sequence[Tensor | None]


def block_linear(
    x: Tensor | Int16Rows, weights: Sequence[Tensor], scales: Scales, *, settled: bool = False,
    backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Products of the same rows with one to three weights, side by side.

    Args:
        x: ``[N, K]`` floating point, contiguous, or such rows as `Int16Rows` for int8 weights.
        weights: each ``[O_i, K]``, contiguous, all in x's dtype or all int8.
        scales: fp32 ``[O_i]`` of int8 weights, else None.
        settled: the weights were written before a `block_inputs` that came before this: the kernel may read them
            while what came in between still runs.
        backend: ``"auto"`` (kernels on a GPU), ``"torch"`` or ``"triton"``.

    Returns:
        ``[S, N, sum(O_i)]``; the sum over S, in its order, is the result. fp32, or x's dtype with S = 1 where cuBLAS
        took many rows.

    Raises:
        ValueError: shapes or dtypes do not fit, or the backend cannot run here.
    """
    _check("block_linear", x, weights, scales)
    rows, x_scale, _ = _parts(x)
    if choose_backend(backend, rows if x_scale is None else x_scale, dots=True) == "torch":
        return block_linear_reference(x, weights, scales)
    n, inner = rows.shape[-2:]
    if n > MOST_ROWS and x_scale is None and backend == "auto":
        return torch.cat([_many_rows(rows, w, s) for w, s in zip(weights, scales, strict=True)], -1)[None]
    from dflash2.kernels import block_linear as kernel

    sizes = {"rows": max(n, 1), "inner": inner, "out": sum(w.shape[0] for w in weights)}
    settings = launch_settings(
        "block_linear", kernel.DEFAULTS, rows.device, **sizes, weight_bytes=weights[0].element_size()
    )
    return kernel.block_linear(rows, x_scale, list(weights), list(scales), settled, settings)


def block_linear_reference(x: Tensor | Int16Rows, weights: Sequence[Tensor], scales: Scales) -> Tensor:
    """The definition, in torch: fp32 (fp64 for fp64 rows), S = 1."""
    return torch.cat([_product(x, w, s) for w, s in zip(weights, scales, strict=True)], -1)[None]


def gated_linear(
    x: Tensor | Int16Rows, gate: Tensor, up: Tensor, scales: Scales, *, settled: bool = False,
    backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """``silu(x gate^T) * (x up^T)``, the first half of a gated MLP (Shazeer, arXiv 2002.05202, section 2).

    Args:
        x: ``[N, K]`` floating point, contiguous, or such rows as `Int16Rows` for int8 weights.
        gate, up: ``[O, K]``, contiguous, in x's dtype or int8.
        scales: fp32 ``[O]`` of the two when they are int8, else None twice.
        settled, backend: as for `block_linear`.

    Returns:
        ``[N, O]`` in x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit, or the backend cannot run here.
    """
    _check("gated_linear", x, (gate, up), scales)
    rows, x_scale, dtype = _parts(x)
    if choose_backend(backend, rows if x_scale is None else x_scale, dots=True) == "torch":
        return gated_linear_reference(x, gate, up, scales)
    n, inner = rows.shape[-2:]
    if n > MOST_ROWS and x_scale is None and backend == "auto":
        return F.silu(_many_rows(rows, gate, scales[0])) * _many_rows(rows, up, scales[1])
    from dflash2.kernels import block_linear as kernel

    sizes = {"rows": max(n, 1), "inner": inner, "out": gate.shape[0]}
    settings = launch_settings(
        "gated_linear", kernel.GATED_DEFAULTS, rows.device, **sizes, weight_bytes=gate.element_size()
    )
    return kernel.gated_linear(rows, x_scale, gate, up, list(scales), dtype, settled, settings)


def gated_linear_reference(x: Tensor | Int16Rows, gate: Tensor, up: Tensor, scales: Scales) -> Tensor:
    """The definition, in torch, rounded once."""
    return (F.silu(_product(x, gate, scales[0])) * _product(x, up, scales[1])).to(x.dtype)


def _many_rows(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """The product of cuBLAS in x's dtype. An int8 weight is exact in 16 bits; its scales follow."""
    y = F.linear(x, weight.to(x.dtype))
    return y if scale is None else (y.float() * scale).to(x.dtype)


def _parts(x: Tensor | Int16Rows) -> tuple[Tensor, Tensor | None, torch.dtype]:
    """Rows or planes, scales of planes, dtype of the rows."""
    return (x.planes, x.scale, x.dtype) if isinstance(x, Int16Rows) else (x, None, x.dtype)


def _product(x: Tensor | Int16Rows, weight: Tensor, scale: Tensor | None) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.float() if isinstance(x, Int16Rows) else x
    y = F.linear(rows.to(dtype), weight.to(dtype))
    return y if scale is None else y * scale.to(dtype)


def _check(name: str, x: Tensor | Int16Rows, weights: Sequence[Tensor], scales: Scales) -> None:
    rows, x_scale, dtype = _parts(x)
    found = f"x {list(rows.shape)} {rows.dtype}, weights {[(list(w.shape), w.dtype) for w in weights]}"
    if rows.dim() != (2 if x_scale is None else 3) or not 1 <= len(weights) <= 3 or len(scales) != len(weights):
        raise ValueError(
            f"{name} got {found}: expected x [N, K], one to three weights [O, K] and a scale or None each."
        )
    if any(w.dim() != 2 or w.shape[1] != rows.shape[-1] for w in weights):
        raise ValueError(f"{name} got {found}: all must have {rows.shape[-1]} columns.")
    for w, s in zip(weights, scales, strict=True):
        if w.dtype != (dtype if s is None else torch.int8) or (s is not None and s.shape != w.shape[:1]):
            raise ValueError(f"{name} got {found}: weights in x's dtype without scales, or int8 with fp32 scales [O].")
    if len({w.dtype for w in weights}) != 1 or (x_scale is not None and scales[0] is None):
        raise ValueError(f"{name} got {found}: all weights in one dtype, and Int16Rows with int8 weights.")
