"""Lossless acceptance of a proposal, from the target's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash2.ops.selector_walk import draw
from dflash2.positions import on_device, per_request
from dflash2.proposal import Proposal
from dflash2.random import Stream, uniform

__all__ = ["Verification", "target_probabilities", "verify"]

PerRequest = float | Sequence[float] | Tensor


@dataclass(frozen=True)
class Verification:
    """What the target makes of a proposal.

    Attributes:
        accepted: int64 ``[R]``, leading drafts that stand, 0 .. k.
        next_token: int64 ``[R]``, the token after them: the target's bonus, or its replacement of the first rejected.
    """

    accepted: Tensor
    next_token: Tensor


def verify(
    proposal: Proposal,
    target_logits: Tensor,
    temperature: PerRequest = 0.0,
    top_p: PerRequest = 1.0,
    top_k: PerRequest = 0,
    generator: torch.Generator | None = None,
) -> Verification:
    """Accept drafts so that the output follows the target alone.

    Greedy: the longest prefix equal to the argmax of each row. Sampled: draft t of probability q(t) stands with
    probability ``min(1, p(t) / q(t))``; the first that falls is replaced by a draw from ``max(p - q, 0)``, normalised
    (Leviathan et al., arXiv 2211.17192, section 2.3), with q spread over the candidates it was drawn from.

    Args:
        proposal: of R requests and k drafts. Requests with ``valid`` False count as having no drafts.
        target_logits: ``[R, k+1, V]``, row j predicts position start+1+j. Penalties and masks are already in them.
        temperature: one for all or ``[R]``; <= 0 is greedy.
        top_p, top_k: of the target's distribution, one for all or ``[R]``; 1.0 and 0 are off.
        generator: noise. Independent of the drafts' even from an equal seed.

    Raises:
        ValueError: the logits do not have k+1 rows for each request, or a setting is not finite or has another number
            of entries.
    """
    tokens = proposal.tokens
    requests, k = tokens.shape
    if target_logits.dim() != 3 or tuple(target_logits.shape[:2]) != (requests, k + 1):
        raise ValueError(
            f"target_logits has shape {list(target_logits.shape)}: expected [{requests}, {k + 1}, V], the anchor's row "
            "and one for each draft."
        )
    t = per_request("temperature", temperature, requests)
    top_p, top_k = per_request("top_p", top_p, requests), per_request("top_k", top_k, requests)
    best = target_logits.argmax(-1)
    greedy_accepted = _leading(tokens.eq(best[:, :k]) & proposal.valid[:, None])
    greedy_next = best.gather(1, greedy_accepted[:, None])[:, 0]
    if not on_device(t) and not bool((t > 0).any()):
        return Verification(greedy_accepted, greedy_next)
    t = t.to(tokens.device).expand(requests)
    p = target_probabilities(target_logits, t.where(t > 0, 1.0), top_p, top_k)
    accepted = _leading(_stands(proposal, p, generator) & proposal.valid[:, None])
    residual = _residual(proposal, p.gather(1, accepted[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0], accepted)
    drawn = draw(residual, uniform((requests,), Stream.REPLACE, generator, tokens.device))
    return Verification(torch.where(t > 0, accepted, greedy_accepted), torch.where(t > 0, drawn, greedy_next))


def target_probabilities(
    logits: Tensor, temperature: PerRequest = 1.0, top_p: PerRequest = 1.0, top_k: PerRequest = 0
) -> Tensor:
    """Temperature, then top-k, softmax, and top-p renormalised; ties at a cut keep the lower id.

    Args:
        logits: ``[R, ..., V]``; NaN counts as -inf.
        temperature: > 0, one for all or ``[R]``. top_p, top_k: likewise.

    Returns:
        fp32, logits' shape. A row without a finite entry is all zeros.
    """
    shape = (-1,) + (1,) * (logits.dim() - 1)
    settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    t, p, k = (per_request(name, x, logits.shape[0]) for name, x in settings.items())
    whole = not (on_device(p) or on_device(k)) and bool((p >= 1).all() and (k <= 0).all())
    t, p, k = (x.to(logits.device).reshape(shape) for x in (t, p, k))
    scores = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
    scores = (scores - scores.amax(-1, keepdim=True)) / t  # the best is 0: no temperature can overflow it
    probabilities = torch.softmax(scores, -1).nan_to_num(0.0)
    if whole:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered * ((k <= 0) | (rank < k))
    ordered = ordered / ordered.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered * ((before < p) | (rank == 0) | (p >= 1))
    ordered = ordered / ordered.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.zeros_like(probabilities).scatter(-1, order, ordered)


def _leading(stands: Tensor) -> Tensor:
    return stands.to(torch.int64).cumprod(-1).sum(-1)


def _draft_probability(proposal: Proposal) -> Tensor:
    """Probability q of each drafted token, fp32 ``[R, k]``; 1 for greedy drafts."""
    if proposal.q is None:
        return torch.ones_like(proposal.tokens, dtype=torch.float32)
    if proposal.candidates is None:
        return proposal.q.gather(-1, proposal.tokens[..., None].clamp(0, proposal.q.shape[-1] - 1))[..., 0]
    return (proposal.q * proposal.candidates.eq(proposal.tokens[..., None])).sum(-1)


def _in_range(ids: Tensor, p: Tensor) -> Tensor:
    return (ids >= 0) & (ids < p.shape[-1])


def _stands(proposal: Proposal, p: Tensor, generator: torch.Generator | None) -> Tensor:
    u = uniform(tuple(proposal.tokens.shape), Stream.ACCEPT, generator, p.device)
    target = p[:, : proposal.tokens.shape[1]].gather(-1, proposal.tokens[..., None].clamp(0, p.shape[-1] - 1))[..., 0]
    return (u * _draft_probability(proposal) < target) & _in_range(proposal.tokens, p)


def _residual(proposal: Proposal, p: Tensor, accepted: Tensor) -> Tensor:
    """``max(p - q, 0)`` at the first rejected row, ``[R, V]``; p itself where all stood or nothing is left."""
    k = proposal.tokens.shape[1]
    if k == 0:
        return p
    rejected = (accepted < k) & proposal.valid
    row = accepted.clamp_max(k - 1)[:, None]
    if proposal.q is None:
        ids = proposal.tokens.gather(1, row)
        q = torch.ones_like(ids, dtype=p.dtype)
    else:
        q = proposal.q.gather(1, row[..., None].expand(-1, 1, proposal.q.shape[-1]))[:, 0]
        ids = torch.arange(q.shape[-1], device=p.device).expand_as(q)
        if proposal.candidates is not None:
            ids = proposal.candidates.gather(1, row[..., None].expand_as(q[:, None]))[:, 0]
    left = p.scatter_add(-1, ids.clamp(0, p.shape[-1] - 1), torch.where(_in_range(ids, p), -q, 0.0)).clamp_min(0)
    use = rejected & (left.sum(-1) > 0)
    return torch.where(use[:, None], left, p)
