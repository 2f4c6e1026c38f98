"""What a drafter is trained on: the rows of each block against the target, and the selector against its choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.drafter import DFlash2Drafter
from dflash2.training.anchors import Blocks
from dflash2.training.attention import TiledAttention

__all__ = ["BlockLoss", "BlockTargets", "block_loss", "block_targets", "draft_states", "head_loss"]


class _HeadLoss(torch.autograd.Function):
    """Cross-entropy through a frozen head, one chunk of rows at a time, the gradient made on the way forward.

    Logits never exist for more than ``chunk`` rows, and are computed once: the head needs no gradient, so all that has
    to be kept for the backward pass is a gradient the size of z.
    """

    @staticmethod
    def forward(
        ctx: Any,
        drafter: DFlash2Drafter,
        z: Tensor,
        head: Tensor,
        teacher: Tensor,
        token: Tensor | None,
        weight: Tensor,
        hard_weight: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = []
        for at in range(0, len(z), chunk):
            part = slice(at, at + chunk)
            label = None if token is None else token[part]
            parts.append(_chunk(drafter, z[part], head, teacher[part], label, hard_weight))
        losses, grads, gold, best = (torch.cat(column) for column in zip(*parts, strict=True))
        scale = weight / weight.sum().clamp_min(1e-6)
        ctx.save_for_backward(grads * scale.unsqueeze(-1).to(z.dtype))
        ctx.mark_non_differentiable(gold, best)
        return (losses * scale).sum(), gold, best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _gold: Tensor, _best: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return None, grad * grad_loss.to(grad.dtype), None, None, None, None, None, None


def _chunk(
    drafter: DFlash2Drafter, z: Tensor, head: Tensor, teacher: Tensor, token: Tensor | None, hard_weight: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, its gradient by z, gold token and the drafter's best ids of some rows.

    The vocabulary-wide tensors are what this costs, so they are read and written as seldom as torch allows: two in
    fp32, turned into the gradient in place.
    """
    c = drafter.config
    raw, target = z @ head.T, teacher @ head.T
    # Multiplier and softcap are monotonic: the best of the raw output are the best.
    best = raw.topk(max(c.selector_top_k, 1), dim=-1).indices
    gold = (target.argmax(-1) if token is None else token).unsqueeze(-1)
    plain = c.output_multiplier == 1 and c.final_logit_softcapping is None
    logits = raw if plain else drafter.shape_logits(raw)
    log_q = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    p = torch.softmax(target, dim=-1, dtype=torch.float32)
    soft = (p * log_q).sum(-1)
    loss = -hard_weight * log_q.gather(-1, gold).flatten() - (1 - hard_weight) * soft
    slope = log_q.exp_().sub_(p, alpha=1 - hard_weight)
    slope.scatter_add_(-1, gold, slope.new_full(gold.shape, -hard_weight))
    if c.final_logit_softcapping is not None:
        slope *= 1 - (logits / c.final_logit_softcapping).square()
    grad = (slope.to(head.dtype) @ head) * c.output_multiplier
    return loss, grad, gold.flatten(), best


def head_loss(
    drafter: DFlash2Drafter,
    z: Tensor,
    head: Tensor,
    teacher: Tensor,
    token: Tensor | None,
    weight: Tensor,
    *,
    hard_weight: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted mean of the base loss over rows.

    Args:
        drafter: what its config does to logits, and how many candidates it keeps.
        z: ``[N, H]`` draft states after the final norm.
        head: ``[V, H]``, frozen.
        teacher: ``[N, H]`` states of the target that predict the same tokens.
        token: int64 ``[N]``, gold; None for the target's most likely tokens.
        weight: fp32 ``[N]``; 0 leaves a row out. All zero gives a loss of 0.
        hard_weight: share of the cross-entropy against gold; the rest is cross-entropy against the target's
            distribution. Its gradient is that of the KL divergence, and a distribution says more per row than a sample.
        chunk: rows of logits in memory at a time.

    Returns:
        the loss; gold int64 ``[N]``; the drafter's best ids int64 ``[N, max(C, 1)]``, best first, no gradient.
    """
    return _HeadLoss.apply(drafter, z, head, teacher, token, weight, hard_weight, chunk)


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


def block_targets(blocks: Blocks, states: Tensor, block_size: int, gamma: float) -> BlockTargets:
    """Row i is to predict the token at anchor + i, as the target does from its state at anchor + i - 1.

    Args:
        blocks: the blocks.
        states: ``[R*S, H]``, what the target's head reads.
        block_size: B.
        gamma: decay; row i weighs ``exp(-(i-1)/gamma)``, since a row counts only if those before it were right.
    """
    index = blocks.rows(block_size)
    decay = torch.exp(-torch.arange(block_size - 1, device=states.device, dtype=torch.float32) / gamma)
    weight = blocks.supervised(block_size).float() * decay
    return BlockTargets(blocks.tokens[index[:, 1:]], blocks.tokens[index[:, :-1]], states[index[:, :-1]], weight)


def draft_states(drafter: DFlash2Drafter, blocks: Blocks, taps: Tensor) -> Tensor:
    """The inference forward for all blocks at once.

    Args:
        drafter: bound to the target.
        blocks: N blocks over R*S tokens.
        taps: ``[R*S, T*H]``.

    Returns:
        ``[N, B, H]``, after the final norm.
    """
    config = drafter.config
    keys, values = drafter.context_rows(taps, blocks.positions)
    hidden = drafter.embed(blocks.tokens[blocks.anchors], config.max_draft_tokens)
    start = blocks.positions[blocks.anchors].unsqueeze(-1)
    positions = start + torch.arange(config.block_size, device=taps.device)
    return drafter(hidden, positions, TiledAttention(config, blocks, keys, values))


@dataclass(frozen=True)
class BlockLoss:
    """Loss and what to report of a step. Tensors stay on the device.

    Attributes:
        total: fp32 scalar, with gradient: ``base`` plus the weighted ``selector``.
        base, selector: fp32 scalars; ``selector`` is 0 without one.
        top1: fp32 ``[B-1]``, share of supervised rows whose best token is gold.
        recall: fp32 ``[B-1]``, share whose C candidates hold gold.
        choice: fp32 ``[B-1]``, share where the selector picks gold after the true token; ``top1`` without one.
    """

    total: Tensor
    base: Tensor
    selector: Tensor
    top1: Tensor
    recall: Tensor
    choice: Tensor


def block_loss(
    drafter: DFlash2Drafter,
    z: Tensor,
    head: Tensor,
    targets: BlockTargets,
    *,
    hard_weight: float,
    selector_weight: float,
    use_argmax: bool,
    chunk: int,
) -> BlockLoss:
    """Base loss plus ``selector_weight`` times the selector's, each with its own normaliser.

    The selector chooses among the drafter's own C candidates with the *true* token before them; gold is the same as
    the base loss's. By default that is the target's argmax after the document's tokens: greedy verification compares
    with exactly that, and on sampled documents it has less noise than the token that happened to be drawn. Rows whose
    gold is not among the candidates are left out: nothing the selector could do would win them.

    Args:
        drafter: the drafter.
        z: ``[N, B, H]``.
        head: ``[V, H]``, frozen.
        targets: for rows 1..B-1.
        hard_weight, chunk: see `head_loss`.
        selector_weight: factor on the selector's loss.
        use_argmax: gold is the target's argmax, else the document's token.
    """
    rows, teacher = z[:, 1:].flatten(0, 1), targets.teacher.flatten(0, 1)
    weight, token = targets.weight.flatten(), None if use_argmax else targets.token.flatten()
    base, gold, best = head_loss(drafter, rows, head, teacher, token, weight, hard_weight=hard_weight, chunk=chunk)
    used = (targets.weight > 0).float()

    def rate(right: Tensor) -> Tensor:
        return ((right.view(used.shape).float() * used).sum(0) / used.sum(0).clamp_min(1)).detach()

    hit = best == gold.unsqueeze(-1)
    top1, recall = rate(hit[:, 0]), rate(hit.any(-1))
    selector = drafter.candidate_selector
    if selector is None:
        return BlockLoss(base, base, base.new_zeros(()), top1, recall, top1)
    gate, before = selector.hidden_projection(rows), targets.predecessor.flatten()
    pairs = selector.pair_scores(gate, before.unsqueeze(-1), best).squeeze(-2)
    scores = candidate_logits(drafter, rows, head, best) + pairs
    usable = weight * hit.any(-1)
    losses = F.cross_entropy(scores, hit.int().argmax(-1), reduction="none")
    chosen = (losses * usable).sum() / usable.sum().clamp_min(1e-6)
    won = hit.gather(-1, scores.argmax(-1, keepdim=True))
    return BlockLoss(base + selector_weight * chosen, base, chosen, top1, recall, rate(won))


def candidate_logits(drafter: DFlash2Drafter, rows: Tensor, head: Tensor, candidates: Tensor) -> Tensor:
    """Logits of the candidates only, with gradient: rows ``[N, H]``, candidates ``[N, C]`` -> fp32 ``[N, C]``."""
    return drafter.shape_logits(torch.bmm(head[candidates], rows.to(head.dtype).unsqueeze(-1)).squeeze(-1))
