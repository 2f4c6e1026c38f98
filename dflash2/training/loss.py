"""What a drafter is trained on: the rows of each block against the target, and the selector against its choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.config import DFlash2Config
from dflash2.drafter import DFlash2Drafter
from dflash2.model import Attend
from dflash2.ops.distill import LossWeights, distill, top_of_groups
from dflash2.training.anchors import Blocks
from dflash2.training.attention import TiledAttention

__all__ = [
    "BlockLoss",
    "BlockTargets",
    "LossOptions",
    "block_loss",
    "block_targets",
    "draft_states",
    "head_loss",
    "supervision",
]

#: Sums of weights below this count as none: nothing supervised is a loss of 0.
LEAST_WEIGHT = 1e-6


@dataclass(frozen=True)
class LossOptions:
    """How block rows and the selector are judged; `TrainConfig` explains each.

    Attributes:
        weights: of the terms of the base loss.
        selector_weight: factor on the selector's loss.
        gold: ``argmax`` or ``token``.
        selector_miss: ``exclude`` or ``inject``.
        selector_mean: ``hits`` or ``rows``.
        selector_detach: whether the selector's gradient stops at the draft states.
        chunk: rows of logits in memory at a time.
    """

    weights: LossWeights
    selector_weight: float = 1.0
    gold: str = "argmax"
    selector_miss: str = "exclude"
    selector_mean: str = "hits"
    selector_detach: bool = False
    chunk: int = 8192


class _HeadLoss(torch.autograd.Function):
    """`distill` behind a frozen head, one chunk of rows at a time, the gradient made on the way forward.

    Logits never exist for more than ``chunk`` rows, and are computed once: the head needs no gradient, so all that has
    to be kept for the backward pass is a gradient the size of z.
    """

    @staticmethod
    def forward(
        ctx: Any, drafter: DFlash2Drafter, z: Tensor, head: Tensor, teacher: Tensor, token: Tensor | None,
        scale: Tensor, weights: LossWeights, chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        c = drafter.config
        parts = []
        for at in range(0, len(z), chunk):
            rows = slice(at, at + chunk)
            student, slope = z[rows] @ head.T, teacher[rows] @ head.T
            label = None if token is None else token[rows]
            found = distill(
                student, slope, label, scale[rows], weights, multiplier=c.output_multiplier,
                softcap=c.final_logit_softcapping,
            )  # fmt: skip
            # Multiplier and softcap are monotonic: the best of the raw output are the best.
            best = top_of_groups(student, found.peaks, max(c.selector_top_k, 1))
            parts.append((found.loss, slope @ head, found.gold, best))
        losses, grads, gold, best = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(grads)
        ctx.mark_non_differentiable(gold, best)
        return (losses * scale).sum(), gold, best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _gold: Tensor, _best: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return None, grad * grad_loss.to(grad.dtype), None, None, None, None, None, None


def head_loss(
    drafter: DFlash2Drafter, z: Tensor, head: Tensor, teacher: Tensor, token: Tensor | None, scale: Tensor,
    weights: LossWeights, *, chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Weighted sum of the base loss over rows.

    Args:
        drafter: what its config does to logits, and how many candidates it keeps.
        z: ``[N, H]`` draft states after the final norm.
        head: ``[V, H]``, frozen.
        teacher: ``[N, H]`` states of the target that predict the same tokens.
        token: int64 ``[N]``, gold; None for the target's most likely tokens.
        scale: fp32 ``[N]``, what each row counts; 0 leaves it out.
        weights: of the terms; see `dflash2.ops.distill`.
        chunk: rows of logits in memory at a time.

    Returns:
        the loss; gold int64 ``[N]``; the drafter's best ids int64 ``[N, max(C, 1)]``, best first, no gradient.
    """
    return _HeadLoss.apply(drafter, z, head, teacher, token, scale, weights, chunk)


@dataclass(frozen=True)
class BlockTargets:
    """What rows 1..B-1 of each block are to learn.

    Attributes:
        token: int64 ``[N, B-1]``, the document's token at each row's position.
        predecessor: int64 ``[N, B-1]``, the token before it.
        teacher: ``[N, B-1, H]``, the target's state that predicts ``token``.
        weight: fp32 ``[N, B-1]``; 0 where the row is not supervised.
    """

    token: Tensor
    predecessor: Tensor
    teacher: Tensor
    weight: Tensor


def supervision(blocks: Blocks, block_size: int, gamma: float) -> Tensor:
    """fp32 ``[N, B-1]``: row i weighs ``exp(-(i-1)/gamma)``, since it counts only if those before it were right."""
    decay = torch.exp(-torch.arange(block_size - 1, device=blocks.anchors.device, dtype=torch.float32) / gamma)
    return blocks.supervised(block_size).float() * decay


def block_targets(blocks: Blocks, states: Tensor, block_size: int, gamma: float) -> BlockTargets:
    """Row i is to predict the token at anchor + i, as the target does from its state at anchor + i - 1.

    Args:
        blocks: the blocks.
        states: ``[R*S, H]``, what the target's head reads.
        block_size: B.
        gamma: decay of `supervision`.
    """
    index, weight = blocks.rows(block_size), supervision(blocks, block_size, gamma)
    return BlockTargets(blocks.tokens[index[:, 1:]], blocks.tokens[index[:, :-1]], states[index[:, :-1]], weight)


def draft_states(
    drafter: DFlash2Drafter,
    blocks: Blocks,
    taps: Tensor,
    attention: Callable[[DFlash2Config, Blocks, Tensor, Tensor], Attend] = TiledAttention,
) -> Tensor:
    """The inference forward for all blocks at once.

    Args:
        drafter: bound to the target.
        blocks: N blocks over R*S tokens.
        taps: ``[R*S, T*H]``.
        attention: makes the `Attend` from context keys and values.

    Returns:
        ``[N, B, H]``, after the final norm.
    """
    config = drafter.config
    keys, values = drafter.context_rows(taps, blocks.positions)
    hidden = drafter.embed(blocks.tokens[blocks.anchors], config.max_draft_tokens)
    start = blocks.positions[blocks.anchors].unsqueeze(-1)
    positions = start + torch.arange(config.block_size, device=taps.device)
    return drafter(hidden, positions, attention(config, blocks, keys, values))


class BlockLoss(NamedTuple):
    """Loss and what to report of some blocks. Tensors stay on the device; all add up over parts of a step.

    Attributes:
        total: fp32 scalar, with gradient: ``base`` plus the weighted ``selector``.
        base, selector: fp32 scalars; ``selector`` is 0 without one.
        counts: fp32 ``[4, B-1]``: supervised rows; those whose best token is gold; whose C candidates hold gold; where
            the selector picks gold after the true token (the best token without one).
    """

    total: Tensor
    base: Tensor
    selector: Tensor
    counts: Tensor

    @property
    def top1(self) -> Tensor:
        """``[B-1]``, share of supervised rows whose best token is gold."""
        return self._share(1)

    @property
    def recall(self) -> Tensor:
        """``[B-1]``, share whose candidates hold gold."""
        return self._share(2)

    @property
    def choice(self) -> Tensor:
        """``[B-1]``, share where the selector picks gold."""
        return self._share(3)

    def _share(self, i: int) -> Tensor:
        return self.counts[i] / self.counts[0].clamp_min(1)


def block_loss(
    drafter: DFlash2Drafter, z: Tensor, head: Tensor, targets: BlockTargets, options: LossOptions, *,
    norm: Tensor | None = None, add_up: Callable[[Tensor], Tensor] = lambda x: x,
) -> BlockLoss:  # fmt: skip
    """Base loss plus ``selector_weight`` times the selector's, both weighted means over rows.

    The selector chooses among the drafter's own C candidates with the *true* token before them; gold is the same as
    the base loss's. By default that is the target's argmax after the document's tokens: greedy verification compares
    with exactly that, and on sampled documents it has less noise than the token that happened to be drawn. Rows whose
    gold is not among the candidates are left out (nothing the selector could do would win them), or get it in place of
    their last candidate.

    Args:
        drafter: the drafter.
        z: ``[N, B, H]``.
        head: ``[V, H]``, frozen.
        targets: for rows 1..B-1.
        options: see `LossOptions`.
        norm: fp32 scalar, the weights of all rows of the step, here and elsewhere; None: of these.
        add_up: the sum of a scalar over all that take part in this step at this time.
    """
    rows, teacher, weight = z[:, 1:].flatten(0, 1), targets.teacher.flatten(0, 1), targets.weight.flatten()
    norm = (weight.sum() if norm is None else norm).clamp_min(LEAST_WEIGHT)
    token = None if options.gold == "argmax" else targets.token.flatten()
    base, gold, best = head_loss(
        drafter, rows, head, teacher, token, weight / norm, options.weights, chunk=options.chunk
    )
    used, hit = targets.weight > 0, best == gold.unsqueeze(-1)

    def count(right: Tensor) -> Tensor:
        return (right.view(used.shape) & used).sum(0)

    counts = [used.sum(0), count(hit[:, 0]), count(hit.any(-1))]
    if drafter.candidate_selector is None:
        return BlockLoss(base, base.detach(), torch.zeros_like(base), torch.stack([*counts, counts[1]]).float())
    if options.selector_miss == "inject":
        best = torch.cat((best[:, :-1], torch.where(hit.any(-1, keepdim=True), best[:, -1:], gold.unsqueeze(-1))), -1)
        hit = best == gold.unsqueeze(-1)
    scores = _selector_scores(drafter, rows.detach() if options.selector_detach else rows, head, targets, best)
    usable = weight * hit.any(-1)
    among = add_up(usable.sum()).clamp_min(LEAST_WEIGHT) if options.selector_mean == "hits" else norm
    losses = F.cross_entropy(scores, hit.int().argmax(-1), reduction="none")
    selector = (losses * usable).sum() / among
    counts.append(count(hit.gather(-1, scores.argmax(-1, keepdim=True))))
    total = base + options.selector_weight * selector
    return BlockLoss(total, base.detach(), selector.detach(), torch.stack(counts).float())


def _selector_scores(
    drafter: DFlash2Drafter, rows: Tensor, head: Tensor, targets: BlockTargets, candidates: Tensor
) -> Tensor:
    """fp32 ``[N, C]``: unary logits of the candidates plus their pair scores after the true token."""
    selector = drafter.candidate_selector
    assert selector is not None
    before = targets.predecessor.flatten().unsqueeze(-1)
    pairs = selector.pair_scores(selector.hidden_projection(rows), before, candidates).squeeze(-2)
    return candidate_logits(drafter, rows, head, candidates) + pairs


def candidate_logits(drafter: DFlash2Drafter, rows: Tensor, head: Tensor, candidates: Tensor) -> Tensor:
    """Logits of the candidates only, with gradient: rows ``[N, H]``, candidates ``[N, C]`` -> fp32 ``[N, C]``."""
    return drafter.shape_logits(torch.bmm(head[candidates], rows.to(head.dtype).unsqueeze(-1)).squeeze(-1))
