"""Greedy acceptance on recorded greedy documents, without running the target again for every round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash2.model import DraftNetwork
from dflash2.training.anchors import make_blocks
from dflash2.training.data import Documents, PackedRows, assign, pack
from dflash2.training.loss import HeadSettings, draft_states, scaled_logits
from dflash2.training.target import FrozenTarget

__all__ = ["Replay", "greedy_walk", "replay"]


def greedy_walk(
    network: DraftNetwork, z: Tensor, head: Tensor, anchors: Tensor, s: HeadSettings
) -> tuple[Tensor, Tensor]:
    """Drafts of each block: the selector's greedy path, and the head's own best tokens.

    Args:
        network: the drafter.
        z: ``[N, B, H]``.
        head: ``[V, H]``.
        anchors: int64 ``[N]`` token ids.
        s: see `HeadSettings`.

    Returns:
        two int64 ``[N, B-1]``; equal without a selector.
    """
    rows = z[:, 1:]
    parts = []
    for part in rows.flatten(0, 1).split(s.chunk):
        parts.append((part @ head.T).topk(max(s.candidates, 1), dim=-1))
    shape = (*rows.shape[:2], -1)
    ids = torch.cat([p.indices for p in parts]).view(shape)
    unary = scaled_logits(torch.cat([p.values for p in parts]).view(shape), s.multiplier, s.softcap)
    selector = network.candidate_selector
    if selector is None:
        return ids[..., 0], ids[..., 0]
    gate, before, path = selector.hidden_projection(rows), anchors, []
    for i in range(rows.shape[1]):
        pair = selector.pair_scores(gate[:, i], before.unsqueeze(-1), ids[:, i]).squeeze(-2)
        before = ids[:, i].gather(-1, (unary[:, i] + pair).argmax(-1, keepdim=True)).squeeze(-1)
        path.append(before)
    return torch.stack(path, 1), ids[..., 0]


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
    network: DraftNetwork,
    target: FrozenTarget,
    documents: Documents,
    *,
    settings: HeadSettings,
    row_tokens: int,
    rows_per_step: int,
    blocks_per_step: int,
    tile: int,
) -> Replay:
    """Draft from every answer position of greedy documents, then walk the rounds.

    Args:
        network: the drafter, on the target's device.
        target: the target that wrote the documents.
        documents: answers at temperature 0; what the target would say next *is* the next token.
        settings: see `HeadSettings`.
        row_tokens, rows_per_step, blocks_per_step, tile: sizes of the passes.
    """
    rows = assign(documents.lens, row_tokens)
    path, unary = [], []
    for at in range(0, len(rows), rows_per_step):
        packed = pack(documents, rows[at : at + rows_per_step], row_tokens)
        if not len(packed.eligible()):
            continue
        run = _drafter(network, target, packed, settings, blocks_per_step, tile)
        right, right_unary = _matches(packed, run, network.config.block_size)
        for d in range(len(packed.first)):
            span = slice(packed.answer[d], packed.end[d] - 1)
            if packed.end[d] - 1 > packed.answer[d]:
                path.append(right[span])
                unary.append(right_unary[span])
    walked = [_rounds(m) for m in path]
    mean = lambda parts: float(np.mean([p.mean() for p, _ in parts])) if parts else 0.0  # noqa: E731
    everywhere = float(np.concatenate(path).mean() + 1) if path else 0.0
    by_row = _by_row(path, walked, network.config.block_size - 1)
    return Replay(mean(walked), everywhere, mean([_rounds(m) for m in unary]), by_row, len(path))


def _drafter(
    network: DraftNetwork, target: FrozenTarget, packed: PackedRows, settings: HeadSettings, count: int, tile: int
) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    def run() -> tuple[np.ndarray, np.ndarray]:
        device = target.head.device
        inputs = (torch.from_numpy(x).to(device) for x in (packed.tokens, packed.positions, packed.document))
        taps, _ = target(*inputs)
        shape = (packed.tokens.size, network.config.block_size - 1)
        drafts, best = np.full(shape, -1), np.full(shape, -1)
        eligible = packed.eligible()
        for at in range(0, len(eligible), count):
            anchors = eligible[at : at + count]
            blocks = make_blocks(packed, anchors, count, tile, network.config.retention).to(device)
            z = draft_states(network, target.embedding, blocks, taps)
            walked = greedy_walk(network, z, target.head, blocks.tokens[blocks.anchors], settings)
            drafts[anchors], best[anchors] = (w[: len(anchors)].cpu().numpy() for w in walked)
        return drafts, best

    return run


def _matches(
    packed: PackedRows, run: Callable[[], tuple[np.ndarray, np.ndarray]], block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Leading drafts that equal the document, per anchor ``[R*S]``; a document's end stops the count."""
    flat, owner = packed.tokens.reshape(-1), packed.document.reshape(-1)
    index = np.arange(len(flat))[:, None] + np.arange(1, block_size)
    inside = index < len(flat)
    index = np.minimum(index, len(flat) - 1)
    inside &= owner[index] == owner[:, None]
    counts = [((d == flat[index]) & inside).cumprod(1).sum(1) for d in run()]
    return counts[0], counts[1]


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
