"""From the odds of drafts to rounds: where they start, what they yield, and what is counted of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from dflash2.evaluation.definition import bucket
from dflash2.evaluation.replay import Anchors, Odds

__all__ = ["Tally", "round_lengths", "tally", "walk"]


@dataclass(frozen=True)
class Tally:
    """Sums over the rounds of each of D documents; all but ``anchors`` and ``tokens`` weigh a round with its chance.

    Attributes:
        tokens: ``[D]``, of verify rounds: all of the answer but its first.
        rounds, unary_rounds: ``[D]``, verify rounds, with the selector and without.
        yielded, anchors: ``[D]``, tokens that a round would yield from each position, summed; and how many positions.
        reached, kept, found: ``[D, k]``, rounds that come to draft i; in which it stands; whose candidates hold the
            document's token. Positions after the answer's end are not reached.
        bucket_rounds, bucket_tokens: ``[D, buckets]`` by context length at the round's start.
    """

    tokens: np.ndarray
    rounds: np.ndarray
    unary_rounds: np.ndarray
    yielded: np.ndarray
    anchors: np.ndarray
    reached: np.ndarray
    kept: np.ndarray
    found: np.ndarray
    bucket_rounds: np.ndarray
    bucket_tokens: np.ndarray

    @classmethod
    def join(cls, parts: Sequence[Tally]) -> Tally:
        """Of all documents."""
        buckets = max(p.bucket_rounds.shape[1] for p in parts)

        def padded(x: np.ndarray, name: str) -> np.ndarray:
            return np.pad(x, ((0, 0), (0, buckets - x.shape[1]))) if name.startswith("bucket") else x

        columns = {f.name: [padded(getattr(p, f.name), f.name) for p in parts] for f in fields(cls)}
        return cls(**{name: np.concatenate(column) for name, column in columns.items()})


def walk(stands: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decode every document by rounds that begin at its first anchor.

    Args:
        stands: ``[N, k]``, `Odds.stands` or `Odds.unary`.
        counts: int64 ``[D]``, anchors of each document, N in all.

    Returns:
        The chance that a round starts at each anchor, fp64 ``[N]``; and that its first j drafts stand, ``[N, k+1]``.
        A round that keeps n drafts goes on n + 1 tokens later. Over a fixed document rounds are a Markov chain, so
        this is exact at any temperature; greedily, chances are 0 and 1.
    """
    n, k = stands.shape
    survive = np.concatenate((np.ones((n, 1)), np.cumprod(stands, 1, dtype=np.float64)), 1)
    ends = survive - np.concatenate((survive[:, 1:], np.zeros((n, 1))), 1)
    inside = np.arange(counts.max(initial=0)) < counts[:, None]
    padded = np.zeros((*inside.shape, k + 1))
    padded[inside] = ends
    visits = np.zeros((len(counts), inside.shape[1] + k + 1))
    visits[:, 0] = 1
    for a in range(inside.shape[1]):
        visits[:, a + 1 : a + k + 2] += visits[:, a, None] * padded[:, a]
    return visits[:, : inside.shape[1]][inside], survive


def round_lengths(stands: np.ndarray, anchors: Anchors) -> list[list[int]]:
    """Tokens of every round of each greedy document, as `dflash2.generate` reports them in ``acceptance_lengths``."""
    visits, _ = walk(stands, anchors.counts)
    lengths = []
    for part in np.split(visits, np.cumsum(anchors.counts)[:-1]):
        starts = np.append(np.flatnonzero(part > 0.5), len(part))
        lengths.append(np.diff(starts).tolist())
    return lengths


def tally(odds: Odds, anchors: Anchors) -> Tally:
    """Count the rounds of a shard.

    Args:
        odds: of rounds of at most k drafts.
        anchors: what they are the odds of.
    """
    visits, survive = walk(odds.stands, anchors.counts)
    unary, _ = walk(odds.unary, anchors.counts)
    k = odds.stands.shape[1]
    inside = np.arange(k + 1) < anchors.after[:, None]
    yielded = (survive * inside).sum(1)  # a round's tokens end with the document
    draft = np.arange(1, k + 1)
    there = (draft <= anchors.after[:, None]) & (draft <= anchors.width(k)[:, None])
    reached = visits[:, None] * survive[:, :-1] * there
    level = np.array([bucket(p) for p in anchors.position.tolist()], np.int64)
    columns = np.arange(level.max(initial=0) + 1) == level[:, None]

    def per_document(x: np.ndarray) -> np.ndarray:
        total = np.zeros((len(anchors.counts), *x.shape[1:]))
        np.add.at(total, anchors.document, x)
        return total

    return Tally(
        tokens=anchors.counts.astype(np.float64),
        rounds=per_document(visits),
        unary_rounds=per_document(unary),
        yielded=per_document(yielded),
        anchors=anchors.counts.astype(np.float64),
        reached=per_document(reached),
        kept=per_document(reached * odds.overlap),
        found=per_document(reached * odds.found),
        bucket_rounds=per_document(visits[:, None] * columns),
        bucket_tokens=per_document((visits * yielded)[:, None] * columns),
    )
