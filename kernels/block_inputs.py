"""Triton kernel of `dflash2.ops.block_inputs`: one program for each block row.

The first kernel of a pass: what was written before it is settled for those that follow.
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, wait_then_let_go
from .residual_norm import store_normed

_POSITIONS = 512


@triton.jit
def _block_inputs_kernel(
    anchors_ptr, starts_ptr, slots_ptr, next_ptr, rows_ptr, embedding_ptr, mask_row_ptr, frequencies_ptr,
    weight_ptr, h_ptr, x_ptr, cos_ptr, sin_ptr, valid_ptr,
    vocab_size, mask_id, hidden, half, eps, embedding_scale, rope_scale, length,
    ANY_CONTEXT: tl.constexpr, MASK_ROW: tl.constexpr, PDL: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    request, i, block_rows = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = (request * block_rows + i).to(tl.int64)
    dtype = h_ptr.dtype.element_ty
    wait_then_let_go(PDL)
    start, slot = tl.load(starts_ptr + request), tl.load(slots_ptr + request)
    anchor = tl.load(anchors_ptr + request)
    in_range = (anchor >= 0) & (anchor < vocab_size)
    token = tl.where(in_range, anchor, 0)
    if i > 0:
        token = mask_id.to(tl.int64)
    channel = tl.arange(0, TILE)
    inside = channel < hidden
    h = tl.load(embedding_ptr + token * hidden + channel, mask=inside, other=0.0).to(dtype)
    if MASK_ROW:
        if token == mask_id:
            h = tl.load(mask_row_ptr + channel, mask=inside, other=0.0).to(dtype)
    h = (h.to(tl.float32) * embedding_scale).to(dtype)
    tl.store(h_ptr + row * hidden + channel, h, mask=inside)
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0)
    store_normed(h.to(tl.float32), weight, x_ptr + row * hidden, channel, inside, hidden, eps)
    f = tl.arange(0, HALF)
    angle = (start + i).to(tl.float32) * tl.load(frequencies_ptr + f, mask=f < half, other=0.0)
    tl.store(cos_ptr + row * half + f, tl.cos(angle) * rope_scale, mask=f < half)
    tl.store(sin_ptr + row * half + f, tl.sin(angle) * rope_scale, mask=f < half)
    if i == 0:
        valid = in_range & (tl.load(next_ptr + slot) == start)
        if not ANY_CONTEXT:
            best = tl.full([BLOCK], -1, tl.int64)
            for at in range(0, length, BLOCK):
                p = at + tl.arange(0, BLOCK)
                best = tl.maximum(
                    best, tl.load(rows_ptr + request * length + p, mask=p < length, other=-1).to(tl.int64)
                )
            valid = valid & (tl.max(best, 0) >= 0)
        tl.store(valid_ptr + request, valid)


def block_inputs(anchors, starts, slots, next_positions, context_rows, embedding, mask_row, frequencies, weight,
                 *, block_rows, vocab_size, mask_id, eps, embedding_scale, rope_scale, any_context,
                 dtype):  # fmt: skip
    """Launch; shapes as in `dflash2.ops.block_inputs`, checked there."""
    requests, hidden, half = anchors.shape[0], embedding.shape[1], frequencies.shape[0]
    rows = requests * block_rows
    h, x = (torch.empty(rows, hidden, dtype=dtype, device=embedding.device) for _ in range(2))
    cos, sin = torch.empty(2, rows, half, dtype=torch.float32, device=embedding.device)
    valid = torch.empty(requests, dtype=torch.bool, device=embedding.device)
    if requests == 0:
        return h, x, cos, sin, valid
    tile = triton.next_power_of_2(hidden)
    _block_inputs_kernel[(requests, block_rows)](
        anchors, starts, slots, next_positions, context_rows, embedding,
        embedding if mask_row is None else mask_row, frequencies, weight, h, x, cos, sin, valid,
        vocab_size, mask_id, hidden, half, eps, embedding_scale, rope_scale, context_rows.shape[1],
        ANY_CONTEXT=any_context, MASK_ROW=mask_row is not None,
        HALF=triton.next_power_of_2(half), BLOCK=_POSITIONS, TILE=tile, num_warps=max(1, min(16, tile // 256)),
        **dependent_launch(embedding),
    )  # fmt: skip
    return h, x, cos, sin, valid
