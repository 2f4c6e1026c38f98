"""Rows as 16-bit integers, in two int8 planes: what integer tensor cores multiply with int8 weights.

x = scale * (256 * hi + lo),   one scale for each GROUP channels of a row
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, wait_for_inputs

GROUP = tl.constexpr(128)
#: 256 * 127 + 127: both halves fit int8.
LIMIT = tl.constexpr(32639.0)


@triton.jit
def int16_planes(x):
    """``x fp32 [R, K]``, one scale a row: hi and lo int8 ``[R, K]``, scale ``[R]``, infinite for NaN and infinity."""
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
    q = tl.floor(x * (1.0 / tl.maximum(largest, 1e-30) * LIMIT)[:, None] + 0.5).to(tl.int32)
    hi = (q + 128) >> 8
    return hi.to(tl.int8), (q - hi * 256).to(tl.int8), largest / LIMIT


@triton.jit
def store_int16_row(x, channel, inside, hi_at, lo_at, scale_at, TILE: tl.constexpr):
    """Groups of ``x fp32 [TILE]`` to the planes and scales of its row; addresses are of the row's channel 0."""
    GROUPS: tl.constexpr = TILE // GROUP
    hi, lo, scale = int16_planes(tl.reshape(tl.where(inside, x, 0.0), [GROUPS, GROUP]))
    tl.store(hi_at + channel, tl.reshape(hi, [TILE]), mask=inside)
    tl.store(lo_at + channel, tl.reshape(lo, [TILE]), mask=inside)
    group = tl.min(channel, 0) // GROUP + tl.arange(0, GROUPS)
    tl.store(scale_at + group, scale, mask=group * GROUP <= tl.max(tl.where(inside, channel, 0), 0))


@triton.jit
def dot_planes(hi_lo, scale, w, total):
    """``total [O, R] += w [O, K] . x^T`` of rows in planes ``[2 R, K]``: whole numbers, so no weight is converted."""
    sums = tl.dot(w, tl.trans(hi_lo), out_dtype=tl.int32)
    sums = tl.permute(tl.reshape(sums, [w.shape[0], 2, hi_lo.shape[0] // 2]), (0, 2, 1))
    hi, lo = tl.split(sums)
    return total + (hi.to(tl.float32) * 256.0 + lo.to(tl.float32)) * scale[None, :]


@triton.jit
def dot_int8(x, w, total):
    """The same for rows ``x [R, K]`` in floating point: all K are one group."""
    hi, lo, scale = int16_planes(x.to(tl.float32))
    hi_lo = tl.reshape(tl.permute(tl.join(hi, lo), (2, 0, 1)), [2 * x.shape[0], x.shape[1]])
    return dot_planes(hi_lo, scale, w, total)


@triton.jit
def _int16_rows_kernel(
    x_ptr, planes_ptr, scale_ptr, rows, width, x_stride, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_inputs(PDL)
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channel < width
    x = tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    hi_at = planes_ptr + row * width
    lo_at = hi_at + tl.cast(rows, tl.int64) * width
    store_int16_row(x, channel, inside, hi_at, lo_at, scale_ptr + row * (width // GROUP), TILE)


def int16_rows(x):
    """Launch: ``x [N, K]``, rows contiguous, K a multiple of GROUP, to int8 ``[2, N, K]`` and fp32 ``[N, K/GROUP]``."""
    rows, width = x.shape
    planes = torch.empty(2, rows, width, dtype=torch.int8, device=x.device)
    scale = torch.empty(rows, width // GROUP.value, dtype=torch.float32, device=x.device)
    if rows:
        tile = min(2048, triton.next_power_of_2(width))
        _int16_rows_kernel[(rows, triton.cdiv(width, tile))](
            x, planes, scale, rows, width, x.stride(0), TILE=tile, num_warps=4, **dependent_launch(x)
        )
    return planes, scale
