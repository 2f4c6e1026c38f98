"""Drafts between the step that made them and the step that verifies them, by SGLang's request slots."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash2.adapters.base import RequestDrafter
from dflash2.adapters.chunks import Drafts
from dflash2.proposal import Proposal

__all__ = ["DraftSlots"]


class DraftSlots:
    """One place for each request slot. A slot is written in every step that runs it, so nothing stale is ever read.

    All of it is on the device: with overlapped scheduling the next step is prepared before this one is done.

    Args:
        core: what drafts.
        slots: of SGLang's request pool.
    """

    def __init__(self, core: RequestDrafter, slots: int):
        c, device = core.drafter.config, core.kv.device
        self.tokens = torch.zeros(slots, core.k, dtype=torch.int64, device=device)
        self.drafted = torch.zeros(slots, dtype=torch.bool, device=device)
        self.candidates = self.q = None
        if c.selector_top_k:
            shape = slots, core.k, c.selector_top_k
            self.candidates = torch.zeros(shape, dtype=torch.int64, device=device)
            self.q = torch.zeros(shape, dtype=torch.float32, device=device)

    def put(self, slots: Tensor, drafts: Drafts) -> None:
        """Keep the drafts of a step.

        Args:
            slots: int64 ``[R]``.
            drafts: greedy ones, or of a drafter with a selector.
        """
        self.tokens[slots], self.drafted[slots] = drafts.tokens, drafts.drafted
        # Of greedy drafts, and of a step that failed, nobody looks at distributions: what is there may stay.
        if self.candidates is None or self.q is None or drafts.candidates is None or drafts.q is None:
            return
        self.candidates[slots], self.q[slots] = drafts.candidates, drafts.q

    def take(self, slots: Tensor, sampled: bool) -> Proposal:
        """What the drafter last proposed for these slots.

        Args:
            slots: int64 ``[R]``.
            sampled: whether any request of them is; a wholly greedy batch needs no distributions.
        """
        tokens, valid = self.tokens[slots], self.drafted[slots]
        if not sampled or self.candidates is None or self.q is None:
            return Proposal(tokens, None, None, valid)
        return Proposal(tokens, self.candidates[slots], self.q[slots], valid)
