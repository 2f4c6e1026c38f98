"""Triton kernels of `dflash2.ops.int8_head`: rows to whole numbers, int8 products, and logits or their C best.

Weights are the first operand of the tensor cores, [BLOCK_V, BLOCK_K], read once and straight into int8 products. The
halves of a row lie side by side as two columns of the second operand, so that one thread ends up with both sums.
Sums are exact (up to H = 132,104): tiles and other rows cannot change a bit. Row tiles of the same weights run next to
each other.
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import (
    dependent_launch,
    inputs_ready,
    let_go,
    prefetch_rows,
    wait_for_inputs,
    wait_then_let_go,
)
from .int16_rows import LIMIT
from .top_candidates import LOWEST, Candidates, collect

#: PROGRAMS on each multiprocessor take tile after tile without a pause; 0: one program for each tile. EARLY 1, for few
#: rows and PROGRAMS 0: weights are asked for while rows become whole numbers.
DEFAULTS = {"BLOCK_V": 128, "BLOCK_R": 32, "BLOCK_K": 128, "PROGRAMS": 0, "EARLY": 0, "num_warps": 8, "num_stages": 3}
CANDIDATES = [
    {"BLOCK_V": v, "BLOCK_R": r, "BLOCK_K": k, "PROGRAMS": programs, "EARLY": early, "num_warps": warps,
     "num_stages": stages}
    for v, r, k, programs, early, warps, stages in (
        # Up to 16 rows: bytes in flight.
        (64, 8, 256, 0, 0, 4, 4), (64, 8, 256, 0, 1, 4, 6), (128, 8, 128, 0, 0, 4, 4), (128, 8, 128, 0, 1, 4, 6),
        (128, 8, 128, 2, 0, 4, 5), (128, 8, 128, 3, 0, 4, 4), (128, 8, 256, 0, 0, 4, 3), (128, 8, 256, 0, 1, 4, 3),
        (128, 8, 256, 2, 0, 4, 3), (256, 8, 128, 0, 0, 8, 3), (256, 8, 128, 0, 1, 8, 3), (256, 8, 128, 2, 0, 8, 3),
        (128, 16, 128, 0, 0, 4, 4), (128, 16, 128, 0, 1, 4, 6), (128, 16, 128, 2, 0, 4, 4),
        # Up to 64: a wide tile of weights, so that the rows are read less often.
        (128, 32, 128, 0, 0, 8, 3), (128, 32, 128, 2, 0, 8, 4), (256, 32, 128, 1, 0, 8, 4), (128, 64, 128, 2, 0, 4, 3),
        (128, 64, 128, 0, 0, 8, 4), (256, 64, 64, 1, 0, 8, 6), (256, 64, 128, 1, 0, 8, 3), (256, 64, 128, 1, 0, 8, 4),
        # More: tensor cores.
        (128, 128, 128, 0, 0, 8, 3), (128, 128, 128, 0, 0, 8, 4),
    )
]  # fmt: skip
_QUANTISE_BLOCK, _QUANTISE_PART = 8192, 1024


@triton.jit
def _quantise_kernel(
    x_ptr, halves_ptr, row_scale_ptr, floor_ptr, hidden, x_row_stride, x_column_stride,
    BLOCK: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PART columns of a row into its halves int8 ``[rows, 2, hidden]``; its scale; its floor: the lowest value.

    Every program looks for the row's largest value, which costs less than dividing by it. What was written before this
    kernel is settled for the next one.
    """
    wait_then_let_go(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * PART + tl.arange(0, PART)
    x_ptr += row * x_row_stride
    x = tl.load(x_ptr + part * x_column_stride, mask=part < hidden, other=0.0).to(tl.float32)
    largest = 0.0
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        size = tl.abs(tl.load(x_ptr + column * x_column_stride, mask=column < hidden, other=0.0).to(tl.float32))
        # A NaN compares as false: damage of either kind becomes inf.
        largest = tl.maximum(largest, tl.max(tl.where(size < float("inf"), size, float("inf")), 0))
    whole = largest < float("inf")
    scale = tl.where(whole, tl.div_rn(tl.where(whole, largest, 0.0), LIMIT), float("nan"))
    usable = scale >= 1.1754943508222875e-38  # else zero, damaged, or too small for an exact division
    quotient = tl.div_rn(tl.where(usable, x, 0.0), tl.where(usable, scale, 1.0))
    # Adding 1.5 * 2**23 leaves the nearest whole number, ties to even, in the low bits.
    whole_number = (quotient + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    high = (whole_number + 128) >> 8
    at = halves_ptr + row * 2 * hidden + part
    tl.store(at, high.to(tl.int8), mask=part < hidden)
    tl.store(at + hidden, (whole_number - (high << 8)).to(tl.int8), mask=part < hidden)
    if tl.program_id(1) == 0:
        tl.store(row_scale_ptr + row, scale)
        if SLOTS > 0:
            tl.store(floor_ptr + row * SLOTS + tl.arange(0, SLOTS), tl.full([SLOTS], LOWEST, tl.int32))


@triton.jit
def _logits(
    weight_ptr, scale_ptr, bias_ptr, halves_ptr, row_scale_ptr, token, row, vocab, rows, hidden,
    weight_row_stride, weight_column_stride,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """fp32 ``[BLOCK_V, BLOCK_R]``. Tokens outside repeat the last one; rows outside are zeros and not read.

    EARLY: rows come through registers, one step behind the weights, whose pipeline fills up before the rows are there.
    The first step multiplies zeros.
    """
    token = tl.minimum(token, vocab - 1).to(tl.int64)
    half = tl.program_id(0) * 2 * BLOCK_R + tl.arange(0, 2 * BLOCK_R)
    there = (half < 2 * rows)[None, :]
    k = tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + token[:, None] * weight_row_stride + k[None, :] * weight_column_stride
    half_at = halves_ptr + half.to(tl.int64)[None, :] * hidden + k[:, None]
    sums = tl.zeros([BLOCK_V, 2 * BLOCK_R], dtype=tl.int32)
    if EARLY:
        halves = tl.zeros([BLOCK_K, 2 * BLOCK_R], dtype=tl.int8)
        for start in range(-BLOCK_K, hidden, BLOCK_K):
            begun = tl.full([1, 1], start, tl.int32) >= 0
            weight = tl.load(weight_at + start * weight_column_stride, mask=begun, other=0)
            after = start + BLOCK_K + inputs_ready(PDL)
            next_halves = tl.load(half_at + after, mask=there & (tl.full([1, 1], after, tl.int32) < hidden), other=0)
            sums = tl.dot(weight, halves, sums, out_dtype=tl.int32)
            halves = next_halves
    else:
        for start in range(0, hidden, BLOCK_K):
            if EVEN:
                weight = tl.load(weight_at + start * weight_column_stride)
                halves = tl.load(half_at + start, mask=there, other=0)
            else:
                inside = k < hidden - start
                weight = tl.load(weight_at + start * weight_column_stride, mask=inside[None, :], other=0)
                halves = tl.load(half_at + start, mask=there & inside[:, None], other=0)
            sums = tl.dot(weight, halves, sums, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(sums, [BLOCK_V, BLOCK_R, 2]))
    total = high.to(tl.int64) * 256 + low
    row_scale = tl.load(row_scale_ptr + row, mask=row < rows, other=0.0)
    logits = (tl.load(scale_ptr + token)[:, None] * row_scale[None, :]) * total.to(tl.float32)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + token).to(tl.float32)[:, None]
    return logits


@triton.jit
def _top_tile(
    weight_ptr, scale_ptr, bias_ptr, halves_ptr, row_scale_ptr, lists_ptr, lengths_ptr, bests_ptr, floor_ptr,
    tile, tiles, vocab, rows, hidden, weight_row_stride, weight_column_stride, count,
    SLOTS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = _logits(
        weight_ptr, scale_ptr, bias_ptr, halves_ptr, row_scale_ptr, token, row, vocab, rows, hidden,
        weight_row_stride, weight_column_stride, BLOCK_V, BLOCK_R, BLOCK_K, EVEN, EARLY, PDL,
    )  # fmt: skip
    collect(
        logits,
        token,
        row,
        tile,
        tiles,
        vocab,
        rows,
        count,
        lists_ptr,
        lengths_ptr,
        bests_ptr,
        floor_ptr,
        SLOTS,
        BLOCK_R,
    )


@triton.jit(do_not_specialize=["vocab", "rows", "count"])
def _top_kernel(
    weight_ptr, scale_ptr, bias_ptr, halves_ptr, row_scale_ptr, lists_ptr, lengths_ptr, bests_ptr, floor_ptr,
    vocab, rows, hidden, weight_row_stride, weight_column_stride, count,
    SLOTS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PROGRAMS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(vocab, BLOCK_V)
    first = tl.minimum(tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V), vocab - 1)
    let_go(PDL)
    prefetch_rows(weight_ptr + (first.to(tl.int64) * weight_row_stride)[:, None] + EARLY * BLOCK_K, 512, PDL)
    if not EARLY:
        wait_for_inputs(PDL)
    if PROGRAMS == 0:
        _top_tile(
            weight_ptr, scale_ptr, bias_ptr, halves_ptr, row_scale_ptr, lists_ptr, lengths_ptr, bests_ptr, floor_ptr,
            tl.program_id(1), tiles, vocab, rows, hidden, weight_row_stride, weight_column_stride, count,
            SLOTS, BLOCK_V, BLOCK_R, BLOCK_K, EVEN, EARLY, PDL,
        )  # fmt: skip
    else:
        # Flattened into one loop: the weights of the next tile come while candidates of this one are taken out.
        for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), flatten=True):
            _top_tile(
                weight_ptr, scale_ptr, bias_ptr, halves_ptr, row_scale_ptr, lists_ptr, lengths_ptr, bests_ptr,
                floor_ptr, tile, tiles, vocab, rows, hidden, weight_row_stride, weight_column_stride, count,
                SLOTS, BLOCK_V, BLOCK_R, BLOCK_K, EVEN, 0, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=["vocab", "rows"])
def _logits_kernel(
    weight_ptr, scale_ptr, bias_ptr, halves_ptr, row_scale_ptr, logits_ptr,
    vocab, rows, hidden, weight_row_stride, weight_column_stride,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = _logits(
        weight_ptr, scale_ptr, bias_ptr, halves_ptr, row_scale_ptr, token, row, vocab, rows, hidden,
        weight_row_stride, weight_column_stride, BLOCK_V, BLOCK_R, BLOCK_K, EVEN, 0, False,
    )  # fmt: skip
    at = logits_ptr + row.to(tl.int64)[None, :] * vocab + token[:, None]
    tl.store(at, logits, mask=(row < rows)[None, :] & (token < vocab)[:, None])


def int8_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    vocab: int,
    settings: dict[str, int],
) -> torch.Tensor:
    """Logits fp32 ``[N, vocab]``; shapes as in `dflash2.ops.int8_head`, checked there, none of them empty."""
    rows = hidden.shape[0]
    logits = torch.empty(rows, vocab, dtype=torch.float32, device=hidden.device)
    with torch.cuda.device_of(hidden):
        halves, row_scale = _quantise(hidden, None)
        options = _options(hidden, settings)
        del options["PROGRAMS"], options["EARLY"]  # written tiles leave no pause worth filling
        grid = (triton.cdiv(rows, options["BLOCK_R"]), triton.cdiv(vocab, options["BLOCK_V"]))
        _logits_kernel[grid](
            weight, scale, bias, halves, row_scale, logits, vocab, rows, hidden.shape[1], *weight.stride(), **options
        )
    return logits


def int8_head_top(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    vocab: int,
    count: int,
    first_id: int,
    settings: dict[str, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best ids and logits; no logits are written. Shapes as in `int8_head`."""
    rows = hidden.shape[0]
    options = _options(hidden, settings)
    with torch.cuda.device_of(hidden):
        found = Candidates(rows, vocab, count, options, hidden.device)
        halves, row_scale = _quantise(hidden, found.floor)
        _top_kernel[found.grid](
            weight, scale, bias, halves, row_scale, found.lists, found.lengths, found.bests, found.floor,
            vocab, rows, hidden.shape[1], *weight.stride(), count, SLOTS=found.slots, **options,
        )  # fmt: skip
        return found.select(first_id)


def _quantise(hidden: torch.Tensor, floor: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = hidden.shape
    halves = torch.empty(rows, 2, width, dtype=torch.int8, device=hidden.device)
    row_scale = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    block = min(_QUANTISE_BLOCK, triton.next_power_of_2(width))
    part = min(_QUANTISE_PART, block)
    _quantise_kernel[(rows, triton.cdiv(width, part))](
        hidden, halves, row_scale, floor, width, *hidden.stride(), BLOCK=block, PART=part,
        SLOTS=0 if floor is None else floor.shape[1], num_warps=8, **dependent_launch(hidden),
    )  # fmt: skip
    return halves, row_scale


def _options(hidden: torch.Tensor, settings: dict[str, int]) -> dict[str, int | bool]:
    """A product and a sum stay two roundings, as in the definition: no fusing."""
    rows, width = hidden.shape
    block_r = min(settings["BLOCK_R"], max(8, triton.next_power_of_2(rows)))
    even = width % settings["BLOCK_K"] == 0
    early = settings["EARLY"] and even and block_r <= 16 and not settings["PROGRAMS"]
    # In tiles: all stages but those at the two ends of the pipeline.
    early = max(1, settings["num_stages"] - 2) if early else 0
    settings = settings | dependent_launch(hidden)
    return {**settings, "BLOCK_R": block_r, "EARLY": early, "EVEN": even, "enable_fp_fusion": False}
