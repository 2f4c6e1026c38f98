"""Triton kernels of `dflash2.ops.block_linear`: a few rows times large weights, bound by reading the weights once."""

import torch
import triton
import triton.language as tl

DEFAULTS = {"BLOCK_O": 32, "BLOCK_K": 256, "SPLIT": 4, "WEIGHTS_FIRST": 0, "num_warps": 4, "num_stages": 3}
CANDIDATES = [
    {"BLOCK_O": o, "BLOCK_K": k, "SPLIT": split, "WEIGHTS_FIRST": 0, "num_warps": warps, "num_stages": stages}
    for o, k, warps, stages in ((16, 512, 4, 3), (16, 256, 2, 4), (32, 256, 4, 3), (32, 256, 4, 4), (32, 512, 4, 3),
                                (64, 128, 4, 4), (64, 256, 4, 3), (64, 256, 8, 4))
    for split in (1, 2, 4, 8)
]  # fmt: skip
GATED_DEFAULTS = {"BLOCK_O": 16, "BLOCK_K": 256, "WEIGHTS_FIRST": 0, "num_warps": 4, "num_stages": 3}
GATED_CANDIDATES = [
    {"BLOCK_O": o, "BLOCK_K": k, "WEIGHTS_FIRST": 0, "num_warps": warps, "num_stages": stages}
    for o, k, warps, stages in ((16, 256, 2, 4), (16, 256, 4, 3), (16, 256, 4, 4), (16, 512, 4, 3), (16, 512, 4, 4),
                                (32, 128, 4, 4), (32, 256, 4, 3), (32, 256, 8, 4), (64, 128, 8, 4), (64, 128, 4, 3))
]  # fmt: skip


@triton.jit
def prefetch_rows(w_ptr, row, inner, k_begin, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Ask for the first BYTES of each weight row before the rows of the previous kernel are there: one 128-byte line an
    address. The memory stays busy while that kernel ends."""
    size: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    line = tl.arange(0, BYTES // 128) * (128 // size)
    at = w_ptr + row.to(tl.int64)[:, None] * inner + k_begin + line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _dot(x, w, total, WEIGHTS_FIRST: tl.constexpr):
    """``total += x [R, K] . w [O, K]^T``, as ``[O, R]`` when the weights come first."""
    if WEIGHTS_FIRST:
        total = tl.dot(w.to(x.dtype), tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(w.to(x.dtype)), total, input_precision="ieee")
    return total


@triton.jit
def _linear_kernel(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, s0_ptr, s1_ptr, s2_ptr, y_ptr,
    rows, inner, out0, out1, out2,
    SEGMENTS: tl.constexpr, INT8: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
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
    share = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLIT) * BLOCK_K
    begin = split * share
    end = tl.minimum(begin + share, inner)
    if PDL:
        prefetch_rows(w_ptr, w_row, inner, begin, BLOCK_O, 1024)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if WEIGHTS_FIRST:
        total = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
    else:
        total = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
    w_at = w_ptr + w_row.to(tl.int64)[:, None] * inner
    x_at = x_ptr + row.to(tl.int64)[:, None] * inner
    inside = (row < rows)[:, None]
    for k0 in range(begin, end, BLOCK_K):
        k = (k0 + tl.arange(0, BLOCK_K))[None, :]
        if EVEN:
            w = tl.load(w_at + k, eviction_policy="evict_first")
            x = tl.load(x_at + k, mask=inside, other=0.0)
        else:
            w = tl.load(w_at + k, mask=k < end, other=0.0)
            x = tl.load(x_at + k, mask=inside & (k < end), other=0.0)
        total = _dot(x, w, total, WEIGHTS_FIRST)
    if WEIGHTS_FIRST:
        total = tl.trans(total)
    if INT8:
        total *= tl.load(s_ptr + w_row)[None, :]
    outs = out0 + (out1 if SEGMENTS > 1 else 0) + (out2 if SEGMENTS > 2 else 0)
    at = y_ptr + (split.to(tl.int64) * rows + row.to(tl.int64))[:, None] * outs + column + o[None, :]
    tl.store(at, total, mask=inside & (o < out)[None, :])


@triton.jit
def _gated_kernel(
    x_ptr, gate_ptr, up_ptr, gate_scale_ptr, up_scale_ptr, y_ptr, rows, inner, out,
    INT8: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    w_row = tl.minimum(o, out - 1)
    if PDL:
        prefetch_rows(gate_ptr, w_row, inner, 0, BLOCK_O, 1024)
        prefetch_rows(up_ptr, w_row, inner, 0, BLOCK_O, 1024)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if WEIGHTS_FIRST:
        gate = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
    else:
        gate = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
    up = gate
    offset = w_row.to(tl.int64)[:, None] * inner
    x_at = x_ptr + row.to(tl.int64)[:, None] * inner
    inside = (row < rows)[:, None]
    for k0 in range(0, inner, BLOCK_K):
        k = (k0 + tl.arange(0, BLOCK_K))[None, :]
        if EVEN:
            x = tl.load(x_at + k, mask=inside, other=0.0)
            w_gate = tl.load(gate_ptr + offset + k, eviction_policy="evict_first")
            w_up = tl.load(up_ptr + offset + k, eviction_policy="evict_first")
        else:
            x = tl.load(x_at + k, mask=inside & (k < inner), other=0.0)
            w_gate = tl.load(gate_ptr + offset + k, mask=k < inner, other=0.0)
            w_up = tl.load(up_ptr + offset + k, mask=k < inner, other=0.0)
        gate = _dot(x, w_gate, gate, WEIGHTS_FIRST)
        up = _dot(x, w_up, up, WEIGHTS_FIRST)
    if WEIGHTS_FIRST:
        gate, up = tl.trans(gate), tl.trans(up)
    if INT8:
        gate *= tl.load(gate_scale_ptr + w_row)[None, :]
        up *= tl.load(up_scale_ptr + w_row)[None, :]
    y = gate / (1.0 + tl.exp(-gate)) * up
    at = y_ptr + row.to(tl.int64)[:, None] * out + o[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=inside & (o < out)[None, :])


def block_linear(x, weights, scales, settings, pdl):
    """Launch; ``x [N, K]`` contiguous, one to three ``weights [O_i, K]``. Returns fp32 partial sums ``[SPLIT, N, O]``."""
    rows, inner = x.shape
    outs = [w.shape[0] for w in weights]
    s = _clamped(settings, x, inner)
    y = torch.empty(s["SPLIT"], rows, sum(outs), dtype=torch.float32, device=x.device)
    if y.numel() == 0:
        return y
    pad = [weights[0]] * (3 - len(weights))
    scale = [y if a is None else a for a in (*scales, *[None] * len(pad))]
    grid = (
        sum(triton.cdiv(o, s["BLOCK_O"]) for o in outs),
        s["SPLIT"],
        triton.cdiv(rows, s["BLOCK_R"]),
    )
    even = inner % s["BLOCK_K"] == 0
    _linear_kernel[grid](
        x, *weights, *pad, *scale, y, rows, inner, *outs, *[0] * len(pad), SEGMENTS=len(weights),
        INT8=scales[0] is not None, EVEN=even, PDL=pdl, **s, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return y


def gated_linear(x, gate, up, scales, settings, pdl):
    """Launch; ``silu(x gate^T) * (x up^T)``: ``x [N, K]``, ``gate, up [O, K]`` -> ``[N, O]`` in x's dtype."""
    rows, inner = x.shape
    s = _clamped(settings, x, inner)
    y = torch.empty(rows, gate.shape[0], dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    grid = (triton.cdiv(gate.shape[0], s["BLOCK_O"]), triton.cdiv(rows, s["BLOCK_R"]))
    gate_scale, up_scale = (y if a is None else a for a in scales)
    _gated_kernel[grid](
        x, gate, up, gate_scale, up_scale, y, rows, inner, gate.shape[0], INT8=scales[0] is not None,
        EVEN=inner % s["BLOCK_K"] == 0, PDL=pdl, **s, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return y


def _clamped(settings, x, inner):
    """Tiles no larger than the problem; fp32 rows take half of the columns at a time, for their size."""
    s = dict(settings)
    s["BLOCK_R"] = min(max(16, triton.next_power_of_2(x.shape[0])), 64)
    s["BLOCK_K"] = max(32, min(s["BLOCK_K"] // (x.element_size() // 2), triton.next_power_of_2(inner)))
    if "SPLIT" in s:
        s["SPLIT"] = min(s["SPLIT"], triton.cdiv(inner, s["BLOCK_K"]))
    return s
