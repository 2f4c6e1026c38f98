"""What a target is asked and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dflash2.errors import ConfigError
from dflash2.prompts import all_prompt_ids

__all__ = ["Answer", "Decoder", "Request", "make_requests"]


@dataclass(frozen=True)
class Request:
    """A prompt to answer: token ids, a temperature, and the seed of its noise."""

    prompt: list[int]
    temperature: float
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """A finished request; ``tokens`` ends with the end-of-turn id unless the budget cut it."""

    request: Request
    tokens: list[int]


class Decoder(Protocol):
    """Answers requests, ``rows`` at a time."""

    rows: int

    def answer(self, todo: Sequence[Request], *, deadline: float = float("inf")) -> Iterator[Answer]:
        """Answers in the order in which they finish; at ``deadline`` (`time.monotonic`) the rest is dropped."""


def make_requests(
    tokenizer: Any,
    prompts: Sequence[dict[str, Any]],
    *,
    temperatures: Mapping[float, float],
    max_prompt: int,
    seed: int,
) -> list[Request]:
    """Each prompt's first turn once, at a temperature drawn with the given shares; repeated ones are left out.

    Args:
        tokenizer: the target's.
        prompts: from `dflash2.prompts.load_prompts`.
        temperatures: share of each; 0 is greedy.
        max_prompt: tokens; longer prompts are left out.
        seed: of the order, the temperatures and the noise.

    Raises:
        ConfigError: shares or temperatures are no such numbers, or no prompt is left.
    """
    values, shares = np.array([*temperatures]), np.array([*temperatures.values()], float)
    if (
        not len(values)
        or not np.isfinite([values, shares]).all()
        or min(values.min(), shares.min()) < 0
        or not any(shares)
    ):
        raise ConfigError(f"temperatures={dict(temperatures)}: expected T >= 0 and shares >= 0, not all of them 0.")
    rng = np.random.default_rng(seed)
    unique = {(p.get("system"), p["turns"][0]): p for p in reversed(prompts)}
    kept = [unique[key] for key in reversed(unique)]
    drawn = rng.choice(values, len(kept), p=shares / shares.sum())
    seeds = rng.integers(-(2**63), 2**63, len(kept), dtype=np.int64)
    ids = all_prompt_ids(tokenizer, kept)
    made = [Request(ids[i], float(drawn[i]), int(seeds[i])) for i in rng.permutation(len(kept))]
    short = [r for r in made if len(r.prompt) <= max_prompt]
    if not short:
        raise ConfigError(f"none of {len(prompts)} prompts has at most max_prompt={max_prompt} tokens. Raise it.")
    return short
