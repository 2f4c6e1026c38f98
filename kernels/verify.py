"""Triton kernels of `dflash2.ops.verify`. The vocabulary is split into chunks, so that a few rows fill the card.

Greedy takes two launches: the best of each chunk, then the decision. Sampled takes four: the softmax statistics ride
along in the first, and after the decision the one row that a token is drawn from is read again, twice: what each chunk
weighs, then the draw of a chunk and of a token in it. Nothing of the size of the logits is written. Weights are summed
as they are drawn from, in fp64, never as a difference of sums: a token without weight cannot come out.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

DEFAULTS = {"block": 4096, "num_warps": 8}
CANDIDATES = [
    {"block": block, "num_warps": warps}
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8))
]

_ONE_HOT, _SPARSE, _DENSE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Drafted(NamedTuple):
    """What drafts were drawn from: int64 and fp32 ``[R, k, C]``. Without candidates ids are 0..C-1; q None: one-hot."""

    candidates: torch.Tensor | None
    q: torch.Tensor | None


class Noise(NamedTuple):
    """Uniform numbers, fp64: ``accept [R, k]`` and ``replace [R]``."""

    accept: torch.Tensor
    replace: torch.Tensor


@triton.jit
def _powers(x, top, temperature):
    """``exp((x - top) / T)`` for x up to top; NaN counts as -inf, which has 0 even where it is the top."""
    x = tl.where(x != x, -float("inf"), tl.minimum(x, 3.4028234663852886e38))
    return tl.exp(tl.where(x == -float("inf"), x, (x - top) / temperature))


@triton.jit
def _chunks_kernel(
    logits_ptr, temperature_ptr, best_ptr, tops_ptr, sums_ptr,
    rows, vocab, request_stride, row_stride, temperature_stride,
    BLOCK: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    request = line // rows
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = logits_ptr + request * request_stride + (line - request * rows) * row_stride
    x = tl.load(start + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    # Integers in the order of the numbers; the zeros are equal, and NaN comes first, as in torch.argmax.
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    best = tl.max(order, 0)
    first = tl.min(tl.where(order == best, ids, 0x7FFFFFFF), 0)
    at = line * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, (best.to(tl.int64) << 32) | (0x7FFFFFFF - first))
    if SOFTMAX:
        t = tl.load(temperature_ptr + request * temperature_stride)
        numbers = tl.where(x != x, -float("inf"), tl.minimum(x, 3.4028234663852886e38))
        top = tl.max(numbers, 0)
        tl.store(tops_ptr + at, top)
        tl.store(sums_ptr + at, tl.sum(_powers(x, top, tl.where(t > 0, t, 1.0)), 0))


@triton.jit
def _draft_q(
    tokens, draft, inside, candidates_ptr, q_ptr, SLOTS: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr
):
    """What drafted tokens were drawn with, ``[ROWS]``."""
    if KIND == _ONE_HOT:
        q = tl.full(tokens.shape, 1.0, tl.float32)
    elif KIND == _SPARSE:
        slot = tl.arange(0, SLOTS)[None, :]
        mask = inside[:, None] & (slot < WIDTH)
        at = draft[:, None] * WIDTH + slot
        ids = tl.load(candidates_ptr + at, mask=mask, other=-1)
        q = tl.load(q_ptr + at, mask=mask, other=0.0)
        q = tl.sum(tl.where(mask & (ids == tokens[:, None]), q, 0.0), 1)
    else:
        at = draft * WIDTH + tl.minimum(tl.maximum(tokens, 0), WIDTH - 1)
        q = tl.load(q_ptr + at, mask=inside, other=0.0)
    return q


@triton.jit
def _decide_kernel(
    best_ptr, tops_ptr, sums_ptr, source_ptr, tokens_ptr, valid_ptr, candidates_ptr, q_ptr, accept_ptr,
    temperature_ptr, accepted_ptr, next_ptr, draft_ptr, softmax_ptr,
    k, vocab, chunks, request_stride, row_stride, temperature_stride,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr,
    SAMPLED: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    chunk = tl.arange(0, CHUNKS)[None, :]
    part = (request * (k + 1) + row[:, None]) * chunks + chunk
    there = (row[:, None] <= k) & (chunk < chunks)
    best = tl.max(tl.load(best_ptr + part, mask=there, other=-0x7FFFFFFFFFFFFFFF), 1)
    best = 0x7FFFFFFF - (best & 0xFFFFFFFF)
    draft = request * k + row
    inside = row < k
    tokens = tl.load(tokens_ptr + draft, mask=inside, other=-1)
    # A request that is not valid has no drafts.
    count = tl.where(tl.load(valid_ptr + request), k, 0)
    accepted = tl.min(tl.where((row < count) & (tokens == best), ROWS, row), 0)
    if SAMPLED:
        t = tl.load(temperature_ptr + request * temperature_stride)
        soft = tl.where(t > 0, t, 1.0)
        in_range = inside & (tokens >= 0) & (tokens < vocab)
        at = source_ptr + request * request_stride + row * row_stride + tokens
        p = tl.load(at, mask=in_range, other=0.0).to(tl.float32)
        if SOFTMAX:
            tops = tl.load(tops_ptr + part, mask=there, other=-float("inf"))
            sums = tl.load(sums_ptr + part, mask=there, other=0.0)
            top = tl.max(tops, 1)
            total = tl.sum(sums * _powers(tops, top[:, None], soft), 1)
            p = tl.where(total > 0, _powers(p, top, soft) / total, 0.0)
        q = _draft_q(tokens, draft, inside, candidates_ptr, q_ptr, SLOTS, KIND, WIDTH)
        u = tl.load(accept_ptr + draft, mask=inside, other=0.0)
        stands = in_range & (row < count) & (u * q.to(tl.float64) < p.to(tl.float64))
        accepted = tl.where(t > 0, tl.min(tl.where(stands, ROWS, row), 0), accepted)
        tl.store(draft_ptr + request, tl.where(accepted < count, request * k + accepted, -1))
        if SOFTMAX:
            tl.store(softmax_ptr + request * 2, tl.max(tl.where(row == accepted, top, -float("inf")), 0))
            tl.store(softmax_ptr + request * 2 + 1, tl.sum(tl.where(row == accepted, total, 0.0), 0))
    tl.store(accepted_ptr + request, accepted.to(tl.int64))
    tl.store(next_ptr + request, tl.sum(tl.where(row == accepted, best, 0), 0))


@triton.jit
def _weights(
    ids, request, row, draft, temperature, source_ptr, softmax_ptr, tokens_ptr, candidates_ptr, q_ptr, vocab,
    request_stride, row_stride,
    KIND: tl.constexpr, WIDTH: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Probabilities p of the row, and ``max(p - q, 0)`` where a draft fell, else p."""
    start = source_ptr + request * request_stride + row * row_stride
    if SOFTMAX:
        x = tl.load(start + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        total = tl.load(softmax_ptr + request * 2 + 1)
        p = _powers(x, tl.load(softmax_ptr + request * 2), temperature)
        p = tl.where(total > 0, p / total, 0.0)
    else:
        p = tl.load(start + ids, mask=ids < vocab, other=0.0).to(tl.float32)
    fell = draft >= 0
    q = tl.zeros_like(p)
    if KIND == _ONE_HOT:
        q += tl.where(ids == tl.load(tokens_ptr + draft, mask=fell, other=-1), 1.0, 0.0)
    elif KIND == _SPARSE:
        for c in range(WIDTH):
            token = tl.load(candidates_ptr + draft * WIDTH + c, mask=fell, other=-1)
            q += tl.where(ids == token, tl.load(q_ptr + draft * WIDTH + c, mask=fell, other=0.0), 0.0)
    else:
        q += tl.load(q_ptr + draft * WIDTH + ids, mask=ids < tl.where(fell, WIDTH, 0), other=0.0)
    return p, tl.maximum(p - q, 0.0)


@triton.jit
def _masses_kernel(
    source_ptr, softmax_ptr, tokens_ptr, candidates_ptr, q_ptr, temperature_ptr, accepted_ptr, draft_ptr,
    masses_ptr,
    vocab, request_stride, row_stride, temperature_stride,
    BLOCK: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + request * temperature_stride)
    if temperature > 0:
        row, draft = tl.load(accepted_ptr + request), tl.load(draft_ptr + request)
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        p, left = _weights(
            ids, request, row, draft, temperature, source_ptr, softmax_ptr, tokens_ptr, candidates_ptr, q_ptr, vocab,
            request_stride, row_stride, KIND, WIDTH, SOFTMAX,
        )  # fmt: skip
        at = masses_ptr + request * 2 * tl.num_programs(1) + tl.program_id(1)
        tl.store(at, tl.sum(p.to(tl.float64), 0))
        tl.store(at + tl.num_programs(1), tl.sum(left.to(tl.float64), 0))


@triton.jit
def _draw(weights, uniform, choice):
    """Index by inverse CDF. A parallel sum may go down where a weight is 0, so only what has weight is looked at."""
    below = tl.cumsum(weights, 0)
    reached = (weights > 0) & (below > uniform * tl.max(below, 0))
    last = tl.max(tl.where(weights > 0, choice, 0), 0)
    return tl.min(tl.where(reached, choice, last), 0)


@triton.jit
def _replace_kernel(
    source_ptr, softmax_ptr, tokens_ptr, candidates_ptr, q_ptr, temperature_ptr, accepted_ptr, draft_ptr,
    masses_ptr, replace_ptr, next_ptr,
    vocab, chunks, request_stride, row_stride, temperature_stride,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + request * temperature_stride)
    if temperature > 0:
        row, draft = tl.load(accepted_ptr + request), tl.load(draft_ptr + request)
        chunk = tl.arange(0, CHUNKS)
        at = masses_ptr + request * 2 * chunks + chunk
        whole = tl.load(at, mask=chunk < chunks, other=0.0)
        left = tl.load(at + chunks, mask=chunk < chunks, other=0.0)
        # Nothing left: p and q agree on everything that p has, up to rounding.
        some_left = tl.max(left, 0) > 0
        mass = tl.where(some_left, left, whole)
        uniform = tl.load(replace_ptr + request)
        drawn = _draw(mass, uniform, chunk)
        # What of the uniform number falls into the chunk is uniform again.
        here = tl.sum(tl.where(chunk == drawn, mass, 0.0), 0)
        before = tl.sum(tl.where(chunk < drawn, mass, 0.0), 0)
        rest = (uniform * tl.sum(mass, 0) - before) / tl.where(here > 0, here, 1.0)
        choice = tl.arange(0, BLOCK)
        p, residual = _weights(
            drawn * BLOCK + choice, request, row, draft, temperature, source_ptr, softmax_ptr, tokens_ptr,
            candidates_ptr, q_ptr, vocab, request_stride, row_stride, KIND, WIDTH, SOFTMAX,
        )  # fmt: skip
        weights = tl.where(some_left, residual, p).to(tl.float64)
        token = drawn * BLOCK + _draw(weights, tl.minimum(tl.maximum(rest, 0.0), 1.0), choice)
        tl.store(next_ptr + request, tl.where(here > 0, token, vocab - 1).to(tl.int64))


def verify(
    tokens: torch.Tensor,
    valid: torch.Tensor,
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    noise: Noise | None,
    drafted: Drafted,
    probabilities: torch.Tensor | None,
    settings: dict[str, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels; shapes and results as in `dflash2.ops.verify`, checked there. ``R >= 1``."""
    (requests, k), vocab, device = tokens.shape, logits.shape[-1], logits.device
    block = min(settings["block"], triton.next_power_of_2(vocab))
    chunks, warps = triton.cdiv(vocab, block), settings["num_warps"]
    padded = triton.next_power_of_2(chunks)
    logits = _last_contiguous(logits)
    source = logits if probabilities is None else _last_contiguous(probabilities)
    accepted, following = (torch.empty(requests, dtype=torch.int64, device=device) for _ in range(2))
    best = torch.empty(requests * (k + 1), chunks, dtype=torch.int64, device=device)
    sampled = temperature is not None
    softmax = sampled and probabilities is None
    # Without a temperature these are arguments that nobody reads.
    t, t_stride = (logits, 0) if temperature is None else (temperature, temperature.stride(0))
    tops, sums = torch.empty(2, *best.shape, dtype=torch.float32, device=device) if softmax else (best, best)
    row_softmax = torch.empty(requests, 2, dtype=torch.float32, device=device) if softmax else best
    draft = torch.empty_like(accepted) if sampled else accepted
    tokens, valid = tokens.contiguous(), valid.contiguous()
    candidates, q, kind, width = _spread(tokens, drafted)
    accept = best if noise is None else noise.accept.contiguous()
    slots = triton.next_power_of_2(width) if kind == _SPARSE.value else 1
    source_strides = source.stride()[:2]
    with torch.cuda.device_of(logits):
        _chunks_kernel[(requests * (k + 1), chunks)](
            logits, t, best, tops, sums, k + 1, vocab, *logits.stride()[:2], t_stride,
            BLOCK=block, SOFTMAX=softmax, num_warps=warps,
        )  # fmt: skip
        _decide_kernel[(requests,)](
            best, tops, sums, source, tokens, valid, candidates, q, accept, t, accepted, following, draft, row_softmax,
            k, vocab, chunks, *source_strides, t_stride,
            ROWS=triton.next_power_of_2(k + 1), CHUNKS=padded, SLOTS=slots, KIND=kind, WIDTH=width,
            SAMPLED=sampled, SOFTMAX=softmax,
        )  # fmt: skip
        if noise is not None:
            masses = torch.empty(requests, 2, chunks, dtype=torch.float64, device=device)
            row = (source, row_softmax, tokens, candidates, q, t, accepted, draft, masses)
            _masses_kernel[(requests, chunks)](
                *row, vocab, *source_strides, t_stride,
                BLOCK=block, KIND=kind, WIDTH=width, SOFTMAX=softmax, num_warps=warps,
            )  # fmt: skip
            _replace_kernel[(requests,)](
                *row, noise.replace.contiguous(), following, vocab, chunks, *source_strides, t_stride,
                BLOCK=block, CHUNKS=padded, KIND=kind, WIDTH=width, SOFTMAX=softmax, num_warps=warps,
            )  # fmt: skip
    return accepted, following


def _spread(tokens: torch.Tensor, drafted: Drafted) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Candidates, q, how they are spelled, and how many there are."""
    if drafted.q is None:
        return tokens, tokens, _ONE_HOT.value, 1
    q, width = drafted.q.contiguous(), drafted.q.shape[-1]
    if drafted.candidates is None:
        return tokens, q, _DENSE.value, width
    return drafted.candidates.contiguous(), q, _SPARSE.value, width


def _last_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
