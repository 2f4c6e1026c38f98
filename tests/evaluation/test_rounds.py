"""Rounds from the odds of drafts, held against loops that decode by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dflash2.evaluation.replay import Anchors, Odds
from dflash2.evaluation.rounds import round_lengths, tally, walk

K = 4


def anchors(answers: list[int], prompts: list[int], budget: int) -> Anchors:
    """Of documents with answers of so many tokens."""
    rows = [
        (d, 0, p + i, n - i - 1, budget - i - 1)
        for d, (n, p) in enumerate(zip(answers, prompts, strict=True))
        for i in range(n - 1)
    ]
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    return Anchors(*columns, counts=np.array([max(n - 1, 0) for n in answers]))


def random_odds(a: Anchors, seed: int, greedy: bool) -> Odds:
    rng = np.random.default_rng(seed)
    raw = rng.random((3, len(a.token), K))
    if greedy:
        raw = (raw < 0.7).astype(float)
    there = np.arange(1, K + 1) <= np.minimum(a.after, a.width(K))[:, None]
    stands, unary, found = (raw * there).astype(np.float32)
    return Odds(stands, unary, np.maximum(found > 0.5, stands > 0).astype(np.float32), stands)


def decode(odds: Odds, a: Anchors, document: int) -> list[tuple[int, int, int]]:
    """(position, drafts that stand, tokens kept) of every round, one after the other."""
    rows = np.flatnonzero(a.document == document)
    at, rounds = 0, []
    while at < len(rows):
        accepted = 0
        while accepted < K and odds.stands[rows[at], accepted] == 1:
            accepted += 1
        kept = min(accepted + 1, len(rows) - at)  # the document ends there
        rounds.append((int(a.position[rows[at]]), accepted, kept))
        at += kept
    return rounds


@pytest.mark.parametrize("seed", range(20))
def test_greedy_rounds_are_those_of_decoding(seed):
    answers, prompts = [9, 1, 2, 30, 0, 17], [3, 5, 120, 100, 4, 126]
    a = anchors(answers, prompts, budget=30)
    odds = random_odds(a, seed, greedy=True)
    counted, lengths = tally(odds, a), round_lengths(odds.stands, a)
    for d, n in enumerate(answers):
        rounds = decode(odds, a, d)
        assert lengths[d] == [kept for _, _, kept in rounds]
        assert counted.rounds[d] == len(rounds)
        assert counted.tokens[d] == max(n - 1, 0) == sum(lengths[d])
        for i in range(K):
            came = [r for r in rounds if r[1] >= i and r[0] - prompts[d] + i + 1 < n]
            wide = [r for r in came if 30 - (r[0] - prompts[d]) - 2 > i]  # the budget leaves room for draft i + 1
            assert counted.reached[d, i] == len(wide)
            assert counted.kept[d, i] == sum(r[1] > i for r in wide)
        for level, (low, high) in enumerate([(0, 127), (128, 255)][: counted.bucket_rounds.shape[1]]):
            inside = [r for r in rounds if low <= r[0] <= high]
            assert counted.bucket_rounds[d, level] == len(inside)
            assert counted.bucket_tokens[d, level] == sum(r[2] for r in inside)


def expected_rounds(stands: np.ndarray, at: int = 0) -> float:
    """Rounds from here on, over all ways that they can go: slow, and without a chain of chances."""
    if at >= len(stands):
        return 0.0
    total, alive = 1.0, 1.0
    for n in range(K + 1):
        ends = alive * (1 - (stands[at, n] if n < K else 0.0))
        total += ends * expected_rounds(stands, at + n + 1)
        alive -= ends
    return total


@pytest.mark.parametrize("seed", range(5))
def test_chances_of_rounds_are_those_of_all_ways_to_decode(seed):
    a = anchors([8, 5], [3, 3], budget=8)
    odds = random_odds(a, seed, greedy=False)
    counted = tally(odds, a)
    for d in range(2):
        assert counted.rounds[d] == pytest.approx(expected_rounds(odds.stands[a.document == d]), rel=1e-6)
    # Every token comes from one round, whatever the way.
    np.testing.assert_allclose(counted.bucket_tokens.sum(1), counted.tokens, rtol=1e-6)


def test_a_drafter_that_never_errs_takes_the_fewest_rounds():
    a = anchors([1 + 3 * (K + 1)], [5], budget=10**6)
    there = (np.arange(1, K + 1) <= a.after[:, None]).astype(np.float32)
    visits, _ = walk(there, a.counts)
    assert visits.sum() == 3
    assert round_lengths(there, a) == [[K + 1] * 3]


def test_no_anchor_at_all():
    a = anchors([1, 0], [4, 4], budget=8)
    assert round_lengths(np.zeros((0, K), np.float32), a) == [[], []]
