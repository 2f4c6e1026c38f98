"""Ratios over prompts with bootstrap intervals; equal draws for every run, so that differences are paired."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

__all__ = ["DRAWS", "Estimate", "Sample", "resample"]

DRAWS = 1000
#: Ends of a 95 % interval.
LEVELS = (2.5, 97.5)


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; ``prompts`` say something about it."""

    value: float
    low: float
    high: float
    prompts: int


@dataclass(frozen=True)
class Sample:
    """A statistic on the data, and on each of `DRAWS` resamples of its prompts."""

    value: float
    draws: np.ndarray
    prompts: int

    @classmethod
    def mean(cls, values: np.ndarray, weights: np.ndarray) -> Sample:
        """Mean over prompts; those without a value (NaN) are left out."""
        there = np.isfinite(values)
        return cls.ratio(np.where(there, values, 0.0), there.astype(float), weights)

    @classmethod
    def ratio(cls, numerator: np.ndarray, denominator: np.ndarray, weights: np.ndarray) -> Sample:
        """Sum over prompts by sum over prompts. ``weights [DRAWS, P]`` from `resample`."""
        below = denominator.sum()
        value = numerator.sum() / below if below > 0 else np.nan
        with np.errstate(invalid="ignore", divide="ignore"):
            draws = (weights @ numerator) / (weights @ denominator)
        return cls(float(value), draws, int((denominator > 0).sum()))

    @classmethod
    def constant(cls, value: float, prompts: int) -> Sample:
        """What no prompt decides."""
        return cls(value, np.full(DRAWS, value), prompts)

    def __sub__(self, other: Sample) -> Sample:
        return Sample(self.value - other.value, self.draws - other.draws, min(self.prompts, other.prompts))

    def scaled(self, factor: float) -> Sample:
        """The statistic times a constant."""
        return Sample(self.value * factor, self.draws * factor, self.prompts)

    def estimate(self) -> Estimate | None:
        """None where no prompt says anything."""
        draws = self.draws[np.isfinite(self.draws)]
        if not np.isfinite(self.value) or not len(draws):
            return None
        low, high = np.percentile(draws, LEVELS)
        return Estimate(self.value, float(low), float(high), self.prompts)


def resample(prompts: int, name: str) -> np.ndarray:
    """How often each of P prompts is in each of `DRAWS` resamples, fp64 ``[DRAWS, P]``; decided by P and a name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.multinomial(prompts, np.full(prompts, 1 / prompts), DRAWS).astype(float)
