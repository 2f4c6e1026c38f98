"""Triton kernels of `dflash2.ops.block_linear`: a few rows times large weights, bound by reading the weights once."""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, inputs_ready, let_go, prefetch_rows, wait_for_inputs
from .int16_rows import GROUP, dot_int8, dot_planes
from .shared_memory import shared_bytes

DEFAULTS = {
    "BLOCK_O": 64,
    "BLOCK_K": 128,
    "SPLIT": 4,
    "WEIGHTS_FIRST": 1,
    "PREFETCH": 1024,
    "EARLY": 0,
    "num_warps": 4,
    "num_stages": 4,
}
GATED_DEFAULTS = {
    "BLOCK_O": 32, "BLOCK_K": 128, "WEIGHTS_FIRST": 1, "PREFETCH": 1024, "EARLY": 0, "num_warps": 4, "num_stages": 4
}  # fmt: skip
#: Of shared memory, for what the compiler adds; and the most that one program gets, so that another fits beside it.
_SPARE_BYTES, _MOST_BYTES = 8 * 1024, 160 * 1024
#: BLOCK_O, BLOCK_K, WEIGHTS_FIRST, EARLY, warps, stages.
_TILES = (
    (32, 128, 0, 0, 2, 6), (64, 128, 1, 0, 4, 4), (64, 256, 1, 0, 4, 3), (64, 256, 1, 0, 4, 4), (32, 128, 0, 1, 2, 7),
    (32, 128, 0, 1, 2, 9), (64, 128, 1, 1, 4, 4), (64, 128, 1, 1, 4, 6), (64, 128, 1, 1, 4, 8), (64, 256, 1, 1, 4, 4),
    (64, 256, 1, 1, 4, 6),
)  # fmt: skip
CANDIDATES = [
    {"BLOCK_O": o, "BLOCK_K": k, "SPLIT": split, "WEIGHTS_FIRST": first, "PREFETCH": 512, "EARLY": early,
     "num_warps": warps, "num_stages": stages}
    for o, k, first, early, warps, stages in _TILES for split in (1, 2, 3, 4, 6, 10)
]  # fmt: skip
GATED_CANDIDATES = [
    {"BLOCK_O": o, "BLOCK_K": k, "WEIGHTS_FIRST": first, "PREFETCH": 512, "EARLY": early, "num_warps": warps,
     "num_stages": stages}
    for o, k, first, early, warps, stages in (
        (16, 256, 0, 0, 2, 4), (16, 128, 0, 0, 2, 6), (32, 128, 1, 0, 4, 4), (32, 128, 1, 0, 4, 6),
        (64, 128, 1, 0, 4, 3), (64, 128, 1, 0, 8, 4), (16, 256, 0, 1, 2, 5), (16, 128, 0, 1, 2, 8),
        (32, 128, 1, 1, 4, 4), (32, 128, 1, 1, 4, 8), (64, 128, 1, 1, 4, 4), (64, 128, 1, 1, 8, 3),
    )
]  # fmt: skip


@triton.jit
def _step(x, scale, w, total, INT8: tl.constexpr, PLANES: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    """``total += x [R, K] . w [O, K]^T``, as ``[O, R]`` when the weights come first."""
    if PLANES:
        total = dot_planes(x, scale, w, total)
    elif INT8:
        total = dot_int8(x, w, total)
    elif WEIGHTS_FIRST:
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    return total


@triton.jit
def _sums(
    x_ptr, x_scale_ptr, w_at, row0, rows, inner, begin, end,
    INT8: tl.constexpr, PLANES: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    """Products of rows ``row0 ..`` with weight rows at ``w_at [W, 1]`` over columns ``begin .. end``: ``[R, W]``.

    EARLY: rows come through registers, one step behind the weights. The pipeline then holds weights alone, which it
    asks for before the rows are there; its first step multiplies zeros.
    """
    row = row0 + tl.arange(0, BLOCK_R)
    if WEIGHTS_FIRST:
        total = tl.zeros([BLOCK_W, BLOCK_R], tl.float32)
    else:
        total = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    if PLANES:
        half = tl.arange(0, 2 * BLOCK_R)
        x_row = row0 + half % BLOCK_R
        x_at = x_ptr + ((half // BLOCK_R * tl.cast(rows, tl.int64) + x_row) * inner)[:, None]
        inside = (x_row < rows)[:, None]
        x_scale_at = x_scale_ptr + row.to(tl.int64) * (inner // GROUP)
    else:
        x_at = x_ptr + (row.to(tl.int64) * inner)[:, None]
        inside = (row < rows)[:, None]
    scale = tl.zeros([BLOCK_R], tl.float32)
    if EARLY:
        x = tl.zeros([2 * BLOCK_R if PLANES else BLOCK_R, BLOCK_K], x_ptr.dtype.element_ty)
        k = tl.arange(0, BLOCK_K)[None, :]
        for k0 in range(begin - BLOCK_K, end, BLOCK_K):
            begun = tl.full([1, 1], k0, tl.int32) >= begin
            w = tl.load(w_at + k0 + k, mask=begun, other=0, eviction_policy="evict_first")
            k1 = k0 + BLOCK_K + inputs_ready(PDL)
            next_x = tl.load(x_at + k1 + k, mask=inside & (tl.full([1, 1], k1, tl.int32) < end), other=0)
            next_scale = scale
            if PLANES:
                there = (row < rows) & (tl.full([1], k1, tl.int32) < end)
                next_scale = tl.load(x_scale_at + k1 // GROUP, mask=there, other=0.0)
            total = _step(x, scale, w, total, INT8, PLANES, WEIGHTS_FIRST)
            x, scale = next_x, next_scale
    else:
        for k0 in range(begin, end, BLOCK_K):
            k = (k0 + tl.arange(0, BLOCK_K))[None, :]
            if EVEN:
                w = tl.load(w_at + k, eviction_policy="evict_first")
                x = tl.load(x_at + k, mask=inside, other=0)
            else:
                w = tl.load(w_at + k, mask=k < end, other=0)
                x = tl.load(x_at + k, mask=inside & (k < end), other=0)
            if PLANES:
                scale = tl.load(x_scale_at + k0 // GROUP, mask=row < rows, other=0.0)
            total = _step(x, scale, w, total, INT8, PLANES, WEIGHTS_FIRST)
    if WEIGHTS_FIRST:
        total = tl.trans(total)
    return total


@triton.jit
def _linear_kernel(
    x_ptr, x_scale_ptr, w0_ptr, w1_ptr, w2_ptr, s0_ptr, s1_ptr, s2_ptr, y_ptr,
    rows, inner, out0, out1, out2,
    SEGMENTS: tl.constexpr, INT8: tl.constexpr, PLANES: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr, SETTLED: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    tile, split, row0 = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_R
    w_ptr, s_ptr, out, column = w0_ptr, s0_ptr, out0, 0
    if SEGMENTS > 1:
        tiles = tl.cdiv(out0, BLOCK_O)
        if tile >= tiles:
            tile -= tiles
            w_ptr, s_ptr, out, column = w1_ptr, s1_ptr, out1, out0
            tiles = tl.cdiv(out1, BLOCK_O)
            if SEGMENTS > 2:
                if tile >= tiles:
                    tile -= tiles
                    w_ptr, s_ptr, out, column = w2_ptr, s2_ptr, out2, out0 + out1
    o = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    # Rows past the end read the last one again: no mask on what costs most.
    w_row = tl.minimum(o, out - 1)
    w_at = w_ptr + (w_row.to(tl.int64) * inner)[:, None]
    share = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLIT) * BLOCK_K
    begin = split * share
    let_go(PDL)
    prefetch_rows(w_at + begin + EARLY * BLOCK_K, PREFETCH, PDL)
    if not SETTLED:
        wait_for_inputs(PDL)
    total = _sums(
        x_ptr, x_scale_ptr, w_at, row0, rows, inner, begin, tl.minimum(begin + share, inner), INT8, PLANES, EVEN,
        EARLY, PDL and SETTLED, BLOCK_R, BLOCK_O, BLOCK_K, WEIGHTS_FIRST,
    )  # fmt: skip
    if INT8:
        total *= tl.load(s_ptr + w_row)[None, :]
    row = row0 + tl.arange(0, BLOCK_R)
    outs = out0 + (out1 if SEGMENTS > 1 else 0) + (out2 if SEGMENTS > 2 else 0)
    at = y_ptr + (split * tl.cast(rows, tl.int64) + row.to(tl.int64))[:, None] * outs + column + o[None, :]
    tl.store(at, total, mask=(row < rows)[:, None] & (o < out)[None, :])


@triton.jit
def _gated_kernel(
    x_ptr, x_scale_ptr, gate_ptr, gate_scale_ptr, up_scale_ptr, y_ptr, to_up, rows, inner, out,
    INT8: tl.constexpr, PLANES: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, SETTLED: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    o, row0 = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O), tl.program_id(1) * BLOCK_R
    # One tile of weights: BLOCK_O rows of the gate, and as many of the up projection, to_up elements away.
    both = tl.arange(0, 2 * BLOCK_O)
    w_row = tl.minimum(tl.program_id(0) * BLOCK_O + both % BLOCK_O, out - 1)
    w_at = gate_ptr + (w_row.to(tl.int64) * inner + both // BLOCK_O * to_up)[:, None]
    let_go(PDL)
    prefetch_rows(w_at + EARLY * BLOCK_K, PREFETCH, PDL)
    if not SETTLED:
        wait_for_inputs(PDL)
    total = _sums(
        x_ptr, x_scale_ptr, w_at, row0, rows, inner, 0, inner, INT8, PLANES, EVEN, EARLY, PDL and SETTLED, BLOCK_R,
        2 * BLOCK_O, BLOCK_K, WEIGHTS_FIRST,
    )  # fmt: skip
    gate, up = tl.split(tl.permute(tl.reshape(total, [BLOCK_R, 2, BLOCK_O]), (0, 2, 1)))
    if INT8:
        gate *= tl.load(gate_scale_ptr + tl.minimum(o, out - 1))[None, :]
        up *= tl.load(up_scale_ptr + tl.minimum(o, out - 1))[None, :]
    y = gate / (1.0 + tl.exp(-gate)) * up
    row = row0 + tl.arange(0, BLOCK_R)
    at = y_ptr + row.to(tl.int64)[:, None] * out + o[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (o < out)[None, :])


def block_linear(x, x_scale, weights, scales, settled, settings):
    """Launch.

    Args:
        x: ``[N, K]`` contiguous; with ``x_scale`` fp32 ``[N, K/GROUP]`` its int8 planes ``[2, N, K]``.
        weights: one to three, ``[O_i, K]``.
        scales: fp32 ``[O_i]`` of int8 weights, else None.
        settled: of the weights, as in `dependent_launch`.
        settings: see `DEFAULTS`.

    Returns:
        fp32 partial sums ``[SPLIT, N, O]``.
    """
    rows, inner = x.shape[-2:]
    outs = [w.shape[0] for w in weights]
    s = _fitted(settings, x, scales[0] is not None, settings["BLOCK_O"], settled)
    tiles = max(1, triton.cdiv(inner, s["BLOCK_K"]))
    # No part without columns: each program must come to where it waits.
    s["SPLIT"] = triton.cdiv(tiles, triton.cdiv(tiles, s["SPLIT"]))
    y = torch.empty(s["SPLIT"], rows, sum(outs), dtype=torch.float32, device=x.device)
    if y.numel() == 0:
        return y
    pad = 3 - len(weights)
    scale = [y if a is None else a for a in (*scales, *[None] * pad)]
    grid = (sum(triton.cdiv(o, s["BLOCK_O"]) for o in outs), s["SPLIT"], triton.cdiv(rows, s["BLOCK_R"]))
    _linear_kernel[grid](
        x, y if x_scale is None else x_scale, *weights, *weights[:1] * pad, *scale, y, rows, inner, *outs, *[0] * pad,
        SEGMENTS=len(weights), INT8=scales[0] is not None, PLANES=x_scale is not None, **s, **dependent_launch(x),
    )  # fmt: skip
    return y


def gated_linear(x, x_scale, gate, up, scales, dtype, settled, settings):
    """Launch; ``silu(x gate^T) * (x up^T)`` as ``[N, O]`` in ``dtype``. Arguments as of `block_linear`."""
    rows, inner = x.shape[-2:]
    s = _fitted(settings, x, scales[0] is not None, 2 * settings["BLOCK_O"], settled)
    y = torch.empty(rows, gate.shape[0], dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    grid = (triton.cdiv(gate.shape[0], s["BLOCK_O"]), triton.cdiv(rows, s["BLOCK_R"]))
    gate_scale, up_scale = (y if a is None else a for a in scales)
    to_up = (up.data_ptr() - gate.data_ptr()) // gate.element_size()
    _gated_kernel[grid](
        x, y if x_scale is None else x_scale, gate, gate_scale, up_scale, y, to_up, rows, inner, gate.shape[0],
        INT8=scales[0] is not None, PLANES=x_scale is not None, **s, **dependent_launch(x),
    )  # fmt: skip
    return y


def _fitted(settings, x, int8, tile_rows, settled):
    """Tiles no larger than the problem; fp32 rows take half of the columns at a time, for their size."""
    s, (rows, inner) = dict(settings), x.shape[-2:]
    # Rows of int8 weights count twice, as their planes: more than 32 of them spill.
    s["BLOCK_R"] = min(max(8 if int8 else 16, triton.next_power_of_2(rows)), 32 if int8 else 64)
    s["BLOCK_K"] = max(32, min(s["BLOCK_K"] // max(1, x.element_size() // 2), triton.next_power_of_2(inner)))
    if int8:
        s["WEIGHTS_FIRST"] = 1
    if x.dtype == torch.int8:
        s["BLOCK_K"] = GROUP.value
    # Through registers go few rows, and narrow ones.
    early = bool(s["EARLY"]) and inner % s["BLOCK_K"] == 0 and s["BLOCK_R"] <= 16 and x.element_size() <= 2
    # Settings were measured for few rows: more of them leave room for fewer columns, or fewer stages.
    weight_bytes = 1 if int8 else x.element_size()
    row_bytes = (0 if early else s["BLOCK_R"] * (2 if int8 else x.element_size())) + tile_rows * weight_bytes
    limit = min(shared_bytes(x.device) - _SPARE_BYTES, _MOST_BYTES)
    while s["num_stages"] * s["BLOCK_K"] * row_bytes > limit and s["num_stages"] > 2:
        s["num_stages"] -= 1
    while s["num_stages"] * s["BLOCK_K"] * row_bytes > limit and s["BLOCK_K"] > 64 and x.dtype != torch.int8:
        s["BLOCK_K"] //= 2
    # Tiles asked for before the rows are there: all stages but those at the two ends of the pipeline.
    s["EARLY"] = max(1, s["num_stages"] - 2) if early else 0
    s["SETTLED"], s["EVEN"] = settled and early, inner % s["BLOCK_K"] == 0
    return s
