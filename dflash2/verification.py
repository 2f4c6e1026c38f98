"""Lossless acceptance of a proposal, from the target's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash2.ops.verify import check_logits, tempered_softmax
from dflash2.ops.verify import verify as decide
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
    check_logits(tokens, target_logits)
    t = per_request("temperature", temperature, requests)
    top_p, top_k = per_request("top_p", top_p, requests), per_request("top_k", top_k, requests)
    if not on_device(t) and not bool((t > 0).any()):
        return Verification(*decide(tokens, proposal.valid, target_logits))
    t = t.to(tokens.device).expand(requests)
    p = None if _whole(top_p, top_k) else target_probabilities(target_logits, t.where(t > 0, 1.0), top_p, top_k)
    decision = decide(
        tokens,
        proposal.valid,
        target_logits,
        temperature=t,
        accept=uniform((requests, k), Stream.ACCEPT, generator, tokens.device),
        replace=uniform((requests,), Stream.REPLACE, generator, tokens.device),
        candidates=proposal.candidates,
        q=proposal.q,
        probabilities=p,
    )
    return Verification(*decision)


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
    settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    t, p, k = (per_request(name, x, logits.shape[0]) for name, x in settings.items())
    probabilities = tempered_softmax(logits, t.to(logits.device))
    if _whole(p, k):
        return probabilities
    p, k = (x.to(logits.device).reshape((-1,) + (1,) * (logits.dim() - 1)) for x in (p, k))
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered * ((k <= 0) | (rank < k))
    ordered = ordered / ordered.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered * ((before < p) | (rank == 0) | (p >= 1))
    ordered = ordered / ordered.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.zeros_like(probabilities).scatter(-1, order, ordered)


def _whole(top_p: Tensor, top_k: Tensor) -> bool:
    """Whether the host knows that nothing is cut."""
    return not (on_device(top_p) or on_device(top_k)) and bool((top_p >= 1).all() and (top_k <= 0).all())
