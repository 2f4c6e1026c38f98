"""Triton kernel of `dflash2.ops.dense_topk`: a 16- or 32-bit head and its C best, no logits written.

Weights are always the first operand of the tensor cores and nothing is split over H, so that an element is the same
chain of sums in every tile shape, whatever the number of rows. (With 8 rows Triton takes other instructions.)
"""

import torch
import triton
import triton.language as tl

from .top_candidates import LOWEST, Candidates, collect

#: PROGRAMS on each multiprocessor take tile after tile without a pause; 0: one program for each tile.
DEFAULTS = {"BLOCK_V": 128, "BLOCK_R": 64, "BLOCK_K": 64, "PROGRAMS": 0, "num_warps": 8, "num_stages": 3}
CANDIDATES = [
    {"BLOCK_V": v, "BLOCK_R": r, "BLOCK_K": k, "PROGRAMS": programs, "num_warps": warps, "num_stages": stages}
    for v, r, k, programs, warps, stages in (
        # Up to 16 rows: bytes in flight.
        (64, 16, 64, 0, 4, 4), (64, 16, 128, 0, 4, 3), (64, 16, 128, 2, 4, 4), (128, 16, 64, 0, 4, 3),
        (128, 16, 64, 0, 4, 4), (128, 16, 64, 3, 4, 4), (128, 16, 64, 0, 8, 4), (128, 16, 128, 0, 8, 3),
        (256, 16, 64, 0, 8, 3), (256, 16, 64, 1, 8, 5),
        # Up to 64: a wide tile of weights, so that the rows are read less often.
        (128, 32, 64, 0, 4, 4), (128, 64, 64, 0, 8, 3), (128, 64, 64, 2, 8, 4), (256, 32, 64, 1, 8, 5),
        (256, 64, 64, 0, 8, 4), (256, 64, 64, 1, 8, 4), (256, 64, 64, 1, 8, 5),
        # More: tensor cores.
        (128, 128, 64, 0, 8, 3), (128, 128, 64, 1, 8, 4), (256, 128, 64, 0, 8, 4), (256, 128, 64, 1, 8, 4),
    )
]  # fmt: skip


@triton.jit
def _top_tile(
    hidden_ptr, weight_ptr, bias_ptr, lists_ptr, lengths_ptr, bests_ptr, floor_ptr, tile, tiles, vocab, rows, hidden,
    hidden_row_stride, hidden_column_stride, weight_row_stride, weight_column_stride, count,
    SLOTS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    # Tokens outside repeat the last one; `collect` leaves them out. Rows outside are zeros, which costs no reading.
    wide_token, there = tl.minimum(token, vocab - 1).to(tl.int64), (row < rows)[None, :]
    k = tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + wide_token[:, None] * weight_row_stride + k[None, :] * weight_column_stride
    hidden_at = hidden_ptr + row.to(tl.int64)[None, :] * hidden_row_stride + k[:, None] * hidden_column_stride
    logits = tl.zeros([BLOCK_V, BLOCK_R], dtype=tl.float32)
    for start in range(0, hidden, BLOCK_K):
        if EVEN:
            weight = tl.load(weight_at + start * weight_column_stride)
            x = tl.load(hidden_at + start * hidden_column_stride, mask=there, other=0.0)
        else:
            inside = k < hidden - start
            weight = tl.load(weight_at + start * weight_column_stride, mask=inside[None, :], other=0.0)
            x = tl.load(hidden_at + start * hidden_column_stride, mask=there & inside[:, None], other=0.0)
        logits = tl.dot(weight, x, logits, input_precision="ieee")
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + wide_token).to(tl.float32)[:, None]
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
    hidden_ptr, weight_ptr, bias_ptr, lists_ptr, lengths_ptr, bests_ptr, floor_ptr, vocab, rows, hidden,
    hidden_row_stride, hidden_column_stride, weight_row_stride, weight_column_stride, count,
    SLOTS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(vocab, BLOCK_V)
    if PROGRAMS == 0:
        _top_tile(
            hidden_ptr, weight_ptr, bias_ptr, lists_ptr, lengths_ptr, bests_ptr, floor_ptr, tl.program_id(1), tiles,
            vocab, rows, hidden, hidden_row_stride, hidden_column_stride, weight_row_stride, weight_column_stride,
            count, SLOTS, BLOCK_V, BLOCK_R, BLOCK_K, EVEN,
        )  # fmt: skip
    else:
        # Flattened into one loop: the weights of the next tile come while candidates of this one are taken out.
        for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), flatten=True):
            _top_tile(
                hidden_ptr, weight_ptr, bias_ptr, lists_ptr, lengths_ptr, bests_ptr, floor_ptr, tile, tiles, vocab,
                rows, hidden, hidden_row_stride, hidden_column_stride, weight_row_stride, weight_column_stride, count,
                SLOTS, BLOCK_V, BLOCK_R, BLOCK_K, EVEN,
            )  # fmt: skip


def dense_topk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    vocab: int,
    count: int,
    first_id: int,
    settings: dict[str, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; shapes as in `dflash2.ops.dense_topk`, checked there, none of them empty."""
    rows, width = hidden.shape
    block_r = min(settings["BLOCK_R"], max(16, triton.next_power_of_2(rows)))
    options = {**settings, "BLOCK_R": block_r, "EVEN": width % settings["BLOCK_K"] == 0}
    with torch.cuda.device_of(hidden):
        found = Candidates(rows, vocab, count, options, hidden.device)
        found.floor.fill_(LOWEST.value)
        _top_kernel[found.grid](
            hidden, weight, bias, found.lists, found.lengths, found.bests, found.floor, vocab, rows, width,
            *hidden.stride(), *weight.stride(), count, SLOTS=found.slots, **options,
        )  # fmt: skip
        return found.select(first_id)
