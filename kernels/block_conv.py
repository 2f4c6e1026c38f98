"""Triton kernel of `dflash2.ops.block_conv`: one program for each row and tile of channels."""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, let_go, wait_for_inputs
from .int16_rows import GROUP, store_int16_row
from .residual_norm import load_sum, load_taps

_TILE = 1024


@triton.jit
def _block_conv_kernel(
    x_ptr, base_ptr, delta_ptr, y_ptr, scale_ptr, after_ptr, rows, block_rows, hidden,
    GROUP_SIZE: tl.constexpr, SPLIT: tl.constexpr, TAPS: tl.constexpr, PLANES: tl.constexpr, SETTLED: tl.constexpr,
    PDL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channel < hidden
    group, groups = channel // GROUP_SIZE, hidden // GROUP_SIZE
    first_of_group = inside & (channel % GROUP_SIZE == 0)
    dtype = x_ptr.dtype.element_ty
    let_go(PDL)
    if not SETTLED:
        wait_for_inputs(PDL)
    taps = load_taps(base_ptr, channel, inside, hidden, TAPS)
    if SETTLED:
        wait_for_inputs(PDL)
    plane = tl.cast(rows, tl.int64) * 2 * TAPS * groups
    y = tl.zeros([TILE], tl.float32)
    for o in tl.static_range(TAPS):
        mask = channel < tl.where(row % block_rows >= o, hidden, 0)
        at = row * 2 * TAPS * groups + o * groups + group
        delta = load_sum(delta_ptr, at, plane, mask, SPLIT)
        after = load_sum(delta_ptr, at + TAPS * groups, plane, first_of_group, SPLIT)
        tap = taps[o].to(tl.float32) + delta.to(dtype).to(tl.float32)
        x = tl.load(x_ptr + (row - o) * hidden + channel, mask=mask, other=0.0).to(tl.float32)
        y += tl.where(mask, tap * x, 0.0)
        tl.store(after_ptr + (row * TAPS + o) * groups + group, after.to(dtype), mask=first_of_group)
    if PLANES:
        hi_at = y_ptr + row * hidden
        lo_at = hi_at + tl.cast(rows, tl.int64) * hidden
        y = y.to(dtype).to(tl.float32)
        store_int16_row(y, channel, inside, hi_at, lo_at, scale_ptr + row * (hidden // GROUP), TILE)
    else:
        tl.store(y_ptr + row * hidden + channel, y.to(dtype), mask=inside)


def block_conv(x, base, delta, block_rows, planes, settled):
    """Launch; shapes as in `dflash2.ops.block_conv`, checked there. Returns y or planes, scales, and the rest.

    ``settled``: of the taps, as in `dependent_launch`.
    """
    (rows, hidden), (split, _, width), taps = x.shape, delta.shape, base.shape[0]
    groups = width // (2 * taps)
    y, scale = torch.empty_like(x) if not planes else x.new_empty(2, rows, hidden, dtype=torch.int8), None
    if planes:
        scale = x.new_empty(rows, hidden // GROUP.value, dtype=torch.float32)
    after = x.new_empty(rows, taps, groups)
    if rows == 0:
        return y, scale, after
    tile = min(_TILE, triton.next_power_of_2(hidden))
    _block_conv_kernel[(rows, triton.cdiv(hidden, tile))](
        x, base, delta, y, scale if planes else x, after, rows, block_rows, hidden,
        GROUP_SIZE=hidden // groups, SPLIT=split, TAPS=taps, PLANES=planes, SETTLED=settled, TILE=tile,
        num_warps=max(1, tile // 256), **dependent_launch(x),
    )  # fmt: skip
    return y, scale, after
