"""Triton kernel of `dflash2.ops.residual_norm`: one program for each row."""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, let_go, wait_for_inputs

#: Channels at a time: a row of 5,120 in five steps without an idle thread.
_TILE = 1024


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
def _residual(
    h_ptr, a_ptr, bias_ptr, delta_ptr, taps, row, channel, inside, rows, block_rows, hidden,
    GROUP_SIZE: tl.constexpr, SPLIT: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """New residual stream of one row at some channels, in fp32, rounded."""
    dtype = h_ptr.dtype.element_ty
    plane = tl.cast(rows, tl.int64) * hidden
    update = tl.zeros(channel.shape, tl.float32)
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
    return (h + update.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _residual_norm_kernel(
    h_ptr, a_ptr, bias_ptr, base_ptr, delta_ptr, weight_ptr, h_out_ptr, x_ptr, finite_ptr,
    rows, block_rows, hidden, eps,
    GROUP_SIZE: tl.constexpr, SPLIT: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr,
    SETTLED: tl.constexpr, PDL: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dtype = h_ptr.dtype.element_ty
    let_go(PDL)
    if not SETTLED:
        wait_for_inputs(PDL)
    taps, weights = (), ()
    for t in tl.static_range(TILES):
        channel = t * TILE + tl.arange(0, TILE)
        taps += (load_taps(base_ptr, channel, channel < hidden, hidden, TAPS),)
        weights += (tl.load(weight_ptr + channel, mask=channel < hidden, other=0.0),)
    if SETTLED:
        wait_for_inputs(PDL)
    parts = ()
    squares, damage = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for t in tl.static_range(TILES):
        channel = t * TILE + tl.arange(0, TILE)
        h = _residual(
            h_ptr, a_ptr, bias_ptr, delta_ptr, taps[t], row, channel, channel < hidden, rows, block_rows, hidden,
            GROUP_SIZE, SPLIT, TAPS, BIAS,
        )  # fmt: skip
        parts += (h,)
        squares += h * h
        damage += h - h
    scale = tl.rsqrt(tl.sum(squares, 0) / hidden + eps)
    out = row
    if LAST:
        block, i = row // block_rows, row % block_rows
        out = block * (block_rows - 1) + i - 1
        # Infinite or NaN anywhere in the block: its drafts mean nothing. inf - inf and NaN are not zero.
        if tl.sum(damage, 0) != 0.0:
            tl.store(finite_ptr + block, False)
    for t in tl.static_range(TILES):
        channel = t * TILE + tl.arange(0, TILE)
        inside = channel < hidden
        x = weights[t].to(tl.float32) * (parts[t] * scale).to(dtype).to(tl.float32)
        if LAST:
            kept = channel < tl.where(row % block_rows > 0, hidden, 0)
            tl.store(x_ptr + out * hidden + channel, x.to(dtype), mask=kept)
        else:
            tl.store(h_out_ptr + row * hidden + channel, parts[t].to(dtype), mask=inside)
            tl.store(x_ptr + row * hidden + channel, x.to(dtype), mask=inside)


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
    tile = min(_TILE, triton.next_power_of_2(hidden))
    _residual_norm_kernel[(rows,)](
        h, a, h if bias is None else bias, h if base is None else base, h if delta is None else delta, weight, h_out, x,
        finite if last else h, rows, block_rows, hidden, eps,
        GROUP_SIZE=hidden if delta is None else hidden // delta.shape[-1], SPLIT=split, TAPS=taps,
        BIAS=bias is not None, LAST=last, SETTLED=settled, TILE=tile, TILES=triton.cdiv(hidden, tile),
        num_warps=max(1, tile // 128),
        **dependent_launch(h),
    )  # fmt: skip
    return h_out, x
