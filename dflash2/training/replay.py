"""Greedy acceptance on recorded greedy documents, without running the target again for every round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash2.drafter import DFlash2Drafter
from dflash2.lm_head import as_lm_head
from dflash2.training.anchors import make_blocks
from dflash2.training.data import Documents, PackedRows, assign, pack
from dflash2.training.loss import draft_states
from dflash2.training.target import FrozenTarget

__all__ = ["Replay", "greedy_drafts", "replay"]


def greedy_drafts(
    drafter: DFlash2Drafter, z: Tensor, head: Tensor, anchors: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Drafts of each block: the selector's greedy path, and the head's own best tokens.

    Args:
        drafter: the drafter.
        z: ``[N, B, H]``.
        head: ``[V, H]``.
        anchors: int64 ``[N]`` token ids.
        chunk: rows of logits in memory at a time.

    Returns:
        two int64 ``[N, B-1]``; equal without a selector.
    """
    rows, c, reader = z[:, 1:], drafter.config, as_lm_head(head)
    parts = [reader.top(x, c.vocab_size, max(c.selector_top_k, 1)) for x in rows.flatten(0, 1).split(chunk)]
    ids, raw = (torch.cat(x).unflatten(0, rows.shape[:2]) for x in zip(*parts, strict=True))
    if drafter.candidate_selector is None:
        return ids[..., 0], ids[..., 0]
    walk = drafter.candidate_selector.walk(
        rows, anchors, ids, raw, multiplier=c.output_multiplier, softcap=c.final_logit_softcapping
    )
    return walk.tokens, ids[..., 0]


@dataclass(frozen=True)
class Replay:
    """Acceptance lengths are tokens per verify round, the bonus token included.

    Attributes:
        rounds: mean over documents of the mean over the rounds that decoding would really have had.
        anchors: mean over all positions as anchors.
        unary: as ``rounds``, drafting each row's best token without the selector.
        by_row: share of rounds that reached draft i and accepted it, ``[B-1]``.
        documents: how many.
    """

    rounds: float
    anchors: float
    unary: float
    by_row: list[float]
    documents: int


@torch.no_grad()
def replay(
    drafter: DFlash2Drafter,
    target: FrozenTarget,
    documents: Documents,
    *,
    row_tokens: int,
    rows_per_step: int,
    blocks_per_step: int,
    tile: int,
    chunk: int,
) -> Replay:
    """Draft from every answer position of greedy documents, then walk the rounds.

    Args:
        drafter: bound to the target.
        target: the target that wrote the documents.
        documents: answers at temperature 0; what the target would say next *is* the next token.
        row_tokens, rows_per_step, blocks_per_step, tile, chunk: sizes of the passes.
    """
    rows = assign(documents.lens, row_tokens)
    path: list[np.ndarray] = []
    unary: list[np.ndarray] = []
    for at in range(0, len(rows), rows_per_step):
        packed = pack(documents, rows[at : at + rows_per_step], row_tokens)
        if not len(packed.eligible()):
            continue
        drafts, best = _drafts(drafter, target, packed, blocks_per_step, tile, chunk)
        right, right_unary = _matches(packed, drafts), _matches(packed, best)
        spans = [slice(a, e - 1) for a, e in zip(packed.answer, packed.end, strict=True) if e - 1 > a]
        path += [right[span] for span in spans]
        unary += [right_unary[span] for span in spans]
    walked = [_rounds(m) for m in path]
    everywhere = float(np.concatenate(path).mean() + 1) if path else 0.0
    by_row = _by_row(path, walked, drafter.config.max_draft_tokens)
    return Replay(_mean(walked), everywhere, _mean([_rounds(m) for m in unary]), by_row, len(path))


def _drafts(
    drafter: DFlash2Drafter, target: FrozenTarget, packed: PackedRows, count: int, tile: int, chunk: int
) -> tuple[np.ndarray, np.ndarray]:
    """`greedy_drafts` of every eligible anchor, ``[R*S, B-1]`` each; -1 elsewhere. ``count`` blocks at a time."""
    device, c = target.head.device, drafter.config
    inputs = (torch.from_numpy(x).to(device) for x in (packed.tokens, packed.positions, packed.document))
    taps, _ = target(*inputs)
    shape = (packed.tokens.size, c.max_draft_tokens)
    drafts, best = np.full(shape, -1), np.full(shape, -1)
    eligible = packed.eligible()
    for at in range(0, len(eligible), count):
        anchors = eligible[at : at + count]
        blocks = make_blocks(packed, anchors, count, tile, c.retention).to(device)
        z = draft_states(drafter, blocks, taps)
        made = greedy_drafts(drafter, z, target.head, blocks.tokens[blocks.anchors], chunk)
        drafts[anchors], best[anchors] = (x[: len(anchors)].cpu().numpy() for x in made)
    return drafts, best


def _matches(packed: PackedRows, drafts: np.ndarray) -> np.ndarray:
    """Leading drafts that equal the document, per anchor ``[R*S]``; a document's end stops the count."""
    flat, owner = packed.tokens.reshape(-1), packed.document.reshape(-1)
    index = np.arange(len(flat))[:, None] + np.arange(1, drafts.shape[1] + 1)
    inside = index < len(flat)
    index = np.minimum(index, len(flat) - 1)
    inside &= owner[index] == owner[:, None]
    return ((drafts == flat[index]) & inside).cumprod(1).sum(1)


def _mean(walked: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Mean over documents of each one's mean round."""
    return float(np.mean([produced.mean() for produced, _ in walked])) if walked else 0.0


def _rounds(matches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decoding from the first anchor on: tokens of each round (drafts accepted, and the bonus), and its anchor."""
    produced, anchors = [], [0]
    while anchors[-1] < len(matches):
        # The last round's bonus would lie behind the document's end.
        produced.append(min(int(matches[anchors[-1]]) + 1, len(matches) - anchors[-1]))
        anchors.append(anchors[-1] + produced[-1])
    return np.array(produced), np.array(anchors[:-1])


def _by_row(matches: list[np.ndarray], walked: list[tuple[np.ndarray, np.ndarray]], drafts: int) -> list[float]:
    """Share of rounds that accept draft i, of those that accepted all before it and whose document goes on that far."""
    kept, reached = np.zeros(drafts), np.zeros(drafts)
    for m, (_, anchors) in zip(matches, walked, strict=True):
        for i in range(drafts):
            there = (m[anchors] >= i) & (len(m) - anchors > i)
            reached[i] += there.sum()
            kept[i] += (there & (m[anchors] > i)).sum()
    return [float(k / max(r, 1)) for k, r in zip(kept, reached, strict=True)]
