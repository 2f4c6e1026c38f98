"""What a propose returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Proposal"]


@dataclass(frozen=True)
class Proposal:
    """Drafts of one call, for R requests and k rows.

    Attributes:
        tokens: int64 ``[R, k]``, drafts for positions start+1 .. start+k.
        candidates: int64 ``[R, k, C]``, or None for a drafter without a selector.
        q: fp32 ``[R, k, C]``, the distribution each token was drawn from, over ``candidates``; ``[R, k, V]`` without a
            selector. One-hot for greedy rows. None when the whole call was greedy.
        valid: bool ``[R]``, False where a sequence could not draft (positions that do not fit, no context row, an
            anchor outside the vocabulary, a non-finite hidden state or best logit). Its tokens are in range and mean
            nothing.
    """

    tokens: Tensor
    candidates: Tensor | None
    q: Tensor | None
    valid: Tensor
