"""Triton kernel of `dflash2.ops.dense_topk`: a 16- or 32-bit head and its C best, no logits written.

Weights are always the first operand of the tensor cores and nothing is split over H, so that an element is the same
chain of sums in every tile shape, whatever the number of rows. (With 8 rows Triton takes other instructions.)
"""

import torch
import triton
import triton.language as tl

from .top_candidates import LOWEST, Candidates, collect

DEFAULTS = {"BLOCK_V": 128, "BLOCK_R": 64, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
CANDIDATES = [
    {"BLOCK_V": v, "BLOCK_R": r, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}
    for v, r, k, warps, stages in (
        # Up to 16 rows: bytes in flight.
        (64, 16, 64, 4, 4), (64, 16, 128, 4, 3), (64, 16, 128, 4, 4), (128, 16, 64, 4, 3), (128, 16, 64, 4, 4),
        (128, 16, 64, 8, 4), (128, 16, 128, 4, 3), (128, 16, 128, 8, 3), (256, 16, 64, 8, 3), (256, 16, 64, 8, 4),
        # Up to 64: a wide tile of weights, so that the rows are read less often.
        (128, 32, 64, 4, 4), (128, 64, 64, 4, 3), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4), (256, 32, 64, 8, 4),
        (256, 64, 64, 8, 3), (256, 64, 64, 8, 4),
        # More: tensor cores.
        (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4),
    )
]  # fmt: skip


@triton.jit(do_not_specialize=["vocab", "rows", "count", "tiles"])
def _top_kernel(
    hidden_ptr, weight_ptr, bias_ptr, lists_ptr, lengths_ptr, floor_ptr,
    vocab, rows, hidden, hidden_row_stride, hidden_column_stride, weight_row_stride, weight_column_stride, count, tiles,
    SLOTS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    # Tokens outside repeat the last one; `collect` leaves them out. Rows outside are zeros, which costs no reading.
    wide_token, there = tl.minimum(token, vocab - 1).to(tl.int64), (row < rows)[None, :]
    k = tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + wide_token[:, None] * weight_row_stride + k[None, :] * weight_column_stride
    hidden_at = hidden_ptr + row.to(tl.int64)[None, :] * hidden_row_stride + k[:, None] * hidden_column_stride
    logits = tl.zeros([BLOCK_V, BLOCK_R], dtype=tl.float32)
    for start in range(0, hidden, BLOCK_K):
        if EVEN:
            weight, x = tl.load(weight_at), tl.load(hidden_at, mask=there, other=0.0)
        else:
            weight = tl.load(weight_at, mask=(k < hidden - start)[None, :], other=0.0)
            x = tl.load(hidden_at, mask=there & (k < hidden - start)[:, None], other=0.0)
        logits = tl.dot(weight, x, logits, input_precision="ieee")
        weight_at += BLOCK_K * weight_column_stride
        hidden_at += BLOCK_K * hidden_column_stride
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + wide_token).to(tl.float32)[:, None]
    collect(logits, token, row, vocab, rows, count, tiles, lists_ptr, lengths_ptr, floor_ptr, SLOTS, BLOCK_R)


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
        found = Candidates(rows, vocab, count, options["BLOCK_V"], block_r, hidden.device)
        found.floor.fill_(LOWEST.value)
        _top_kernel[found.row_tiles, found.tiles](
            hidden, weight, bias, found.lists, found.lengths, found.floor, vocab, rows, width,
            *hidden.stride(), *weight.stride(), count, found.tiles, SLOTS=found.slots, **options,
        )  # fmt: skip
        return found.select(first_id)
