"""The C best tokens of a row, in an order that does not depend on the backend."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["top_candidates"]

_ID_MASK = 0xFFFFFFFF


def top_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Highest values first, lower id first among equals.

    Args:
        logits: floating ``[..., V]``; NaN counts as -inf.
        count: C, 1 <= C <= V.

    Returns:
        ids int64 ``[..., C]`` and values fp32 ``[..., C]``.
    """
    values = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if count == 1:  # argmax returns the first of equals on no documented terms, so ask for it
        best = values.amax(-1, keepdim=True)
        ids = (values == best).to(torch.uint8).argmax(-1, keepdim=True)
        return ids, best
    # One sortable integer per entry: the float's bits in order of value above, the complement of its id below.
    bits = (values + 0.0).view(torch.int32).to(torch.int64)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(values.shape[-1], device=values.device)
    keys = (bits << 32) | (_ID_MASK - ids)
    best_ids = _ID_MASK - (keys.topk(count, dim=-1).values & _ID_MASK)
    return best_ids, values.gather(-1, best_ids)
