"""SGLang's sampling settings of a batch, as `dflash2.verify` takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["draft_temperature", "keep_sampled", "temperatures"]

#: SGLang's spelling of greedy.
GREEDY_TOP_K = 1


def draft_temperature(request: Any) -> float:
    """At which a request's drafts are drawn; 0 is greedy."""
    p = request.sampling_params
    return 0.0 if p.top_k == GREEDY_TOP_K else float(p.temperature)


def temperatures(info: Any) -> Tensor | None:
    """fp32 ``[R]``, 0 where a request is greedy; None when all are.

    Args:
        info: SGLang's ``SamplingBatchInfo``.
    """
    if info.is_all_greedy:
        return None
    return info.temperatures.view(-1).float().masked_fill(info.top_ks.view(-1) == GREEDY_TOP_K, 0.0)


def keep_sampled(logits: Tensor, temperature: Tensor, info: Any) -> Tensor:
    """Logits with -inf where SGLang's sampler would not draw: cuts by rank, mass and least probability.

    The cuts are taken on one and the same distribution, as the sampler takes them, and not one after the other.

    Args:
        logits: ``[R, n, V]``. The best of each row always stays.
        temperature: fp32 ``[R]``.
        info: SGLang's ``SamplingBatchInfo``.
    """
    if not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling):
        return logits
    ordered, order = logits.float().sort(dim=-1, descending=True, stable=True)
    p = (ordered / temperature.where(temperature > 0, 1.0)[:, None, None]).softmax(-1)
    top_k, top_p, min_p = (x.view(-1, 1, 1) for x in (info.top_ks, info.top_ps, info.min_ps))
    rank = torch.arange(logits.shape[-1], device=logits.device)
    kept = (rank < top_k) & (p.cumsum(-1) - p <= top_p)
    if info.need_min_p_sampling:
        kept &= p >= p[..., :1] * min_p
    kept |= rank == 0
    return logits.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), float("-inf"))
