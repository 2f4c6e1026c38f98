"""The C best tokens of a row, in an order that does not depend on the backend."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["top_candidates"]


def top_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Highest values first, lower id first among equals.

    Args:
        logits: floating ``[..., V]``; NaN counts as -inf.
        count: C, 1 <= C <= V.

    Returns:
        ids int64 ``[..., C]`` and values fp32 ``[..., C]``.
    """
    values = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    cut = values.topk(count, dim=-1).values[..., -1:]
    # Which of several equals `topk` takes is not documented. What lies above the cut is in; of what equals it, the
    # lowest ids fill up. Ranks are distinct where that matters.
    size = values.shape[-1]
    rank = torch.arange(size, 0, -1, device=values.device, dtype=torch.int32).where(values == cut, 0)
    rank = rank.masked_fill(values > cut, size + 1)
    ids = rank.topk(count, dim=-1).indices.sort(dim=-1).values
    best, order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), best
