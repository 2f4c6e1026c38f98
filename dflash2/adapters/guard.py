"""An engine does not end because nothing could be drafted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from dflash2.adapters.base import LOGGED, RequestDrafter
from dflash2.adapters.chunks import Drafts

__all__ = ["StepGuard"]


class StepGuard:
    """Runs what an adapter does in a step; whatever it raises is counted, logged a few times, and goes no further.

    Args:
        log: the engine's, so that it is seen.

    Attributes:
        failed_steps: steps without drafts, and events that could not be followed.
    """

    def __init__(self, log: logging.Logger):
        self.log, self.failed_steps = log, 0

    def run(self, step: Callable[[], Drafts], count: int, core: RequestDrafter) -> Drafts:
        """``step()``, or no drafts for any of ``count`` requests."""
        votes = core.votes
        try:
            return step()
        except Exception:  # noqa: BLE001
            self._failed("a step without drafts")
            if core.votes == votes:  # other ranks wait to hear what can draft on this one
                core.vote([False] * count)
            tokens = torch.zeros(count, core.k, dtype=torch.int64, device=core.kv.device)
            return Drafts(tokens, tokens.new_zeros(count, dtype=torch.bool), None, None)

    def note(self, call: Callable[..., None], *args: Any) -> None:
        """``call(*args)``, for events that concern the drafter only."""
        try:
            call(*args)
        except Exception:  # noqa: BLE001
            self._failed("an event of a request was lost")

    def _failed(self, what: str) -> None:
        self.failed_steps += 1
        if self.failed_steps <= LOGGED:
            self.log.exception("dflash2: %s (%d failures so far)", what, self.failed_steps)
