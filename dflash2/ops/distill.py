"""The loss of a row of logits against a teacher's logits, and its gradient: both without a copy of the row in fp32.

    s = shape(student logits),  q = softmax(s),  p = softmax(teacher logits),  A = sum over v of min(p_v, q_v)
    loss = hard * -log q[gold] + soft * -sum p log q + tv * (1 - A) + lk * -log A

A is the probability that speculative sampling accepts a token drawn from q (arXiv 2211.17192), 1 - A the total
variation distance; -log A scales its gradient up where little is accepted (arXiv 2602.23881). The ``soft`` term has the
gradient of the KL divergence from p to q, and exceeds it by p's entropy. With M = sum of q_v over q_v < p_v:

    d loss / d s_v = hard (q_v - [v = gold]) + soft (q_v - p_v) + (tv + lk / A) q_v (M - [q_v < p_v])
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dflash2.ops.backend import Backend, check_devices, choose_backend
from dflash2.ops.launch import launch_settings
from dflash2.ops.selector_walk import shape_logits

__all__ = ["GROUP", "Distilled", "LossWeights", "distill", "distill_reference", "top_of_groups"]

#: Neighbouring logits of which `distill` keeps the largest, so that `top_of_groups` need not look at all of them.
GROUP = 64
#: A is not taken for less than this: -log A and its slope stay finite.
LEAST_ACCEPTANCE = 1e-6


class LossWeights(NamedTuple):
    """Factors of the four terms; see the module's formula."""

    hard: float
    soft: float
    tv: float = 0.0
    lk: float = 0.0


class Distilled(NamedTuple):
    """What `distill` finds.

    Attributes:
        loss: fp32 ``[N]``, without ``scale``.
        gold: int64 ``[N]``, the label: the given token, or the teacher's best (lowest id among equals).
        peaks: fp32 ``[N, ceil(V/64)]``, the largest raw student logit of each 64 neighbours.
    """

    loss: Tensor
    gold: Tensor
    peaks: Tensor


def distill(
    student: Tensor, teacher: Tensor, token: Tensor | None, scale: Tensor, weights: LossWeights, *,
    multiplier: float = 1.0, softcap: float | None = None, backend: Backend = "auto",
) -> Distilled:  # fmt: skip
    """Losses of N rows; ``teacher`` becomes the gradient of ``scale * loss`` by the raw student logits.

    Args:
        student: ``[N, V]`` floating point, raw logits (before multiplier and softcap); not changed.
        teacher: ``[N, V]``, same dtype; overwritten.
        token: int64 ``[N]``, labels; None for the teacher's best.
        scale: fp32 ``[N]``.
        weights: of the terms.
        multiplier, softcap: `shape_logits`, of the student only.
        backend: see `choose_backend`; the kernel reads each row from memory once or from L2 again.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend cannot run here.
    """
    _check(student, teacher, token, scale)
    if choose_backend(backend, student, teacher) == "torch" or 0 in student.shape:
        return distill_reference(student, teacher, token, scale, weights, multiplier, softcap)
    from dflash2.kernels import distill as kernel

    settings = launch_settings(
        "distill", kernel.DEFAULTS, student.device, rows=student.shape[0], vocab=student.shape[1]
    )
    return Distilled(*kernel.distill(student, teacher, token, scale, weights, multiplier, softcap, GROUP, settings))


def distill_reference(
    student: Tensor, teacher: Tensor, token: Tensor | None, scale: Tensor, weights: LossWeights, multiplier: float,
    softcap: float | None,
) -> Distilled:  # fmt: skip
    """The definition, in torch. Arguments as in `distill`, unchecked; two fp32 copies of the rows exist."""
    log_q = torch.log_softmax(shape_logits(student, multiplier, softcap), -1)
    gold = (teacher.argmax(-1) if token is None else token).unsqueeze(-1)
    p = torch.softmax(teacher, -1, dtype=torch.float32)
    loss = -weights.hard * log_q.gather(-1, gold).flatten() - weights.soft * (p * log_q).sum(-1)
    q = log_q.exp_()
    slope = (q - p).mul_(weights.soft).add_(q, alpha=weights.hard)
    slope.scatter_add_(-1, gold, slope.new_full(gold.shape, -weights.hard))
    if weights.tv or weights.lk:
        accepted = torch.minimum(p, q).sum(-1).clamp_min(LEAST_ACCEPTANCE)
        loss += weights.tv * (1 - accepted) - weights.lk * accepted.log()
        less = q < p
        mass = (q * less).sum(-1, keepdim=True)
        slope += (weights.tv + weights.lk / accepted).unsqueeze(-1) * q * (mass - less.float())
    if softcap is not None:
        slope *= 1 - (shape_logits(student, multiplier, softcap) / softcap).square()
    teacher.copy_(slope * (multiplier * scale).unsqueeze(-1))
    return Distilled(loss, gold.flatten(), _peaks(student))


def _peaks(student: Tensor) -> Tensor:
    missing = -student.shape[-1] % GROUP
    padded = torch.nn.functional.pad(student.float(), (0, missing), value=float("-inf"))
    return padded.unflatten(-1, (-1, GROUP)).amax(-1)


def top_of_groups(logits: Tensor, peaks: Tensor, count: int) -> Tensor:
    """Ids int64 ``[N, C]`` of the C largest of ``logits [N, V]``, best first; C <= V.

    The C best logits lie in the C groups whose largest are best: 64 C logits are sorted in place of V.
    """
    groups = peaks.topk(min(count, peaks.shape[-1]), -1).indices
    ids = (groups.unsqueeze(-1) * GROUP + torch.arange(GROUP, device=logits.device)).flatten(-2)
    last = logits.shape[-1] - 1
    values = logits.gather(-1, ids.clamp(max=last)).masked_fill(ids > last, float("-inf"))
    return ids.gather(-1, values.topk(count, -1).indices)


def _check(student: Tensor, teacher: Tensor, token: Tensor | None, scale: Tensor) -> None:
    n = student.shape[0]
    if student.dim() != 2 or teacher.shape != student.shape or teacher.dtype != student.dtype:
        raise ValueError(
            f"distill got student {list(student.shape)} {student.dtype} and teacher {list(teacher.shape)} "
            f"{teacher.dtype}; expected both [N, V] of one dtype."
        )
    if scale.shape != (n,) or scale.dtype != torch.float32:
        raise ValueError(f"distill got scale {list(scale.shape)} {scale.dtype}; expected float32 [{n}].")
    if token is not None and (token.shape != (n,) or token.dtype != torch.int64):
        raise ValueError(f"distill got token {list(token.shape)} {token.dtype}; expected int64 [{n}] or None.")
    check_devices("distill", student, teacher, scale, token)
