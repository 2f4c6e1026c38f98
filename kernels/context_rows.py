"""Triton kernels of `dflash2.ops.context_rows`: what follows each of its two products.

Both give a row the same bits whatever the number of rows: a program works on one row, and one binary serves any number
of partial sums.
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, wait_for_inputs

AT_A_TIME = tl.constexpr(4)


@triton.jit
def _sum_spans(sums_ptr, at, mask, plane, spans):
    """Partial sums in their order, `AT_A_TIME` loads in flight; what is added past the last one is zero."""
    total = tl.zeros(at.shape, dtype=tl.float32)
    for first in range(0, spans, AT_A_TIME):
        for s in tl.static_range(AT_A_TIME):
            there = mask & (tl.full([1], first + s, tl.int32) < spans)
            total += tl.load(sums_ptr + (first + s) * plane + at, mask=there, other=0.0)
    return total


@triton.jit(do_not_specialize=["rows", "spans"])
def _features_kernel(
    sums_ptr, scale_ptr, weight_ptr, out_ptr, rows, spans, hidden, eps, INT8: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    dtype = out_ptr.dtype.element_ty
    i = tl.arange(0, BLOCK)
    mask = i < hidden
    total = _sum_spans(sums_ptr + row * hidden, i, mask, rows.to(tl.int64) * hidden, spans)
    if INT8:
        total *= tl.load(scale_ptr + i, mask=mask, other=0.0)
    x = total.to(dtype).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * hidden + i, (weight * x).to(dtype), mask=mask)


@triton.jit
def _half(sums_ptr, plane, spans, table_ptr, matrix, at, mask, dtype, SETS: tl.constexpr, INT8: tl.constexpr,
          BIAS: tl.constexpr):  # fmt: skip
    """Half of every head of one product, summed and rounded to the model's dtype, in fp32."""
    total = _sum_spans(sums_ptr, at, mask, plane, spans)
    if INT8:
        scale_ptr = tl.load(table_ptr + 2 * SETS + matrix).to(tl.pointer_type(tl.float32))
        total *= tl.load(scale_ptr + at, mask=mask, other=0.0)
    if BIAS:
        bias_ptr = tl.load(table_ptr + SETS + matrix).to(tl.pointer_type(dtype))
        total += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "spans"])
def _heads_kernel(
    sums_ptr, table_ptr, positions_ptr, pool_rows_ptr, frequencies_ptr, keys_ptr, values_ptr,
    rows, spans, heads, half, layer_stride, eps, rope_scale,
    INT8: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row, layer, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    matrix, layers = 2 * layer + part, tl.num_programs(1)
    dtype = keys_ptr.dtype.element_ty
    head, i = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (i < half)
    at = head * 2 * half + i
    width = heads * 2 * half
    row_width = 2 * layers.to(tl.int64) * width
    sums_ptr += row * row_width + matrix * width
    plane = rows * row_width
    first = _half(sums_ptr, plane, spans, table_ptr, matrix, at, mask, dtype, 2 * layers, INT8, BIAS)
    second = _half(sums_ptr, plane, spans, table_ptr, matrix, at + half, mask, dtype, 2 * layers, INT8, BIAS)
    out_ptr = values_ptr
    if part == 0:
        out_ptr = keys_ptr
        norm_ptr = tl.load(table_ptr + 6 * layers + layer).to(tl.pointer_type(dtype))
        factor = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * half) + eps)[:, None]
        channels = i < half
        first = tl.load(norm_ptr + i, mask=channels, other=0.0).to(tl.float32) * (first * factor).to(dtype).to(
            tl.float32
        )
        second = tl.load(norm_ptr + half + i, mask=channels, other=0.0).to(tl.float32) * (second * factor).to(dtype).to(
            tl.float32
        )
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        angle = tl.load(positions_ptr + row).to(tl.float32) * tl.load(frequencies_ptr + i, mask=channels, other=0.0)
        cos, sin = tl.cos(angle) * rope_scale, tl.sin(angle) * rope_scale
        first, second = first * cos - second * sin, second * cos + first * sin
    out_ptr += layer.to(tl.int64) * layer_stride + tl.load(pool_rows_ptr + row) * width
    tl.store(out_ptr + at, first.to(dtype), mask=mask)
    tl.store(out_ptr + at + half, second.to(dtype), mask=mask)


def features(sums: torch.Tensor, scale: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch: fp32 ``sums [spans, N, H]``, times the scale of an int8 weight, to normed rows ``[N, H]``."""
    spans, rows, hidden = sums.shape
    out = torch.empty(rows, hidden, dtype=weight.dtype, device=sums.device)
    if rows == 0:
        return out
    with torch.cuda.device_of(out):
        _features_kernel[(rows,)](
            sums, sums if scale is None else scale, weight, out, rows, spans, hidden, eps, INT8=scale is not None,
            BLOCK=triton.next_power_of_2(hidden), num_warps=8, **dependent_launch(sums),
        )  # fmt: skip
    return out


def heads(
    sums: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    frequencies: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    *,
    eps: float,
    rope_scale: float,
    int8: bool,
    bias: bool,
) -> None:
    """Launch: fp32 ``sums [spans, N, 2 L nkv hd]``, keys before values in each layer, to rows of the pool ``out``.

    ``table`` holds int64 addresses: 2 L weights, 2 L biases, 2 L scales, L key norms.
    """
    keys, values = out
    layers, _, n, head_dim = keys.shape
    if sums.shape[1] == 0:
        return
    with torch.cuda.device_of(sums):
        _heads_kernel[(sums.shape[1], layers, 2)](
            sums, table, positions, rows, frequencies, keys, values, sums.shape[1], sums.shape[0], n, head_dim // 2,
            keys.stride(0), eps, rope_scale, INT8=int8, BIAS=bias, HEADS=triton.next_power_of_2(n),
            HALF=triton.next_power_of_2(head_dim // 2), num_warps=2, **dependent_launch(sums),
        )  # fmt: skip
