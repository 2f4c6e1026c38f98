from __future__ import annotations

import math

import numpy as np
import pytest

from dflash2.evaluation.statistics import DRAWS, Sample, resample


def test_the_interval_of_a_mean_is_that_of_its_standard_error():
    values = np.random.default_rng(0).normal(3.0, 1.0, 400)
    e = Sample.mean(values, resample(400, "x")).estimate()
    assert e is not None
    assert e.value == pytest.approx(values.mean())
    error = values.std() / math.sqrt(400)
    assert e.low == pytest.approx(values.mean() - 1.96 * error, abs=0.25 * error)
    assert e.high == pytest.approx(values.mean() + 1.96 * error, abs=0.25 * error)


def test_a_ratio_is_of_sums_and_a_mean_leaves_gaps_out():
    weights = resample(3, "x")
    assert weights.shape == (DRAWS, 3)
    assert set(weights.sum(1)) == {3.0}
    assert Sample.ratio(np.array([1.0, 5, 0]), np.array([1.0, 3, 0]), weights).value == 6 / 4
    mean = Sample.mean(np.array([1.0, 3, np.nan]), weights)
    assert (mean.value, mean.prompts) == (2.0, 2)


def test_differences_are_paired():
    values = np.random.default_rng(1).normal(3.0, 1.0, 50)
    weights = resample(50, "x")
    e = (Sample.mean(values + 0.25, weights) - Sample.mean(values, weights)).estimate()
    assert e is not None
    assert (e.low, e.value, e.high) == pytest.approx((0.25, 0.25, 0.25))


def test_nothing_to_say():
    assert Sample.ratio(np.zeros(2), np.zeros(2), resample(2, "x")).estimate() is None


def test_draws_are_the_same_every_time():
    assert np.array_equal(resample(7, "gsm8k"), resample(7, "gsm8k"))
    assert not np.array_equal(resample(7, "gsm8k"), resample(7, "mbpp"))
