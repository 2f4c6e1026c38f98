"""Whether two greedy outputs are the same, and if not, how close a call the first difference was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Difference", "first_difference"]


@dataclass(frozen=True)
class Difference:
    """Where two outputs part.

    Attributes:
        index: number of equal tokens before.
        tokens: the two ids, None where an output has ended.
        logit_gap: how much higher the target's one-pass logits rate the first id than the second; None after an end.
            A gap of rounding size means that a pass over several rows and one over a single row rounded apart.
    """

    index: int
    tokens: tuple[int | None, int | None]
    logit_gap: float | None


@torch.no_grad()
def first_difference(target: Any, prompt: Tensor, one: list[int], other: list[int]) -> Difference | None:
    """Compare two continuations of ``prompt [1, S]``; None if they are the same."""
    for i in range(max(len(one), len(other))):
        a, b = (x[i] if i < len(x) else None for x in (one, other))
        if a == b:
            continue
        gap = None
        if a is not None and b is not None:
            text = torch.cat((prompt, torch.tensor([one[:i]], dtype=prompt.dtype, device=prompt.device)), 1)
            logits = target(input_ids=text).logits[0, -1].float()
            gap = float(logits[a] - logits[b])
        return Difference(i, (a, b), gap)
    return None
