"""Whether two samples are of one distribution."""

from __future__ import annotations

from collections import Counter

import torch


def homogeneity(a: Counter, b: Counter) -> float:
    """p-value of both counting the same distribution (chi-square; rare outcomes pooled)."""
    kept = [x for x in a.keys() | b.keys() if a[x] + b[x] >= 10]
    rows = torch.tensor([[c[x] for x in kept] for c in (a, b)], dtype=torch.float64)
    rest = torch.tensor([[c.total()] for c in (a, b)], dtype=torch.float64) - rows.sum(1, keepdim=True)
    if rest.sum() >= 10:
        rows = torch.cat((rows, rest), 1)
    expected = rows.sum(1, keepdim=True) * rows.sum(0, keepdim=True) / rows.sum()
    statistic, freedom = ((rows - expected) ** 2 / expected).sum(), rows.shape[1] - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), statistic.float() / 2))
