"""Tokens per second and latencies of a server over numbers of concurrent requests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dflash2.serving.client import Answer, Server, acceptance

__all__ = ["measure", "table"]


def measure(
    server: Server, prompts: Sequence[str], concurrency: int, max_tokens: int, repeats: int, temperature: float
) -> dict[str, Any]:
    """Send all prompts ``repeats`` times, ``concurrency`` at a time.

    Returns:
        tokens_per_s, ttft_ms, tpot_ms, each with its median and 20 and 80 %: the first over repeats, the others over
        requests; tokens, and what drafts did.
    """
    rates, answers, before = [], list[Answer](), server.metrics()
    for _ in range(repeats):
        began = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            new = list(pool.map(lambda p: server.complete(p, max_tokens, temperature=temperature), prompts))
        rates.append(sum(a.tokens for a in new) / (time.perf_counter() - began))
        answers += new
    return {
        "concurrency": concurrency,
        "requests": len(answers),
        "tokens": sum(a.tokens for a in answers),
        "tokens_per_s": spread(rates),
        "ttft_ms": spread([1e3 * a.ttft_s for a in answers if a.ttft_s is not None]),
        "tpot_ms": spread([1e3 * a.tpot_s for a in answers if a.tpot_s is not None]),
        "drafts": acceptance(before, server.metrics()),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, and the 20th and 80th of a hundred; None without values."""
    if not values:
        return None
    if len(values) == 1:
        return dict.fromkeys(("p20", "median", "p80"), round(values[0], 3))
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return {"p20": round(fifths[0], 3), "median": round(statistics.median(values), 3), "p80": round(fifths[-1], 3)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For people."""

    def cell(value: dict[str, float] | None) -> str:
        return "-" if value is None else f"{value['median']:.1f} ({value['p20']:.1f}-{value['p80']:.1f})"

    lines = [f"{'at once':>8} {'tokens/s':>26} {'first token, ms':>26} {'each further, ms':>24} {'tokens/round':>13}"]
    for r in rows:
        drafts = r["drafts"]
        lines.append(
            f"{r['concurrency']:>8} {cell(r['tokens_per_s']):>26} {cell(r['ttft_ms']):>26} {cell(r['tpot_ms']):>24} "
            f"{'-' if drafts is None else format(drafts['tokens_per_round'], '.2f'):>13}"
        )
    return "\n".join(lines)
