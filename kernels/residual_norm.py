"""Triton kernel of `dflash2.ops.residual_norm`: one program for each row."""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, let_go, wait_for_inputs


@triton.jit
def load_sum(ptr, at, plane, mask, SPLIT: tl.constexpr):
    """Partial sums ``[SPLIT, ...]`` added up in their order; ``plane`` elements lie between them."""
    total = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    for s in tl.static_range(1, SPLIT):
        total += tl.load(ptr + s * plane + at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def store_normed(h, weight, x_at, channel, inside, hidden, eps):
    """RMSNorm of ``h [TILE]`` (fp32 holding rounded values), rounded before and after the weight as in torch."""
    dtype = x_at.dtype.element_ty
    y = h * tl.rsqrt(tl.sum(h * h, 0) / hidden + eps)
    tl.store(x_at + channel, (weight.to(tl.float32) * y.to(dtype).to(tl.float32)).to(dtype), mask=inside)


@triton.jit
def load_taps(base_ptr, channel, inside, hidden, TAPS: tl.constexpr):
    """The taps of a convolution at some channels, one tensor each."""
    taps = ()
    for o in tl.static_range(TAPS):
        taps += (tl.load(base_ptr + o * hidden + channel, mask=inside, other=0.0),)
    return taps


@triton.jit
def _residual_norm_kernel(
    h_ptr, a_ptr, bias_ptr, base_ptr, delta_ptr, weight_ptr, h_out_ptr, x_ptr, finite_ptr,
    rows, block_rows, hidden, eps,
    GROUP_SIZE: tl.constexpr, SPLIT: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr,
    SETTLED: tl.constexpr, PDL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, TILE)
    inside = channel < hidden
    dtype = h_ptr.dtype.element_ty
    let_go(PDL)
    if not SETTLED:
        wait_for_inputs(PDL)
    taps = load_taps(base_ptr, channel, inside, hidden, TAPS)
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0)
    if SETTLED:
        wait_for_inputs(PDL)
    plane = tl.cast(rows, tl.int64) * hidden
    update = tl.zeros([TILE], tl.float32)
    # Row 0 of a block has no row before it: taps that reach further back are not loaded.
    for o in tl.static_range(TAPS if TAPS > 0 else 1):
        mask = channel < tl.where(row % block_rows >= o, hidden, 0)
        a = load_sum(a_ptr, (row - o) * hidden + channel, plane, mask, SPLIT)
        if BIAS:
            a += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
        a = a.to(dtype).to(tl.float32)
        if TAPS > 0:
            delta_at = delta_ptr + (row * TAPS + o) * (hidden // GROUP_SIZE) + channel // GROUP_SIZE
            tap = taps[o].to(tl.float32) + tl.load(delta_at, mask=mask, other=0.0).to(tl.float32)
            update += tl.where(mask, tap * a, 0.0)
        else:
            update = a
    h = tl.load(h_ptr + row * hidden + channel, mask=inside, other=0.0).to(tl.float32)
    h = (h + update.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    if LAST:
        block, i = row // block_rows, row % block_rows
        out = block * (block_rows - 1) + i - 1
        if i > 0:
            store_normed(h, weight, x_ptr + out * hidden, channel, inside, hidden, eps)
        # Infinite or NaN anywhere in the block: its drafts mean nothing. inf - inf and NaN are not zero.
        if tl.sum(h - h, 0) != 0.0:
            tl.store(finite_ptr + block, False)
    else:
        tl.store(h_out_ptr + row * hidden + channel, h.to(dtype), mask=inside)
        store_normed(h, weight, x_ptr + row * hidden, channel, inside, hidden, eps)


def residual_norm(h, a, bias, base, delta, weight, eps, block_rows, finite, settled):
    """Launch; shapes as in `dflash2.ops.residual_norm`, checked there. With ``finite`` rows 1.. are normed alone.

    ``settled``: of weights and taps, as in `dependent_launch`.
    """
    split, rows, hidden = a.shape
    taps = 0 if base is None else base.shape[0]
    last = finite is not None
    h_out = h if last else torch.empty_like(h)
    x = torch.empty(rows - rows // block_rows if last else rows, hidden, dtype=h.dtype, device=h.device)
    if rows == 0:
        return h_out, x
    tile = triton.next_power_of_2(hidden)
    _residual_norm_kernel[(rows,)](
        h, a, h if bias is None else bias, h if base is None else base, h if delta is None else delta, weight, h_out, x,
        finite if last else h, rows, block_rows, hidden, eps,
        GROUP_SIZE=hidden if delta is None else hidden // delta.shape[-1], SPLIT=split, TAPS=taps,
        BIAS=bias is not None, LAST=last, SETTLED=settled, TILE=tile, num_warps=max(1, min(16, tile // 256)),
        **dependent_launch(h),
    )  # fmt: skip
    return h_out, x
