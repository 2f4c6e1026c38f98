"""Greedy acceptance on recorded greedy documents, without running the target again for every round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash2.drafter import DFlash2Drafter
from dflash2.evaluation.replay import Anchors, Odds
from dflash2.evaluation.rounds import Tally, tally
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
    tallies: list[Tally] = []
    for at in range(0, len(rows), rows_per_step):
        packed = pack(documents, rows[at : at + rows_per_step], row_tokens)
        if len(packed.eligible()):
            drafts = _drafts(drafter, target, packed, blocks_per_step, tile, chunk)
            tallies.append(_count(packed, *drafts))
    if not tallies:
        return Replay(0.0, 0.0, 0.0, [0.0] * drafter.config.max_draft_tokens, 0)
    t = Tally.join(tallies)
    there = t.rounds > 0
    by_row = t.kept.sum(0) / t.reached.sum(0).clip(1)
    return Replay(
        rounds=float((t.tokens[there] / t.rounds[there]).mean()),
        anchors=float(t.yielded.sum() / t.anchors.sum()),
        unary=float((t.tokens[there] / t.unary_rounds[there]).mean()),
        by_row=by_row.tolist(),
        documents=int(there.sum()),
    )


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


def _count(packed: PackedRows, drafts: np.ndarray, best: np.ndarray) -> Tally:
    """The rounds of packed documents, from what each position would draft; both ``[R*S, B-1]``."""
    counts = np.maximum(packed.end - packed.answer - 1, 0)
    token, document = packed.eligible(), np.repeat(np.arange(len(counts)), counts)
    after = packed.end[document] - 1 - token
    # No budget is known to have cut these documents, so no block is shortened.
    anchors = Anchors(document, token, packed.positions.reshape(-1)[token], after, np.full_like(token, 2**31), counts)
    step = np.arange(1, drafts.shape[1] + 1)
    flat, inside = packed.tokens.reshape(-1), step <= after[:, None]
    truth = flat[np.minimum(token[:, None] + step, len(flat) - 1)]
    path, unary = (((x[token] == truth) & inside).astype(np.float32) for x in (drafts, best))
    return tally(Odds(path, unary, found=path, overlap=path), anchors)
