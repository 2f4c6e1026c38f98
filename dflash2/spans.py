"""Runs of positions ``[first, end)``: ascending, disjoint, never empty."""

from __future__ import annotations

__all__ = ["Spans", "cut", "merge", "runs"]

Spans = list[tuple[int, int]]


def cut(spans: Spans, first: int, end: int) -> Spans:
    """The part of the spans inside ``[first, end)``."""
    cut = [(max(a, first), min(b, end)) for a, b in spans]
    return [(a, b) for a, b in cut if a < b]


def merge(spans: Spans) -> Spans:
    """The same positions in ascending, disjoint spans."""
    merged: Spans = []
    for a, b in sorted(spans):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return merged


def runs(positions: list[int]) -> Spans:
    """Ascending positions as spans."""
    return merge([(p, p + 1) for p in positions])
