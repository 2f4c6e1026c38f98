"""What a drafter is trained on: the rows of each block against the target, and the selector against its choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.config import DFlash2Config
from dflash2.model import DraftNetwork
from dflash2.selector import CandidateSelector
from dflash2.training.anchors import Blocks
from dflash2.training.attention import TiledAttention

__all__ = ["BlockLoss", "BlockTargets", "HeadSettings", "block_loss", "block_targets", "draft_states", "head_loss"]


@dataclass(frozen=True)
class HeadSettings:
    """How logits and the base loss are made.

    Attributes:
        multiplier, softcap: as in `DFlash2Config`, applied in this order.
        hard_weight: share of the cross-entropy against the gold token; the rest is cross-entropy against the target's
            distribution. Its gradient is that of the KL divergence, and a distribution says more per row than a sample.
        candidates: C; 0 without a selector.
        chunk: rows of logits in memory at a time.
    """

    multiplier: float
    softcap: float | None
    hard_weight: float
    candidates: int
    chunk: int

    @classmethod
    def of(cls, config: DFlash2Config, *, hard_weight: float, chunk: int) -> HeadSettings:
        """The settings for a drafter."""
        cap = config.final_logit_softcapping
        return cls(config.output_multiplier, cap, hard_weight, config.selector_top_k, chunk)


def scaled_logits(raw: Tensor, multiplier: float, softcap: float | None) -> Tensor:
    """Head output to logits in fp32: multiplier, then ``c * tanh(x / c)``."""
    logits = raw.float() * multiplier
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _chunk(
    z: Tensor, head: Tensor, teacher: Tensor, token: Tensor, use_argmax: bool, s: HeadSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, its gradient by z, gold token and the drafter's best ids of some rows.

    The vocabulary-wide tensors are what this costs, so they are read and written as seldom as torch allows: two in
    fp32, turned into the gradient in place.
    """
    raw, target = z @ head.T, teacher @ head.T
    # Multiplier and softcap are monotonic: the best of the raw output are the best.
    best = raw.topk(max(s.candidates, 1), dim=-1).indices
    gold = (target.argmax(-1) if use_argmax else token).unsqueeze(-1)
    plain = s.multiplier == 1 and s.softcap is None
    logits = raw if plain else scaled_logits(raw, s.multiplier, s.softcap)
    log_q = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    p = torch.softmax(target, dim=-1, dtype=torch.float32)
    soft = (p * log_q).sum(-1)
    loss = -s.hard_weight * log_q.gather(-1, gold).flatten() - (1 - s.hard_weight) * soft
    slope = log_q.exp_().sub_(p, alpha=1 - s.hard_weight)
    slope.scatter_add_(-1, gold, slope.new_full(gold.shape, -s.hard_weight))
    if s.softcap is not None:
        slope *= 1 - (logits / s.softcap).square()
    grad = (slope.to(head.dtype) @ head) * s.multiplier
    return loss, grad, gold.flatten(), best


class _HeadLoss(torch.autograd.Function):
    """Cross-entropy through a frozen head, one chunk of rows at a time, the gradient made on the way forward.

    Logits never exist for more than ``chunk`` rows, and are computed once: the head needs no gradient, so all that has
    to be kept for the backward pass is a gradient the size of z.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        head: Tensor,
        teacher: Tensor,
        token: Tensor,
        weight: Tensor,
        use_argmax: bool,
        settings: HeadSettings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses, grads, golds, ids = [], [], [], []
        for at in range(0, len(z), settings.chunk):
            part = slice(at, at + settings.chunk)
            loss, grad, gold, best = _chunk(z[part], head, teacher[part], token[part], use_argmax, settings)
            losses.append(loss)
            grads.append(grad)
            golds.append(gold)
            ids.append(best)
        scale = weight / weight.sum().clamp_min(1e-6)
        ctx.save_for_backward(torch.cat(grads) * scale.unsqueeze(-1).to(z.dtype))
        gold, best = torch.cat(golds), torch.cat(ids)
        ctx.mark_non_differentiable(gold, best)
        return (torch.cat(losses) * scale).sum(), gold, best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _gold: Tensor, _best: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grad_loss.to(grad.dtype), None, None, None, None, None, None


def head_loss(
    z: Tensor, head: Tensor, teacher: Tensor, token: Tensor, weight: Tensor, *, use_argmax: bool, settings: HeadSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted mean of the base loss over rows.

    Args:
        z: ``[N, H]`` draft states after the final norm.
        head: ``[V, H]``, frozen.
        teacher: ``[N, H]`` states of the target that predict the same tokens.
        token: int64 ``[N]``, the document's tokens.
        weight: fp32 ``[N]``; 0 leaves a row out. All zero gives a loss of 0.
        use_argmax: gold is the target's most likely token rather than the document's.
        settings: see `HeadSettings`.

    Returns:
        the loss; gold int64 ``[N]``; the drafter's best ids int64 ``[N, max(C, 1)]``, best first, no gradient.
    """
    return _HeadLoss.apply(z, head, teacher, token, weight, use_argmax, settings)


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


def draft_states(network: DraftNetwork, embedding: Tensor, blocks: Blocks, taps: Tensor) -> Tensor:
    """The inference forward for all blocks at once.

    Args:
        network: the drafter.
        embedding: ``[V, H]`` rows of the target's table.
        blocks: N blocks over R*S tokens.
        taps: ``[R*S, T*H]``.

    Returns:
        ``[N, B, H]``, after the final norm.
    """
    config = network.config
    keys, values = network.context_rows(taps, blocks.positions)
    ids = torch.full((len(blocks.anchors), config.block_size), config.mask_token_id, device=taps.device)
    ids[:, 0] = blocks.tokens[blocks.anchors]
    hidden = (embedding[ids] * config.input_embedding_scale).to(keys.dtype)
    start = blocks.positions[blocks.anchors].unsqueeze(-1)
    positions = start + torch.arange(config.block_size, device=taps.device)
    return network(hidden, positions, TiledAttention(config, blocks, keys, values))


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
    network: DraftNetwork,
    z: Tensor,
    head: Tensor,
    targets: BlockTargets,
    *,
    settings: HeadSettings,
    selector_weight: float,
    use_argmax: bool,
) -> BlockLoss:
    """Base loss plus ``selector_weight`` times the selector's, each with its own normaliser.

    The selector chooses among the drafter's own C candidates with the *true* token before them; gold is the same as
    the base loss's. By default that is the target's argmax after the document's tokens: greedy verification compares
    with exactly that, and on sampled documents it has less noise than the token that happened to be drawn. Rows whose
    gold is not among the candidates are left out: nothing the selector could do would win them.

    Args:
        network: the drafter.
        z: ``[N, B, H]``.
        head: ``[V, H]``, frozen.
        targets: for rows 1..B-1.
        settings: see `HeadSettings`.
        selector_weight: factor on the selector's loss.
        use_argmax: gold is the target's argmax, else the document's token.
    """
    rows = z[:, 1:].flatten(0, 1)
    weight = targets.weight.flatten()
    args = (targets.teacher.flatten(0, 1), targets.token.flatten(), weight)
    base, gold, best = head_loss(rows, head, *args, use_argmax=use_argmax, settings=settings)
    shape = targets.weight.shape
    used = (targets.weight > 0).float()
    rate = lambda right: ((right.view(shape) * used).sum(0) / used.sum(0).clamp_min(1)).detach()  # noqa: E731
    hit = best == gold.unsqueeze(-1)
    top1, recall = rate(hit[:, 0].float()), rate(hit.any(-1).float())
    selector = network.candidate_selector
    if selector is None:
        zero = base.new_zeros(())
        return BlockLoss(base, base, zero, top1, recall, top1)
    scores = candidate_logits(rows, head, best, settings)
    scores = scores + pair_scores(selector, rows, targets.predecessor.flatten(), best)
    usable = weight * hit.any(-1)
    losses = F.cross_entropy(scores, hit.int().argmax(-1), reduction="none")
    chosen = (losses * usable).sum() / usable.sum().clamp_min(1e-6)
    won = hit.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1).float()
    return BlockLoss(base + selector_weight * chosen, base, chosen, top1, recall, rate(won))


def pair_scores(selector: CandidateSelector, rows: Tensor, predecessor: Tensor, candidates: Tensor) -> Tensor:
    """`CandidateSelector.pair_scores` with one predecessor per row: ``[N, H]``, ``[N]``, ``[N, C]`` -> fp32 ``[N, C]``.

    Through `embedding`: the gradient of plain indexing adds up a token's rows one after the other, and common tokens
    are candidates of most rows.
    """
    before = F.embedding(predecessor, selector.predecessor_codebook).float() * selector.hidden_projection(rows).float()
    after = F.embedding(candidates, selector.successor_codebook).float()
    return torch.bmm(after, before.unsqueeze(-1)).squeeze(-1)


def candidate_logits(rows: Tensor, head: Tensor, candidates: Tensor, s: HeadSettings) -> Tensor:
    """Logits of the candidates only, with gradient: rows ``[N, H]``, candidates ``[N, C]`` -> fp32 ``[N, C]``."""
    raw = torch.bmm(head[candidates], rows.to(head.dtype).unsqueeze(-1)).squeeze(-1)
    return scaled_logits(raw, s.multiplier, s.softcap)
