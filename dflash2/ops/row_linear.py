"""A linear map whose rows do not depend, to the bit, on how many rows come in one call.

y[n, o] = sum over k of weight[o, k] * x[n, k] + bias[o]
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from dflash2.ops.backend import Backend, choose_backend
from dflash2.ops.launch import launch_settings

__all__ = ["ROW_TILE", "product_settings", "row_linear", "row_linear_reference"]

#: BLAS libraries switch to other code for few rows (gemv for 1, edge kernels below 8), which rounds differently.
#: From whole tiles of 16 rows on, a row's result was bit-equal for 16 to 5000 rows (MKL and oneDNN, 1 and 2 threads).
ROW_TILE = 16
#: Up to 16^3 multiplications torch takes its own loop and not oneDNN (bf16). Only toy weights, up to 256 elements, can
#: fall below it with 16 rows; they get more.
SMALL_PRODUCT = 16**3


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: Backend = "auto") -> Tensor:
    """``x @ weight^T + bias``. Chunked prefill, decoding one token at a time and one long append store the same bits.

    Args:
        x: ``[N, K]`` floating point.
        weight: ``[O, K]``, same dtype.
        bias: ``[O]``, same dtype, or None.
        backend: see `choose_backend`. A row's bits depend on the backend and the device, never on N.

    Returns:
        ``[N, O]`` in the dtype of ``x``; sums are in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend cannot run here.
    """
    _check(x, weight, bias)
    if choose_backend(backend, x, weight, *(() if bias is None else (bias,)), dots=True) == "torch":
        return row_linear_reference(x, weight, bias)
    from dflash2.kernels import row_linear as kernel

    x = x if x.stride(-1) == 1 else x.contiguous()
    sums = kernel.span_sums(x, weight.contiguous(), product_settings(x, weight.shape[0]))
    return kernel.finish(sums, bias, x.dtype)


def row_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition, in torch, with rows padded to whole tiles; differentiable. Shapes as in `row_linear`."""
    n = x.shape[0]
    least = SMALL_PRODUCT // weight.numel() + 1
    missing = -n % ROW_TILE if n >= least else least - n + -least % ROW_TILE
    padded = F.pad(x, (0, 0, 0, missing)) if missing else x
    return F.linear(padded, weight, bias)[:n]


def product_settings(x: Tensor, outputs: int) -> dict[str, int]:
    """How to launch the product of ``x [N, K]`` with weights of ``outputs`` rows in all."""
    from dflash2.kernels import row_linear as kernel

    rows, inputs = max(1, x.shape[0]), x.shape[1]
    defaults = kernel.defaults(rows, x.device)
    return launch_settings("row_linear", defaults, x.device, rows=rows, outputs=outputs, inputs=inputs)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    tensors = [x, weight] if bias is None else [x, weight, bias]
    shapes = "x {}, weight {}, bias {}".format(*(list(t.shape) for t in tensors), *([None] * (3 - len(tensors))))
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(f"row_linear got {shapes}; expected x [N, K] and weight [O, K], O and K >= 1.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"row_linear got {shapes}; expected one bias for each row of the weight.")
    if len({t.dtype for t in tensors}) > 1 or len({t.device for t in tensors}) > 1:
        found = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        raise ValueError(f"row_linear got {found}; expected one dtype and one device.")
