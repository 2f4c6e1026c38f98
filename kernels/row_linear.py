"""Triton kernels of `dflash2.ops.row_linear`: a product whose rows have the same bits whatever their number.

Weights are always the first operand of the tensor cores and rows the second, so that every element is the same chain of
k16 (fp32: k1) steps in every tile shape. With int8 weights rows are 16-bit integers by groups of inputs (`int16_rows`):
a group's sum is exact, and groups are added up one after the other. Inputs are cut into spans by the weight's shape
alone; spans are summed in fp32, one after the other, either by who reads the sums (so that all of the card works) or
inside a program.
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, inputs_ready, let_go, prefetch_rows, wait_then_let_go
from .int16_rows import GROUP, dot_int8, dot_planes, int16_rows

#: For few rows, bound by reading the weights. GATHER 1 sums the spans inside a program; EARLY 1 asks for weights that
#: are settled (see `dependent_launch`) before the rows are there.
DEFAULTS = {"BLOCK_O": 64, "BLOCK_R": 16, "BLOCK_K": 128, "GATHER": 0, "EARLY": 0, "num_warps": 4, "num_stages": 4}
#: For a batch: two programs fit on a multiprocessor. For many rows: the largest tile, as smaller ones wait for the L2.
BATCH = {"BLOCK_O": 128, "BLOCK_R": 128, "BLOCK_K": 64, "GATHER": 0, "EARLY": 0, "num_warps": 8, "num_stages": 3}
MANY_ROWS = {"BLOCK_O": 256, "BLOCK_R": 128, "BLOCK_K": 64, "GATHER": 0, "EARLY": 0, "num_warps": 8, "num_stages": 4}
CANDIDATES = [
    {"BLOCK_O": o, "BLOCK_R": r, "BLOCK_K": k, "GATHER": gather, "num_warps": warps, "num_stages": stages}
    for o, r, k, gather, warps, stages in (
        (64, 16, 128, 0, 4, 3), (64, 16, 128, 0, 4, 4), (64, 16, 128, 0, 4, 5), (64, 16, 256, 0, 4, 3),
        (64, 16, 256, 0, 4, 4), (64, 32, 128, 0, 4, 4), (64, 64, 128, 0, 4, 4), (64, 64, 64, 0, 4, 5),
        (128, 64, 64, 0, 4, 4), (128, 64, 64, 1, 4, 4), (128, 128, 64, 0, 4, 3), (128, 128, 64, 0, 8, 4),
        (128, 128, 64, 1, 8, 3), (128, 128, 64, 1, 8, 4), (128, 256, 64, 0, 8, 3), (128, 256, 64, 0, 8, 4),
        (256, 128, 64, 0, 8, 3), (256, 128, 64, 0, 8, 4),
    )
]  # fmt: skip
#: Three programs on each of 132 multiprocessors: with fewer, some read two tiles where others read one. Fixed: another
#: number of spans is another sum.
PROGRAMS, SPAN_TILE, SPAN_STEP, LEAST_SPAN = 396, 64, 256, 512


def span_length(outputs: int, inputs: int) -> int:
    """Inputs that are summed in one go, a function of the weight's shape alone."""
    spans = max(1, min(PROGRAMS // triton.cdiv(outputs, SPAN_TILE), inputs // LEAST_SPAN))
    return triton.cdiv(triton.cdiv(inputs, spans), SPAN_STEP) * SPAN_STEP


def defaults(rows: int, device: torch.device) -> dict[str, int]:
    """Settings for a GPU that was never tuned. The interpreter's sums depend on the tile's shape: it gets one shape."""
    if device.type != "cuda":
        return DEFAULTS
    if rows > 128:
        # 192 KB of shared memory: of data centre GPUs from Hopper on.
        large = torch.cuda.get_device_capability(device)[0] in (9, 10)
        return MANY_ROWS if rows > 512 and large else BATCH
    return {**DEFAULTS, "BLOCK_R": min(64, max(16, triton.next_power_of_2(rows)))}


@triton.jit
def _step(x, scale, weight, total, PLANES: tl.constexpr):
    if PLANES:
        total = dot_planes(x, scale, weight, total)
    elif weight.dtype == tl.int8:
        total = dot_int8(x, weight, total)
    else:
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit
def _span_sum(
    x_at, x_scale_at, weight_at, begin, end,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PLANES: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """fp32 ``[BLOCK_O, BLOCK_R]``: products over the inputs ``[begin, end)``, in ascending order.

    EARLY: rows come through registers, one step behind the weights, whose pipeline fills up before the rows are there.
    The first step multiplies zeros, which changes no bit.
    """
    k = tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros([BLOCK_O, BLOCK_R], dtype=tl.float32)
    scale = tl.zeros([BLOCK_R], dtype=tl.float32)
    if EARLY:
        x = tl.zeros([x_at.shape[0], BLOCK_K], x_at.dtype.element_ty)
        for at in range(begin - BLOCK_K, end, BLOCK_K):
            weight = tl.load(weight_at + at + k, mask=tl.full([1, 1], at, tl.int32) >= begin, other=0)
            after = at + BLOCK_K + inputs_ready(PDL)
            next_x = tl.load(x_at + after + k, mask=tl.full([1, 1], after, tl.int32) < end, other=0)
            next_scale = scale
            if PLANES:
                there = tl.full([1], after, tl.int32) < end
                next_scale = tl.load(x_scale_at + after // GROUP, mask=there, other=0.0)
            total = _step(x, scale, weight, total, PLANES)
            x, scale = next_x, next_scale
    else:
        for at in range(begin, end, BLOCK_K):
            if EVEN:
                weight, x = tl.load(weight_at + at + k), tl.load(x_at + at + k)
            else:
                inside = at + k < end
                weight = tl.load(weight_at + at + k, mask=inside, other=0)
                x = tl.load(x_at + at + k, mask=inside, other=0)
            if PLANES:
                scale = tl.load(x_scale_at + at // GROUP)
            total = _step(x, scale, weight, total, PLANES)
    return total


@triton.jit(do_not_specialize=["rows"])
def _span_sums_kernel(
    x_ptr, x_scale_ptr, weight_ptr, sums_ptr,
    rows, outputs, inputs, x_stride, span,
    TABLE: tl.constexpr, PLANES: tl.constexpr, INT8: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(outputs, BLOCK_O)
    matrix, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    if TABLE:
        address = tl.load(weight_ptr + matrix)
        weight_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.int8) if INT8 else x_ptr.dtype), 16)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    output = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    # Rows past the end read the last one again: no mask on what costs most.
    x_row = tl.minimum(row, rows - 1).to(tl.int64)
    x_scale_at = x_scale_ptr + x_row * (inputs // GROUP)
    if PLANES:
        half = tl.arange(0, 2 * BLOCK_R)
        half_row = tl.minimum(tl.program_id(0) * BLOCK_R + half % BLOCK_R, rows - 1)
        x_at = x_ptr + ((half // BLOCK_R * rows.to(tl.int64) + half_row) * inputs)[:, None]
    else:
        x_at = x_ptr + x_row[:, None] * x_stride
    weight_at = weight_ptr + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * inputs
    if EARLY:
        let_go(PDL)
        prefetch_rows(weight_at + tl.program_id(2) * span + EARLY * BLOCK_K, 512, PDL)
    else:
        # The first kernel of an append: what was written before it is settled for those that follow.
        prefetch_rows(weight_at + tl.program_id(2) * span, 1024, PDL)
        wait_then_let_go(PDL)
    if GATHER:
        total = tl.zeros([BLOCK_O, BLOCK_R], dtype=tl.float32)
        for begin in range(0, inputs, span):
            end = tl.minimum(begin + span, inputs)
            total += _span_sum(
                x_at, x_scale_at, weight_at, begin, end, BLOCK_R, BLOCK_O, BLOCK_K, EVEN, PLANES, 0, False
            )
    else:
        begin = tl.program_id(2) * span
        end = tl.minimum(begin + span, inputs)
        total = _span_sum(x_at, x_scale_at, weight_at, begin, end, BLOCK_R, BLOCK_O, BLOCK_K, EVEN, PLANES, EARLY, PDL)
    width = (tl.num_programs(1) // tiles).to(tl.int64) * outputs
    row_at = sums_ptr + (tl.program_id(2).to(tl.int64) * rows + row)[:, None] * width
    mask = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(row_at + matrix * outputs + output[None, :], tl.trans(total), mask=mask)


@triton.jit(do_not_specialize=["spans"])
def _finish_kernel(
    sums_ptr, bias_ptr, y_ptr, spans, count, outputs, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in range(spans):
        total += tl.load(sums_ptr + at, mask=mask, other=0.0)
        sums_ptr += count
    if BIAS:
        total += tl.load(bias_ptr + at % outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=mask)


def span_sums(
    x: torch.Tensor, weight: torch.Tensor, settings: dict[str, int], table: tuple[int, int, bool] | None = None,
    *, settled: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Launch the product; what `finish` and others then sum over dimension 0, in ascending order.

    Args:
        x: ``[N, K]``, rows contiguous.
        weight: ``[O, K]`` contiguous; or int64 addresses of such weights, of x's dtype or int8.
        settings: as `DEFAULTS`.
        table: of addresses: (their number, O, whether the weights are int8).
        settled: of the weights, as in `dependent_launch`.

    Returns:
        fp32 ``[spans or 1, N, O]``; for a table ``[spans or 1, N, number of weights * O]``.
    """
    rows, inputs = x.shape
    matrices, outputs, int8 = table or (1, weight.shape[0], weight.dtype == torch.int8)
    span = span_length(matrices * outputs, inputs)
    s = _fitted(settings, x, outputs, int8, settled)
    spans = 1 if s["GATHER"] else triton.cdiv(inputs, span)
    sums = torch.empty(spans, rows, matrices * outputs, dtype=torch.float32, device=x.device)
    if sums.numel() == 0:
        return sums
    grid = (triton.cdiv(rows, s["BLOCK_R"]), matrices * triton.cdiv(outputs, s["BLOCK_O"]), spans)
    with torch.cuda.device_of(x):
        planes = int8 and inputs % GROUP.value == 0
        x, scale = int16_rows(x) if planes else (x, sums)
        _span_sums_kernel[grid](
            x, scale, weight, sums, rows, outputs, inputs, x.stride(0), span, TABLE=table is not None, PLANES=planes,
            INT8=int8, EVEN=inputs % s["BLOCK_K"] == 0, **s, **dependent_launch(x),
        )  # fmt: skip
    return sums


def finish(sums: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """``[spans, N, O]`` fp32, as of `span_sums`, to ``[N, O]`` in ``dtype``: summed, biased, rounded once."""
    spans, rows, outputs = sums.shape
    y = torch.empty(rows, outputs, dtype=dtype, device=sums.device)
    if y.numel() == 0:
        return y
    grid = (triton.cdiv(y.numel(), 1024),)
    with torch.cuda.device_of(y):
        _finish_kernel[grid](
            sums, y if bias is None else bias, y, spans, y.numel(), outputs, BIAS=bias is not None, BLOCK=1024
        )  # fmt: skip
    return y


def _fitted(settings: dict[str, int], x: torch.Tensor, outputs: int, int8: bool, settled: bool) -> dict[str, int]:
    """Tiles no larger than the problem. fp32 has no tensor core of full precision: small tiles, kept in registers."""
    s = dict(settings)
    if int8:
        # Rows become integers in groups of BLOCK_K: one size, or settings would change bits. Planes count twice.
        s |= {
            "BLOCK_O": min(s["BLOCK_O"], 128),
            "BLOCK_R": min(s["BLOCK_R"], 32),
            "BLOCK_K": GROUP.value,
            "num_warps": 4,
        }
    elif x.dtype == torch.float32:
        s |= {"BLOCK_O": min(s["BLOCK_O"], 64), "BLOCK_R": min(s["BLOCK_R"], 32), "BLOCK_K": 32, "num_warps": 4}
    s["BLOCK_O"] = min(s["BLOCK_O"], max(64, triton.next_power_of_2(outputs)))
    # Through registers go few rows, and narrow ones.
    early = s["EARLY"] and settled and not s["GATHER"] and s["BLOCK_R"] <= 16 and x.element_size() <= 2
    # In tiles: all stages but those at the two ends of the pipeline.
    s["EARLY"] = max(1, s["num_stages"] - 2) if early and x.shape[1] % s["BLOCK_K"] == 0 else 0
    return s
