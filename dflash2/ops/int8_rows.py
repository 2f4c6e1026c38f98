"""Weight-only int8: every output row of a weight as whole numbers in [-127, 127] and one scale.

scale[v] = max |weight[v, :]| / 127,    q[v, h] = round(weight[v, h] / scale[v]),    weight[v, h] ~ scale[v] q[v, h]

One function, so that the shared head and the drafter's own linears are rounded alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["quantize_rows"]


def quantize_rows(weight: Tensor, *, chunk_rows: int = 8192) -> tuple[Tensor, Tensor]:
    """Round a weight to int8, symmetric, with one scale for each output row.

    Args:
        weight: floating ``[out, in]``, finite; read only.
        chunk_rows: rows taken to fp32 at a time, which bounds the memory this needs beside the result.

    Returns:
        int8 ``[out, in]`` within [-127, 127] and scale fp32 ``[out]``, each element off by at most half a scale. A row
        of zeros has scale 0. A row with NaN or infinity has a scale that is not finite, and its integers mean nothing.

    Raises:
        ValueError: not a floating-point matrix.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"quantize_rows got {list(weight.shape)} {weight.dtype}; expected floating point [out, in].")
    weight = weight.detach()
    integers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
    if weight.shape[1] == 0:
        return integers, scale
    for i in range(0, weight.shape[0], chunk_rows):
        rows = weight[i : i + chunk_rows].float()
        largest = rows.abs().amax(-1)
        # By a tensor, for the same bits on every device: CUDA divides by a number as it multiplies by its inverse.
        step = largest / torch.full_like(largest, 127)
        scale[i : i + chunk_rows] = step
        # Clamped, because a step below the normal numbers is itself rounded and the quotient may pass 127.
        quotient = rows / torch.where(step > 0, step, 1.0)[:, None]
        integers[i : i + chunk_rows] = quotient.round_().nan_to_num_(0.0).clamp_(-127, 127).to(torch.int8)
    return integers, scale
