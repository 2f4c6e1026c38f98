"""A linear map with an int8 weight: one scale per output row, activations as they come, sums in fp32.

    y[n, o] = scale[o] * (sum over k of weight[o, k] * x[n, k]) + bias[o]

The scale comes after the sum and before the one rounding to x's dtype: unscaled sums pass the range of fp16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash2.ops.backend import check_devices
from dflash2.ops.row_linear import row_linear_reference

__all__ = ["int8_linear", "int8_linear_reference"]

#: Elements of the weight that the reference widens at a time: 64 MiB of fp32.
CHUNK_ELEMENTS = 2**24


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ (weight * scale)^T + bias``. On the CPU its rows are bit-equal for any number of rows.

    Args:
        x: ``[..., K]`` floating point.
        weight: int8 ``[O, K]``, as of `quantize_rows`.
        scale: fp32 ``[O]``.
        bias: ``[O]`` floating point, or None.

    Returns:
        ``[..., O]`` in the dtype of ``x``. Sums are in fp32 (fp64 for fp64 inputs) and rounded once.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check(x, weight, scale, bias)
    return int8_linear_reference(x, weight, scale, bias)


def int8_linear_reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition, in torch; differentiable in ``x``. Shapes as in `int8_linear`, unchecked."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    step = max(1, CHUNK_ELEMENTS // max(1, weight.shape[1]))
    y = torch.cat([row_linear_reference(rows, part.to(dtype)) for part in weight.split(step)], -1) * scale
    y = y if bias is None else y + bias
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def _check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    shapes = f"x {list(x.shape)}, weight {list(weight.shape)}, scale {list(scale.shape)}"
    shapes += "" if bias is None else f", bias {list(bias.shape)}"
    out = (weight.shape[0],) if weight.dim() == 2 else None
    if x.dim() < 1 or scale.shape != out or (bias is not None and bias.shape != out) or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"int8_linear got {shapes}; expected x [..., K], weight [O, K], scale [O], bias [O] or None.")
    if 0 in weight.shape:
        raise ValueError(f"int8_linear got {shapes}; expected O and K >= 1.")
    if weight.dtype != torch.int8 or scale.dtype != torch.float32 or not x.is_floating_point():
        raise ValueError(
            f"int8_linear got x {x.dtype}, weight {weight.dtype}, scale {scale.dtype}; expected floating-point x, an "
            "int8 weight and an fp32 scale (a cast must leave the scale alone)."
        )
    check_devices("int8_linear", x, weight, scale, bias)
