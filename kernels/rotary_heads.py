"""Triton kernel of `dflash2.ops.rotary_heads`: one program of one warp for each row and head."""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, wait_for_inputs
from .residual_norm import load_sum


@triton.jit
def _half(ptr, at, plane, bias_ptr, bias_at, mask, dtype, SPLIT: tl.constexpr, BIAS: tl.constexpr):
    total = load_sum(ptr, at, plane, mask, SPLIT)
    if BIAS:
        total += tl.load(bias_ptr + bias_at, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _rotary_heads_kernel(
    qkv_ptr, q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
    rows, q_heads, kv_heads, half, eps,
    SPLIT: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype = q_ptr.dtype.element_ty
    norm_ptr, bias_ptr, out_ptr, local, heads = q_norm_ptr, q_bias_ptr, q_ptr, head, q_heads
    if head >= q_heads:
        norm_ptr, bias_ptr, out_ptr, local, heads = k_norm_ptr, k_bias_ptr, k_ptr, head - q_heads, kv_heads
        if local >= kv_heads:
            bias_ptr, out_ptr, local = v_bias_ptr, v_ptr, local - kv_heads
    i = tl.arange(0, HALF)
    mask = i < half
    wait_for_inputs(PDL)
    width = (q_heads + 2 * kv_heads) * 2 * half
    at = row * width + head * 2 * half + i
    plane = tl.cast(rows, tl.int64) * width
    first = _half(qkv_ptr, at, plane, bias_ptr, local * 2 * half + i, mask, dtype, SPLIT, BIAS)
    second = _half(qkv_ptr, at + half, plane, bias_ptr, local * 2 * half + half + i, mask, dtype, SPLIT, BIAS)
    if head < q_heads + kv_heads:
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * half) + eps)
        first = tl.load(norm_ptr + i, mask=mask, other=0.0).to(tl.float32) * (first * scale).to(dtype).to(tl.float32)
        second = tl.load(norm_ptr + half + i, mask=mask, other=0.0).to(tl.float32) * (second * scale).to(dtype).to(
            tl.float32
        )
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        cos = tl.load(cos_ptr + row * half + i, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + row * half + i, mask=mask, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    out = out_ptr + (row * heads + local) * 2 * half + i
    tl.store(out, first.to(dtype), mask=mask)
    tl.store(out + half, second.to(dtype), mask=mask)


def rotary_heads(qkv, biases, q_norm, k_norm, eps, cos, sin, q_heads, kv_heads):
    """Launch; shapes as in `dflash2.ops.rotary_heads`, checked there."""
    split, rows, width = qkv.shape
    head_dim = width // (q_heads + 2 * kv_heads)
    q, k, v = (torch.empty(rows, n, head_dim, dtype=q_norm.dtype, device=qkv.device)
               for n in (q_heads, kv_heads, kv_heads))  # fmt: skip
    if rows == 0:
        return q, k, v
    q_bias, k_bias, v_bias = biases or (q_norm, q_norm, q_norm)
    _rotary_heads_kernel[(rows, q_heads + 2 * kv_heads)](
        qkv, q_bias, k_bias, v_bias, q_norm, k_norm, cos, sin, q, k, v, rows, q_heads, kv_heads, head_dim // 2, eps,
        SPLIT=split, BIAS=biases is not None, HALF=triton.next_power_of_2(head_dim // 2), num_warps=1,
        **dependent_launch(qkv),
    )  # fmt: skip
    return q, k, v
