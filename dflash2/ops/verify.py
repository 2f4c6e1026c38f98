"""Lossless acceptance of drafts: how many stand, and the token after them."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash2.ops.backend import Backend, choose_backend
from dflash2.ops.launch import launch_settings
from dflash2.ops.selector_walk import draw

__all__ = ["check_logits", "tempered_softmax", "verify", "verify_reference"]


def verify(
    tokens: Tensor,
    valid: Tensor,
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    accept: Tensor | None = None,
    replace: Tensor | None = None,
    candidates: Tensor | None = None,
    q: Tensor | None = None,
    probabilities: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Accept the drafts that the target would have produced itself.

    Greedy: draft i stands if it equals the argmax of row i (the lowest id of equals; NaN is above everything, as in
    ``torch.argmax``) and all before it stand; next comes the argmax of the row after them. Sampled: draft t stands if
    ``u * q(t) < p(t)`` and all before it stand. The first that falls is replaced by an inverse-CDF draw from
    ``max(p - q, 0)``, or from p if that is 0 everywhere; if all stand, the bonus is drawn from p.

    Args:
        tokens: int64 ``[R, k]``. Ids outside the vocabulary never stand.
        valid: bool ``[R]``; False counts as having no drafts.
        logits: floating ``[R, k+1, V]``.
        temperature: fp32 ``[R]``; requests with T <= 0 are greedy. None: all are, and only `tokens`, `valid` and
            `logits` matter.
        accept, replace: uniform numbers, fp64 ``[R, k]`` and ``[R]`` in [0, 1); needed with a temperature.
        candidates: int64 ``[R, k, C]``, what q is spread over; None: ids 0 .. C-1. Without q they do not matter.
        q: fp32 ``[R, k, C]``, what each draft was drawn from; None: one-hot.
        probabilities: fp32 ``[R, k+1, V]``, p of the sampled requests; None: `tempered_softmax` of the logits.
        backend: ``"auto"`` (the kernels on a GPU), ``"torch"`` or ``"triton"``. They can differ where a uniform number
            is within rounding of a boundary.

    Returns:
        how many drafts stand, int64 ``[R]``, and the token after them, int64 ``[R]``.

    Raises:
        ValueError: shapes do not fit, or the backend cannot run here.
    """
    _check(tokens, valid, logits, temperature, accept, replace, candidates, q, probabilities)
    if temperature is None:
        q = probabilities = None
    if q is None:
        candidates = None
    floating = [x for x in (logits, q, probabilities) if x is not None]
    if tokens.shape[0] == 0 or choose_backend(backend, *floating) == "torch":
        return verify_reference(tokens, valid, logits, temperature, accept, replace, candidates, q, probabilities)
    from dflash2.kernels import verify as kernel

    requests, rows, vocab = logits.shape
    settings = launch_settings("verify", kernel.DEFAULTS, logits.device, rows=requests * rows, vocab=vocab)
    noise = None if accept is None or replace is None else kernel.Noise(accept, replace)
    drafted = kernel.Drafted(candidates, q)
    return kernel.verify(tokens, valid, logits, temperature, noise, drafted, probabilities, settings)


def verify_reference(
    tokens: Tensor,
    valid: Tensor,
    logits: Tensor,
    temperature: Tensor | None,
    accept: Tensor | None,
    replace: Tensor | None,
    candidates: Tensor | None,
    q: Tensor | None,
    probabilities: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The definition, in torch. Arguments as in `verify`, unchecked."""
    k = tokens.shape[1]
    best = logits.argmax(-1)
    greedy_accepted = _leading(tokens.eq(best[:, :k]) & valid[:, None])
    greedy_next = best.gather(1, greedy_accepted[:, None])[:, 0]
    if temperature is None or accept is None or replace is None:
        return greedy_accepted, greedy_next
    sampled = temperature > 0
    p = tempered_softmax(logits, temperature.where(sampled, 1.0)) if probabilities is None else probabilities
    target = p[:, :k].gather(-1, tokens[..., None].clamp(0, p.shape[-1] - 1))[..., 0]
    stands = (accept * _draft_probability(tokens, candidates, q) < target) & _in_range(tokens, p)
    accepted = _leading(stands & valid[:, None])
    row = p.gather(1, accepted[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]
    if k:
        left = _residual(row, tokens, candidates, q, accepted.clamp_max(k - 1)[:, None])
        use = (accepted < k) & valid & (left.sum(-1) > 0)
        row = torch.where(use[:, None], left, row)
    return torch.where(sampled, accepted, greedy_accepted), torch.where(sampled, draw(row, replace), greedy_next)


def tempered_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """``softmax(logits / T)`` in fp32, of logits that may be anything.

    Args:
        logits: ``[R, ..., V]``; NaN counts as -inf, +inf as the largest number.
        temperature: > 0, a scalar or ``[R]``.

    Returns:
        fp32, logits' shape. A row without a number is all zeros.
    """
    t = temperature.reshape((-1,) + (1,) * (logits.dim() - 1))
    scores = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
    scores = (scores - scores.amax(-1, keepdim=True)) / t  # the best is 0: no temperature can overflow it
    return torch.softmax(scores, -1).nan_to_num(0.0)


def check_logits(tokens: Tensor, logits: Tensor) -> None:
    """Refuse logits that are not ``[R, k+1, V]`` for tokens ``[R, k]``."""
    requests, k = tokens.shape
    if logits.dim() != 3 or tuple(logits.shape[:2]) != (requests, k + 1) or logits.shape[-1] == 0:
        raise ValueError(
            f"target_logits has shape {list(logits.shape)}: expected [{requests}, {k + 1}, V], the anchor's row and "
            "one for each draft."
        )


def _leading(stands: Tensor) -> Tensor:
    return stands.to(torch.int64).cumprod(-1).sum(-1)


def _draft_probability(tokens: Tensor, candidates: Tensor | None, q: Tensor | None) -> Tensor:
    """Probability q of each drafted token, fp32 ``[R, k]``; 1 for greedy drafts."""
    if q is None:
        return torch.ones_like(tokens, dtype=torch.float32)
    if candidates is None:
        return q.gather(-1, tokens[..., None].clamp(0, q.shape[-1] - 1))[..., 0]
    return (q * candidates.eq(tokens[..., None])).sum(-1)


def _in_range(ids: Tensor, p: Tensor) -> Tensor:
    return (ids >= 0) & (ids < p.shape[-1])


def _residual(p: Tensor, tokens: Tensor, candidates: Tensor | None, q: Tensor | None, row: Tensor) -> Tensor:
    """``max(p - q, 0)`` of ``p [R, V]``, with the q of the draft in ``row [R, 1]``."""
    if q is None:
        ids = tokens.gather(1, row)
        spread = torch.ones_like(ids, dtype=p.dtype)
    else:
        spread = q.gather(1, row[..., None].expand(-1, 1, q.shape[-1]))[:, 0]
        ids = torch.arange(q.shape[-1], device=p.device).expand_as(spread)
        if candidates is not None:
            ids = candidates.gather(1, row[..., None].expand_as(spread[:, None]))[:, 0]
    spread = torch.where(_in_range(ids, p), -spread, 0.0)
    return p.scatter_add(-1, ids.clamp(0, p.shape[-1] - 1), spread).clamp_min(0)


def _check(
    tokens: Tensor,
    valid: Tensor,
    logits: Tensor,
    temperature: Tensor | None,
    accept: Tensor | None,
    replace: Tensor | None,
    candidates: Tensor | None,
    q: Tensor | None,
    probabilities: Tensor | None,
) -> None:
    check_logits(tokens, logits)
    requests, k = tokens.shape
    if (temperature is None) != (accept is None) or (accept is None) != (replace is None):
        raise ValueError("verify needs temperature, accept and replace, or none of them: one was left out.")
    expected = {
        "valid": (valid, (requests,)),
        "temperature": (temperature, (requests,)),
        "accept": (accept, (requests, k)),
        "replace": (replace, (requests,)),
        "candidates": (candidates, tuple(q.shape) if q is not None else None),
        "q": (q, (requests, k, q.shape[-1] if q is not None else 0)),
        "probabilities": (probabilities, tuple(logits.shape)),
    }
    for name, (value, shape) in expected.items():
        if value is not None and shape is not None and tuple(value.shape) != shape:
            raise ValueError(f"verify got {name} {list(value.shape)}: expected {list(shape)}.")
