"""What goes between an engine and `RequestDrafter` in one step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Chunk", "Drafts", "Live"]


@dataclass(frozen=True)
class Chunk:
    """The rows that the target ran for one request in one step.

    Attributes:
        request: the engine's id.
        start: absolute position of the first row.
        tokens: ids of the rows, rejected ones included; only read with a prefix store (may be empty without).
        rows: how many rows of taps.
        valid: how many of them count; the rest are drafts that were rejected.
        anchor: the newest token, sampled but not run yet; None when no drafts are wanted (an unfinished prompt).
        temperature: of the drafts; <= 0 is greedy.
        prefix: gives the ids of positions 0 .. start-1; only called when the request begins or jumps, and there is a
            prefix store.
    """

    request: Hashable
    start: int
    tokens: Sequence[int]
    rows: int
    valid: int
    anchor: int | None
    temperature: float = 0.0
    prefix: Callable[[], Sequence[int]] | None = None
    moved: bool = False


@dataclass(frozen=True)
class Live:
    """Where the requests of a step are, for engines that know it on the device only. Nothing of it is read by the host.

    Attributes:
        starts, valid, anchors: int64 ``[R]``, row by row as the chunks are given; for all of them, moved or not.
        temperature: fp32 ``[R]``, or None when every request is greedy.
    """

    starts: Tensor
    valid: Tensor
    anchors: Tensor
    temperature: Tensor | None = None


@dataclass(frozen=True)
class Drafts:
    """Drafts of one step, row by row as the chunks were given.

    Attributes:
        tokens: int64 ``[R, k]``; 0 where there are none.
        drafted: bool ``[R]``.
        candidates, q: as in `Proposal`, or None. Rows without drafts are one-hot on token 0.
    """

    tokens: Tensor
    drafted: Tensor
    candidates: Tensor | None
    q: Tensor | None

    def dense_q(self, vocab_size: int) -> Tensor:
        """fp32 ``[R, k, vocab_size]``: the distribution that each token was drawn from, one-hot where it was not drawn.

        Engines whose rejection sampler wants a whole row of probabilities get it here.
        """
        if self.q is not None and self.candidates is None:
            pad = vocab_size - self.q.shape[-1]
            return F.pad(self.q, (0, pad)) if pad else self.q
        dense = torch.zeros(*self.tokens.shape, vocab_size, device=self.tokens.device)
        if self.q is None or self.candidates is None:
            return dense.scatter_(-1, self.tokens.unsqueeze(-1), 1.0)
        return dense.scatter_add_(-1, self.candidates, self.q)
