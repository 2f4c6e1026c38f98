"""Runs of positions ``[first, end)``: ascending, disjoint, never empty."""

from __future__ import annotations

from itertools import pairwise

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
    begins = [i for i, p in enumerate(positions) if i == 0 or p > positions[i - 1] + 1]
    return [(positions[a], positions[b - 1] + 1) for a, b in pairwise([*begins, len(positions)])]
