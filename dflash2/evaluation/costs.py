"""What a round costs by its number of drafts: from a file, or measured by generating."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash2.drafter import DFlash2Drafter
from dflash2.errors import ConfigError
from dflash2.generation import generate

__all__ = ["measure_costs", "read_costs"]


def measure_costs(
    target: Any, drafter: DFlash2Drafter, input_ids: Tensor, max_new_tokens: int = 64, repeats: int = 3
) -> dict[int, float]:
    """Seconds of a round with 0 to block_size - 1 drafts, by decoding one prompt with each.

    The least of some repetitions: a machine's other work only ever adds. Widths take turns, so that what slows the
    machine for a while slows all of them. The first repetition may compile, and is left out.

    Args:
        target, drafter: a pair.
        input_ids: int64 ``[1, S]``.
        max_new_tokens: tokens to decode, whatever they are.
        repeats: how often each.
    """
    widths = range(drafter.config.max_draft_tokens + 1)
    seconds: dict[int, list[float]] = {k: [] for k in widths}
    for _ in range(repeats + 1):
        for k in widths:
            out = generate(
                target, drafter, input_ids, max_new_tokens=max_new_tokens, num_draft_tokens=k, eos_token_id=[]
            )
            seconds[k].append(out.stats.decode_s / max(out.stats.widths.total(), 1))
    return {k: min(s[1:]) for k, s in seconds.items()}


def read_costs(path: Path, most: int) -> dict[int, float]:
    """Seconds of a round with 0 to ``most`` drafts.

    Args:
        path: JSON ``{"round_ms": {"0": .., "1": ..}}``, or a result of `dflash2.bench.generate`, whose medians over
            prompts count.
        most: drafts.

    Raises:
        ConfigError: the file is no such, or lacks a width.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        if "prompts" in read:
            runs = [p["runs"] for p in read["prompts"]]
            table = {k: statistics.median(r[k]["round_ms"] for r in runs) for k in runs[0] if k.isdecimal()}
        else:
            table = read["round_ms"]
        costs = {int(k): float(ms) / 1e3 for k, ms in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(
            f"--costs {path} cannot be read ({type(e).__name__}: {e}). Expected {{'round_ms': {{'0': 57.8, ..}}}}, a "
            "result file of `python -m dflash2.bench.generate`, or the word measure."
        ) from e
    missing = [k for k in range(most + 1) if k not in costs]
    if missing:
        raise ConfigError(f"--costs {path} says nothing of rounds with {missing} drafts: expected 0 to {most}.")
    return costs
