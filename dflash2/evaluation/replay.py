"""Draft at recorded positions without the target: which drafts stand, given that those before them stood.

With the document x fixed, a block drafted from position a is judged row by row. Row i counts only if drafts 1 .. i-1
stood, and then they *are* the document's tokens: so the selector's predecessor is known, no walk is needed, and rows
and positions are independent. Whether draft i stands is

    greedy   [argmax of row i = x_(a+i)]
    sampled  min(1, q_i(x_(a+i)) / p_i(x_(a+i)))

The second is the probability that x_(a+i) came out of an accepted draft and not out of the replacement of a rejected
one: speculative sampling emits x by acceptance with probability min(p, q)(x), and by either way with p(x). It is exact
for a document that was sampled from p at the temperature of the drafts, and means nothing for any other, which is why
a trace knows each document's temperature. The pass over the blocks is that of `DFlash2Drafter.propose`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash2.drafter import DFlash2Drafter
from dflash2.evaluation.recorded_context import RecordedContext
from dflash2.evaluation.trace import Shard
from dflash2.lm_head import DenseLMHead
from dflash2.ops.selector_walk import finite, one_hot, tempered
from dflash2.ops.verify import tempered_softmax

__all__ = ["Anchors", "Odds", "anchors_of", "draft_odds"]

#: Blocks are drafted for so many logits at a time, one row of each block.
LOGITS = {"cpu": 2**22, "cuda": 2**27}


@dataclass(frozen=True)
class Anchors:
    """Every position that a round could start from: answer tokens with a successor. N in all, document by document.

    Attributes:
        document: int64 ``[N]``.
        token: int64 ``[N]``, index in `Shard.tokens`.
        position: int64 ``[N]``, in the document.
        after: int64 ``[N]``, tokens of the document after it.
        left: int64 ``[N]``, tokens after it that the budget has room for.
        counts: int64 ``[D]``, anchors of each document.
    """

    document: np.ndarray
    token: np.ndarray
    position: np.ndarray
    after: np.ndarray
    left: np.ndarray
    counts: np.ndarray

    def width(self, k: int) -> np.ndarray:
        """Drafts of a round of at most k: where the budget ends a block is shorter, as in `dflash2.generate`."""
        return np.clip(self.left - 1, 0, k)


@dataclass(frozen=True)
class Odds:
    """Of each anchor and each of its k drafts; 0 past a shorter block's or the document's end. All fp32 ``[N, k]``.

    Attributes:
        stands: the chance that the draft stands if those before it stood. 0 or 1 for greedy documents.
        unary: the same without the selector.
        found: whether the document's token is among the C candidates (the best token, of a drafter without selector).
        overlap: the sum of min(p, q): what ``stands`` is on average over documents, at less variance. Equals it for
            greedy documents.
    """

    stands: np.ndarray
    unary: np.ndarray
    found: np.ndarray
    overlap: np.ndarray


def anchors_of(shard: Shard, max_new_tokens: int) -> Anchors:
    """All anchors of a shard whose answers had this budget."""
    starts, lengths, prompts = (t.numpy() for t in (shard.starts, shard.lengths, shard.prompt_lengths))
    counts = np.maximum(lengths - prompts - 1, 0)
    document = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    position = prompts[document] + index
    return Anchors(
        document=document,
        token=starts[document] + position,
        position=position,
        after=lengths[document] - position - 1,
        left=max_new_tokens - index - 1,
        counts=counts,
    )


@torch.no_grad()
def draft_odds(
    drafter: DFlash2Drafter,
    shard: Shard,
    taps: Tensor,
    target_head: DenseLMHead,
    anchors: Anchors,
    widths: Sequence[int],
) -> dict[int, Odds]:
    """Draft from every anchor.

    Args:
        drafter: bound to the target's tables.
        shard: the documents.
        taps: ``[N, T*H]`` of its tokens, the drafter's layers only.
        target_head: what the target decides by (drafts may be picked by another, say an int8 copy).
        anchors: of the shard.
        widths: numbers of drafts per round, each from 1 to block_size - 1.

    Returns:
        For each width the odds of rounds of at most so many drafts. Where the budget makes a block shorter, they are
        those of the shorter block: its rows see one another, so that they are not those of a longer one cut.
    """
    replay = _Replay(drafter, shard, taps, target_head)
    made = {}
    for k in range(1, max(widths) + 1):
        wanted = anchors.left - 1 >= k if k in widths else anchors.left - 1 == k
        made[k] = np.zeros((4, len(anchors.token), k), np.float32)
        replay.fill(made[k], anchors, np.flatnonzero(wanted), k)
    return {k: _assemble(made, anchors.width(k), k) for k in widths}


def _assemble(made: dict[int, np.ndarray], width: np.ndarray, k: int) -> Odds:
    """Of blocks of exactly w drafts, those that a round of at most k has."""
    out = np.zeros((4, len(width), k), np.float32)
    for w in range(1, k + 1):
        out[:, width == w, :w] = made[w][:, width == w]
    return Odds(*out)


class _Replay:
    """A drafter over the recorded context of a shard."""

    def __init__(self, drafter: DFlash2Drafter, shard: Shard, taps: Tensor, target_head: DenseLMHead):
        device, vocab = drafter.device, drafter.config.vocab_size
        self.drafter, self.head, self.target_head = drafter, drafter._head[0], target_head
        self.context = RecordedContext(drafter, shard, taps)
        self.rows = max(LOGITS.get(device.type, LOGITS["cpu"]) // vocab, 16)
        self.tokens, self.heat, self.states = shard.tokens.to(device), shard.temperatures.to(device), shard.states

    def fill(self, out: np.ndarray, anchors: Anchors, wanted: np.ndarray, k: int) -> None:
        """Write the odds of blocks of exactly k drafts at the wanted anchors to ``out [4, N, k]``."""
        for part in np.array_split(wanted, max(-(-len(wanted) // self.rows), 1)):
            if len(part):
                out[:, part] = self._block(anchors, part, k)

    def _block(self, anchors: Anchors, part: np.ndarray, k: int) -> np.ndarray:
        """``[4, n, k]`` for n anchors."""
        device = self.drafter.device
        at, document, start, after = (
            torch.from_numpy(x[part]).to(device)
            for x in (anchors.token, anchors.document, anchors.position, anchors.after)
        )
        z, alive = self.context.draft_states(document, start, self.tokens[at], k, int(anchors.position[part].max()))
        out = torch.zeros(4, len(part), k, device=device)
        for i in range(k):
            rows = (alive & (after > i)).nonzero()[:, 0]
            if not len(rows):
                break
            out[:, rows, i] = self._row(z[rows, i], at[rows] + i, self.heat[document[rows]])
            alive = (out[:2, :, i] > 0).any(0)  # a row counts only where those before it can have stood
        return out.cpu().numpy()

    def _row(self, z: Tensor, before: Tensor, heat: Tensor) -> Tensor:
        """``[4, m]`` of one draft each: z ``[m, H]``, the index of the token before it, temperatures ``[m]``."""
        c, gold = self.drafter.config, self.tokens[before + 1][:, None]
        ids, raw = self.head.top(z, c.vocab_size, max(c.selector_top_k, 1))
        usable = raw[:, 0].isfinite()
        hit = (ids == gold) & usable[:, None]
        sampled = bool((heat > 0).any())
        if self.drafter.candidate_selector is not None:
            q, alone = self._selected(z, before, heat, ids, raw)
        elif sampled:
            ids = torch.arange(c.vocab_size, device=z.device).expand(len(z), -1)
            q = alone = _spread(self.drafter.shape_logits(self.head.logits(z, c.vocab_size)), heat)
        else:
            q = alone = torch.ones_like(raw)
        of_gold = (ids == gold) & usable[:, None]
        stands, unary = ((x * of_gold).sum(1) for x in (q, alone))
        overlap = stands
        if sampled:
            p, cold = self._target(before, heat), heat <= 0
            p_gold = p.gather(1, gold)[:, 0].clamp_min(torch.finfo(p.dtype).tiny).masked_fill(cold, 1.0)
            overlap = torch.where(cold, stands, p.gather(1, ids).minimum(q).sum(1) * usable)
            stands, unary = ((x / p_gold).clamp_max(1.0) for x in (stands, unary))
        return torch.stack((stands, unary, hit.any(1).float(), overlap))

    def _selected(self, z: Tensor, before: Tensor, heat: Tensor, ids: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """What a draft is drawn from after the true token, with the selector and by the head alone; fp32 ``[m, C]``."""
        c, selector = self.drafter.config, self.drafter.candidate_selector
        assert selector is not None
        noise = torch.zeros_like(heat, dtype=torch.float64)[:, None]
        walk = selector.walk(
            z[:, None], self.tokens[before], ids[:, None], raw[:, None], multiplier=c.output_multiplier,
            softcap=c.final_logit_softcapping, temperature=heat, uniforms=noise, backend=self.drafter.backend,
        )  # fmt: skip
        assert walk.q is not None
        return walk.q[:, 0], _spread(self.drafter.shape_logits(raw), heat)

    def _target(self, before: Tensor, heat: Tensor) -> Tensor:
        """The target's distribution after each of these tokens, fp32 ``[m, V']``."""
        assert self.states is not None
        states = self.states[before.to(self.states.device)].to(before.device)
        logits = self.target_head.logits(states, len(self.target_head.weight))
        return tempered_softmax(logits[:, None], torch.where(heat > 0, heat, 1.0))[:, 0]


def _spread(scores: Tensor, heat: Tensor) -> Tensor:
    """softmax(scores / T), one-hot at T = 0. scores ``[m, n]``, heat ``[m]``."""
    scores, cold = finite(scores), heat <= 0
    warm = tempered(scores, torch.where(cold, 1.0, heat))
    return torch.where(cold[:, None], one_hot(scores.argmax(-1), scores), warm)
