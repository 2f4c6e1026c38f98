"""What goes between an engine and `RequestDrafter` in one step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.config import DFlash2Config
from dflash2.positions import upload
from dflash2.proposal import Proposal

__all__ = ["Chunk", "Drafts", "Live", "moved_chunk"]


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
        moved: only the device knows where the request is now (`Live`), and how many rows count; start and valid are
            not looked at.
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


@lru_cache(4096)
def moved_chunk(request: Hashable, rows: int, drafting: bool = True) -> Chunk:
    """Of a request that goes on where only the device knows: one object for all of its steps."""
    return Chunk(request, 0, (), rows, rows, 0 if drafting else None, moved=True)


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

    @classmethod
    def joined(
        cls,
        count: int,
        k: int,
        config: DFlash2Config,
        device: torch.device,
        parts: Sequence[tuple[Sequence[int], Proposal]],
    ) -> Drafts:
        """Of ``count`` requests, from proposals for some of them each.

        Args:
            count, k: R and the drafts per request.
            config: of the drafter.
            device: of the results.
            parts: (places in the step, what was proposed for these).
        """
        if len(parts) == 1 and len(parts[0][0]) == count:
            p = parts[0][1]
            return cls.whole(replace(p, tokens=p.tokens * p.valid[:, None]))
        tokens = torch.zeros(count, k, dtype=torch.int64, device=device)
        drafted = torch.zeros(count, dtype=torch.bool, device=device)
        candidates = q = None
        if config.selector_top_k:
            candidates = torch.zeros(count, k, config.selector_top_k, dtype=torch.int64, device=device)
        if any(p.q is not None for _, p in parts):
            q = torch.zeros(count, k, config.selector_top_k or config.vocab_size, device=device)
            q[..., 0] = 1.0
        for some, p in parts:
            index = upload(some, device)
            drafted[index] = p.valid
            tokens[index] = p.tokens * p.valid[:, None]
            if candidates is not None and p.candidates is not None:
                candidates[index] = p.candidates.masked_fill(~p.valid[:, None, None], 0)
            if q is not None:
                q[index] = torch.where(p.valid[:, None, None], _distribution(p, config.vocab_size), q[index])
        return cls(tokens, drafted, candidates, q)

    @classmethod
    def whole(cls, p: Proposal) -> Drafts:
        """Of a proposal for all requests of a step: the usual one, in few launches.

        Args:
            p: its tokens are 0 where it is not valid.
        """
        if p.q is None:
            return cls(p.tokens, p.valid, p.candidates, None)
        valid = p.valid[:, None, None]
        q = torch.where(valid, p.q, 0.0)
        q[..., 0] += ~p.valid[:, None]
        return cls(p.tokens, p.valid, None if p.candidates is None else p.candidates * valid, q)

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


def _distribution(p: Proposal, vocab_size: int) -> Tensor:
    """``q`` of a proposal, or that of greedy rows."""
    if p.q is not None:
        return p.q
    ids = torch.arange(vocab_size, device=p.tokens.device) if p.candidates is None else p.candidates
    return (ids == p.tokens.unsqueeze(-1)).float()
