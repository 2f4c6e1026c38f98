"""Triton kernel of `dflash2.ops.selector_walk`: one program for each request scores all edges, then walks them.

The rows of both codebooks depend on candidates only, not on the path, so all are fetched at once: following the path
row by row would wait for memory k times. Scores are products on the tensor cores, each fp32 split into three.
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, prefetch_rows, wait_for_inputs

DEFAULTS = {"rank_tile": 64, "num_stages": 4, "num_warps": 8}
CANDIDATES = [
    {"rank_tile": tile, "num_stages": stages, "num_warps": warps}
    for tile in (32, 64)
    for stages in (2, 3, 4)
    for warps in (4, 8)
]

#: Edges [k, C, C] that registers hold, each extent rounded up to a power of two.
MOST_EDGES = 1 << 14
#: What the pipeline of codebook rows may take of shared memory: fits GPUs from compute capability 8.6 on.
_PIPELINE_BYTES = 96 * 1024
#: Of one codebook in registers at a time: 32 for each of 256 threads. With twice as many, some spill.
_TILE_ELEMENTS = 8192
#: The least that the product takes.
_LEAST_TILE = 16


@triton.jit
def _finite(x):
    lowest, largest = -3.4028234663852886e38, 3.4028234663852886e38
    return tl.where(x != x, lowest, tl.minimum(tl.maximum(x, lowest), largest))


@triton.jit
def _shape(raw, multiplier, softcap, CAPPED: tl.constexpr):
    x = raw * multiplier
    if CAPPED:
        # There is no tanh in the language. In fp64 this form loses nothing that fp32 could show.
        wide = 2.0 * (x / softcap).to(tl.float64)
        capped = (softcap * (1.0 - 2.0 / (tl.exp(wide) + 1.0))).to(tl.float32)
        x = tl.where(x == -float("inf"), x, capped)
    return _finite(x)


@triton.jit
def _draw(q, uniform, choice):
    """One entry of each row of ``q [E, C]`` by its ``uniform [E]``; ``choice [1, C]``."""
    # A parallel sum may go down by a rounding where q is 0, so only what has probability is looked at.
    below = tl.cumsum(q.to(tl.float64), 1)
    reached = (q > 0) & (below > (uniform * tl.max(below, 1))[:, None])
    last = tl.max(tl.where(q > 0, choice, 0), 1)
    return tl.min(tl.where(reached, choice, last[:, None]), 1)


@triton.jit
def _selector_walk_kernel(
    gate_ptr, anchors_ptr, candidates_ptr, logits_ptr, predecessor_ptr, successor_ptr, temperature_ptr,
    uniforms_ptr, tokens_ptr, index_ptr, q_ptr, meaningful_ptr,
    vocab, multiplier, softcap, temperature_stride,
    K: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, CAPPED: tl.constexpr, SAMPLED: tl.constexpr, PARTS: tl.constexpr,
    CODE_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)[:, None]
    slot = tl.arange(0, SLOTS)[None, :]
    there = (row < K) & (slot < C)
    at = (request * K + row) * C + slot
    ids = tl.load(candidates_ptr + at, mask=there, other=0)
    before = tl.load(candidates_ptr + at - C, mask=there & (row > 0), other=0)
    before = tl.where(row == 0, tl.load(anchors_ptr + request), before)
    # Whatever the ids are, rows inside the codebooks are read.
    ids = tl.minimum(tl.maximum(ids, 0), vocab - 1)
    before = tl.minimum(tl.maximum(before, 0), vocab - 1)
    if CODE_BYTES > 0:
        # Whole rows at once: the loop below, a few columns ahead, would wait for memory over and over.
        prefetch_rows(predecessor_ptr + tl.reshape(before, [ROWS * SLOTS])[:, None] * RANK, CODE_BYTES, PDL)
        prefetch_rows(successor_ptr + tl.reshape(ids, [ROWS * SLOTS])[:, None] * RANK, CODE_BYTES, PDL)

    raw = tl.load(logits_ptr + at, mask=there, other=0.0).to(tl.float32)
    strange = there & (slot == 0) & ((raw != raw) | (tl.abs(raw) == float("inf")))
    tl.store(meaningful_ptr + request, tl.max(tl.max(strange.to(tl.int32), 1), 0) == 0)
    unary = _shape(raw, multiplier, softcap, CAPPED)

    scores = tl.zeros([ROWS, SLOTS, SLOTS], tl.float32)
    for first in tl.range(0, RANK, TILE, num_stages=STAGES):
        r = first + tl.arange(0, TILE)[None, None, :]
        inside = r < RANK
        a = tl.load(predecessor_ptr + before[:, :, None] * RANK + r, mask=inside, other=0.0)
        b = tl.load(successor_ptr + ids[:, :, None] * RANK + r, mask=inside, other=0.0)
        gate_at = gate_ptr + (request * K + row[:, :, None]) * RANK + r
        gate = tl.load(gate_at, mask=inside & (row[:, :, None] < K), other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            more = gate_at + part * tl.num_programs(0).to(tl.int64) * (K * RANK)
            gate += tl.load(more, mask=inside & (row[:, :, None] < K), other=0.0).to(tl.float32)
        a = a.to(tl.float32) * gate
        scores = tl.dot(a, tl.permute(b.to(tl.float32), (0, 2, 1)), scores, input_precision="tf32x3")
    # Padding loses against everything.
    scores = tl.where(slot[:, None, :] < C, _finite(scores + unary[:, None, :]), -float("inf"))
    scores = tl.reshape(scores, [ROWS * SLOTS, SLOTS])

    # Every edge's successor at once; the walk is then a chain of lookups.
    best = tl.argmax(scores, 1)
    if SAMPLED:
        temperature = tl.load(temperature_ptr + request * temperature_stride)
        greedy = temperature <= 0
        choice = tl.arange(0, SLOTS)[None, :]
        q = tl.exp(tl.div_rn(scores - tl.max(scores, 1)[:, None], tl.where(greedy, 1.0, temperature)))
        q = tl.where(greedy, (choice == best[:, None]).to(tl.float32), tl.div_rn(q, tl.sum(q, 1)[:, None]))
        step = tl.arange(0, ROWS * SLOTS) // SLOTS
        uniform = tl.load(uniforms_ptr + request * K + step, mask=step < K, other=0.0)
        best = tl.where(greedy, best, _draw(q, uniform, choice))
    edge, steps = tl.arange(0, ROWS * SLOTS), tl.arange(0, ROWS)
    walked = tl.zeros([ROWS], tl.int32)
    chosen = 0
    for i in tl.static_range(K):
        here = edge == i * SLOTS + chosen
        if SAMPLED:
            taken = tl.sum(tl.where(here[:, None], q, 0.0), 0)
            tl.store(q_ptr + (request * K + i) * C + tl.arange(0, SLOTS), taken, mask=tl.arange(0, SLOTS) < C)
        chosen = tl.sum(tl.where(here, best, 0), 0)
        walked = tl.where(steps == i, chosen, walked)
    at = request * K + steps
    tl.store(index_ptr + at, walked.to(tl.int64), mask=steps < K)
    tl.store(tokens_ptr + at, tl.load(candidates_ptr + at * C + walked, mask=steps < K, other=0), mask=steps < K)


def fits(k: int, count: int) -> bool:
    """Whether the kernel can hold the edges of k rows of ``count`` candidates."""
    rows, slots = _extents(k, count)
    return rows * slots * slots <= MOST_EDGES


def selector_walk(
    gate: torch.Tensor,
    anchors: torch.Tensor,
    candidates: torch.Tensor,
    logits: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    multiplier: float,
    softcap: float | None,
    temperature: torch.Tensor | None,
    uniforms: torch.Tensor | None,
    settings: dict[str, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Launch the kernel; shapes and results as in `dflash2.ops.selector_walk`, checked there. ``R, k >= 1``."""
    requests, k, count = candidates.shape
    vocab, rank = predecessor_codebook.shape
    rows, slots = _extents(k, count)
    tokens, index = torch.empty_like(candidates[..., 0]), torch.empty_like(candidates[..., 0])
    q = None if temperature is None else torch.empty(candidates.shape, dtype=torch.float32, device=gate.device)
    meaningful = torch.empty(requests, dtype=torch.bool, device=gate.device)
    column_bytes = rows * slots * (predecessor_codebook.element_size() + successor_codebook.element_size())
    tile, stages = _pipeline(settings, rank, rows * slots, column_bytes)
    with torch.cuda.device_of(gate):
        _selector_walk_kernel[(requests,)](
            gate.contiguous(),
            anchors.contiguous(),
            candidates.contiguous(),
            logits.contiguous(),
            predecessor_codebook.contiguous(),
            successor_codebook.contiguous(),
            gate if temperature is None else temperature,
            gate if uniforms is None else uniforms.contiguous(),
            tokens,
            index,
            gate if q is None else q,
            meaningful,
            vocab,
            float(multiplier),
            1.0 if softcap is None else float(softcap),
            0 if temperature is None else temperature.stride(0),
            K=k,
            C=count,
            RANK=rank,
            ROWS=rows,
            SLOTS=slots,
            TILE=tile,
            STAGES=stages,
            CAPPED=softcap is not None,
            SAMPLED=temperature is not None,
            CODE_BYTES=_lines(rank * predecessor_codebook.element_size()),
            num_warps=settings["num_warps"],
            PARTS=gate.shape[0],
            **dependent_launch(gate),
        )
    return tokens, index, q, meaningful


def _extents(k: int, count: int) -> tuple[int, int]:
    """Rows and candidates rounded up to what tensor cores take."""
    return triton.next_power_of_2(k), max(triton.next_power_of_2(count), 16)


def _lines(row_bytes: int) -> int:
    """What of a row to ask for: a power of two of 128-byte lines, or none."""
    return 128 << (row_bytes // 128).bit_length() - 1 if row_bytes >= 128 else 0


def _pipeline(settings: dict[str, int], rank: int, codes: int, column_bytes: int) -> tuple[int, int]:
    """Columns of ``codes`` codebook rows that are fetched together, and stages, within what the GPU has."""
    most = min(settings["rank_tile"], triton.next_power_of_2(rank), _TILE_ELEMENTS // codes)
    tile, stages = max(most, _LEAST_TILE), settings["num_stages"]
    while tile > _LEAST_TILE and tile * column_bytes * (stages - 1) > _PIPELINE_BYTES:
        tile //= 2
    return tile, min(stages, 1 + _PIPELINE_BYTES // (tile * column_bytes))
