"""Triton kernel of `dflash2.ops.distill`: one program for each row, which it reads from memory once and then from L2.

Sums are kept for each place of a tile and added up at the end: no program waits for another thread within a tile.
"""

import torch
import triton
import triton.language as tl

#: Two programs fit on a multiprocessor: on 132 of them, rows of 2 x 49,152 bf16 are 52 MB, about what L2 has.
DEFAULTS = {"TILE": 2048, "num_warps": 16}


@triton.jit
def _shape(raw, multiplier, softcap, CAPPED: tl.constexpr):
    s = raw * multiplier
    if CAPPED:
        # There is no tanh in the language; this form does not overflow.
        small = tl.exp(-2.0 * tl.abs(s) / softcap)
        size = softcap * (1.0 - small) / (1.0 + small)
        s = tl.where(s < 0, -size, size)
    return s


@triton.jit
def _load(student, teacher, v, vocab, multiplier, softcap, CAPPED: tl.constexpr, LOWEST: tl.constexpr):
    """Raw and shaped logits of the student, logits of the teacher; outside the row LOWEST, which no exp overflows."""
    inside = v < vocab
    raw = tl.load(student + v, mask=inside, other=0.0).to(tl.float32)
    t = tl.where(inside, tl.load(teacher + v, mask=inside, other=0.0).to(tl.float32), LOWEST)
    return tl.where(inside, raw, LOWEST), tl.where(inside, _shape(raw, multiplier, softcap, CAPPED), LOWEST), t


@triton.jit
def _distill_kernel(
    student_ptr, teacher_ptr, token_ptr, scale_ptr, loss_ptr, gold_ptr, peaks_ptr, vocab, student_row_stride,
    teacher_row_stride, peaks_row_stride, multiplier, softcap, hard, soft, tv, lk,
    CAPPED: tl.constexpr, ACCEPTANCE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    LOWEST: tl.constexpr = -1.0e15
    row = tl.program_id(0).to(tl.int64)
    student = student_ptr + row * student_row_stride
    teacher = teacher_ptr + row * teacher_row_stride
    place = tl.arange(0, TILE)
    top_s = tl.full([TILE], LOWEST, tl.float32)
    top_t = tl.full([TILE], LOWEST, tl.float32)
    best = tl.zeros([TILE], tl.int32)
    sum_s = tl.zeros([TILE], tl.float32)
    sum_t = tl.zeros([TILE], tl.float32)
    cross = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab, TILE):
        v = start + place
        inside = v < vocab
        raw, s, t = _load(student, teacher, v, vocab, multiplier, softcap, CAPPED, LOWEST)
        group = start // GROUP + tl.arange(0, TILE // GROUP)
        peak = tl.max(tl.reshape(raw, [TILE // GROUP, GROUP]), 1)
        tl.store(peaks_ptr + row * peaks_row_stride + group, peak, mask=group * GROUP < vocab)
        next_s = tl.maximum(top_s, s)
        sum_s = sum_s * tl.exp(top_s - next_s) + tl.where(inside, tl.exp(s - next_s), 0.0)
        top_s = next_s
        best = tl.where(t > top_t, v, best)
        next_t = tl.maximum(top_t, t)
        weight = tl.where(inside, tl.exp(t - next_t), 0.0)
        keep = tl.exp(top_t - next_t)
        sum_t = sum_t * keep + weight
        cross = cross * keep + weight * s
        top_t = next_t
    most_s, most_t = tl.max(top_s, 0), tl.max(top_t, 0)
    lse_s = most_s + tl.log(tl.sum(sum_s * tl.exp(top_s - most_s), 0))
    shrink = tl.exp(top_t - most_t)
    total_t = tl.sum(sum_t * shrink, 0)
    lse_t = most_t + tl.log(total_t)
    mean_s = tl.sum(cross * shrink, 0) / total_t
    if token_ptr is None:
        gold = tl.min(tl.where(top_t == most_t, best, vocab), 0).to(tl.int64)
    else:
        gold = tl.load(token_ptr + row)
    s_gold = _shape(tl.load(student + gold).to(tl.float32), multiplier, softcap, CAPPED)
    loss = hard * (lse_s - s_gold) + soft * (lse_s - mean_s)
    pull, mass = 0.0, 0.0
    if ACCEPTANCE:
        least = tl.zeros([TILE], tl.float32)
        short = tl.zeros([TILE], tl.float32)
        for start in range(0, vocab, TILE):
            v = start + place
            raw, s, t = _load(student, teacher, v, vocab, multiplier, softcap, CAPPED, LOWEST)
            q, p = tl.exp(s - lse_s), tl.exp(t - lse_t)
            least += tl.minimum(p, q)
            short += tl.where(q < p, q, 0.0)
        accepted = tl.maximum(tl.sum(least, 0), 1e-6)
        loss += tv * (1.0 - accepted) - lk * tl.log(accepted)
        pull, mass = tv + lk / accepted, tl.sum(short, 0)
    tl.store(loss_ptr + row, loss)
    tl.store(gold_ptr + row, gold)
    scale = tl.load(scale_ptr + row) * multiplier
    for start in range(0, vocab, TILE):
        v = start + place
        raw, s, t = _load(student, teacher, v, vocab, multiplier, softcap, CAPPED, LOWEST)
        q, p = tl.exp(s - lse_s), tl.exp(t - lse_t)
        slope = hard * (q - tl.where(v == gold, 1.0, 0.0)) + soft * (q - p)
        if ACCEPTANCE:
            slope += pull * q * (mass - tl.where(q < p, 1.0, 0.0))
        if CAPPED:
            slope *= 1.0 - (s / softcap) * (s / softcap)
        tl.store(teacher + v, (slope * scale).to(teacher_ptr.dtype.element_ty), mask=v < vocab)


def distill(
    student: torch.Tensor, teacher: torch.Tensor, token: torch.Tensor | None, scale: torch.Tensor,
    weights: tuple[float, float, float, float], multiplier: float, softcap: float | None, group: int,
    settings: dict[str, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Launch the kernel; shapes as in `dflash2.ops.distill`, checked there, none of them empty."""
    rows, vocab = student.shape
    if student.stride(1) != 1 or teacher.stride(1) != 1:
        raise ValueError("distill got rows whose logits are not next to each other; make them contiguous.")
    loss = torch.empty(rows, dtype=torch.float32, device=student.device)
    gold = torch.empty(rows, dtype=torch.int64, device=student.device)
    peaks = torch.empty(rows, triton.cdiv(vocab, group), dtype=torch.float32, device=student.device)
    tile = min(settings["TILE"], max(group, triton.next_power_of_2(vocab)))
    warps = min(settings["num_warps"], max(1, tile // 128))
    with torch.cuda.device_of(student):
        _distill_kernel[(rows,)](
            student, teacher, token, scale, loss, gold, peaks, vocab, student.stride(0), teacher.stride(0),
            peaks.stride(0), multiplier, softcap or 1.0, *weights, CAPPED=softcap is not None,
            ACCEPTANCE=bool(weights[2] or weights[3]), GROUP=group, TILE=tile, num_warps=warps,
        )  # fmt: skip
    return loss, gold, peaks
