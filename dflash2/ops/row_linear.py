"""A linear map whose rows do not depend, to the bit, on how many rows come in one call."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

__all__ = ["ROW_TILE", "row_linear"]

#: BLAS libraries switch to other code for few rows (gemv for 1, edge kernels below 8), which rounds differently.
#: From whole tiles of 16 rows on, a row's result was bit-equal for 16 to 5000 rows (MKL and oneDNN, 1 and 2 threads).
ROW_TILE = 16
#: Up to 16^3 multiplications torch takes its own loop and not oneDNN (bf16). Only toy weights, up to 256 elements, can
#: fall below it with 16 rows; they get more.
SMALL_PRODUCT = 16**3


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [N, in] @ weight[out, in]^T + bias [out]`` with rows padded to whole tiles.

    Chunked prefill, decoding one token at a time and one long append must store the same bits.
    """
    n = x.shape[0]
    least = SMALL_PRODUCT // weight.numel() + 1
    missing = -n % ROW_TILE if n >= least else least - n + -least % ROW_TILE
    padded = F.pad(x, (0, 0, 0, missing)) if missing else x
    return F.linear(padded, weight, bias)[:n]
