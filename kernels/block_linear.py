"""Triton kernels of `dflash2.ops.block_linear`: a few rows times large weights, bound by reading the weights once."""

import torch
import triton
import triton.language as tl

DEFAULTS = {"BLOCK_O": 64, "BLOCK_K": 128, "SPLIT": 4, "WEIGHTS_FIRST": 0, "num_warps": 4, "num_stages": 4}
GATED_DEFAULTS = {"BLOCK_O": 32, "BLOCK_K": 128, "WEIGHTS_FIRST": 0, "num_warps": 4, "num_stages": 4}
_TILES = ((32, 128, 0, 2, 4), (32, 128, 0, 4, 5), (32, 256, 0, 4, 4), (64, 128, 0, 4, 4), (64, 128, 1, 4, 4),
          (64, 256, 1, 4, 3), (64, 256, 1, 4, 4), (64, 512, 1, 4, 3), (128, 128, 1, 4, 4), (128, 256, 1, 8, 3))  # fmt: skip
GATED_CANDIDATES = [
    {"BLOCK_O": o, "BLOCK_K": k, "WEIGHTS_FIRST": first, "num_warps": warps, "num_stages": stages}
    for o, k, first, warps, stages in (*_TILES, (16, 256, 0, 2, 4))
]
CANDIDATES = [{**tile, "SPLIT": split} for tile in GATED_CANDIDATES[:-1] for split in (1, 2, 4, 5, 8)]


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
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    return total


@triton.jit
def _planes(x):
    """Each row of ``x [R, K]`` as 16-bit integers ``256 hi + lo`` times a scale: int8 ``[2 R, K]``, fp32 ``[R]``.

    NaN and infinity make the scale NaN.
    """
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    q = tl.floor(x * (32639.0 / tl.maximum(largest, 1e-30))[:, None] + 0.5).to(tl.int32)
    hi = (q + 128) >> 8
    planes = tl.permute(tl.join(hi.to(tl.int8), (q - hi * 256).to(tl.int8)), (2, 0, 1))
    return tl.reshape(planes, [2 * x.shape[0], x.shape[1]]), largest / 32639.0 + tl.sum(x * 0.0, 1)


@triton.jit
def _dot_int8(planes, scale, w, total):
    """``total [O, R] += w [O, K] . x^T``: whole numbers on the integer tensor cores, so no weight is converted."""
    sums = tl.dot(w, tl.trans(planes), out_dtype=tl.int32)
    sums = tl.permute(tl.reshape(sums, [w.shape[0], 2, planes.shape[0] // 2]), (0, 2, 1))
    hi, lo = tl.split(sums)
    return total + (hi.to(tl.float32) * 256.0 + lo.to(tl.float32)) * scale[None, :]


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
        if INT8:
            planes, x_scale = _planes(x)
            total = _dot_int8(planes, x_scale, w, total)
        else:
            total = _dot(x, w, total, WEIGHTS_FIRST)
    if WEIGHTS_FIRST:
        total = tl.trans(total)
    if INT8:
        total *= tl.load(s_ptr + w_row)[None, :]
    outs = out0 + (out1 if SEGMENTS > 1 else 0) + (out2 if SEGMENTS > 2 else 0)
    at = y_ptr + (split * tl.cast(rows, tl.int64) + row.to(tl.int64))[:, None] * outs + column + o[None, :]
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
        if INT8:
            planes, x_scale = _planes(x)
            gate = _dot_int8(planes, x_scale, w_gate, gate)
            up = _dot_int8(planes, x_scale, w_up, up)
        else:
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
    s = _clamped(settings, x, inner, scales[0] is not None)
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
    s = _clamped(settings, x, inner, scales[0] is not None)
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


def _clamped(settings, x, inner, int8):
    """Tiles no larger than the problem; fp32 rows take half of the columns at a time, for their size."""
    s = dict(settings)
    # Rows of int8 weights count twice, as their planes: more than 32 of them spill.
    s["BLOCK_R"] = min(max(8 if int8 else 16, triton.next_power_of_2(x.shape[0])), 32 if int8 else 64)
    if int8:
        s["WEIGHTS_FIRST"] = 1
    s["BLOCK_K"] = max(32, min(s["BLOCK_K"] // (x.element_size() // 2), triton.next_power_of_2(inner)))
    if "SPLIT" in s:
        s["SPLIT"] = min(s["SPLIT"], triton.cdiv(inner, s["BLOCK_K"]))
    return s
