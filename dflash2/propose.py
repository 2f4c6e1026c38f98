"""What `DFlash2Drafter.propose` does on the device: a pass over the blocks, then a choice from its hidden states.

Nothing here looks at a value, so that a CUDA graph can hold all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash2.fused import fused_pass
from dflash2.lm_head import LMHead
from dflash2.model import DraftNetwork
from dflash2.ops.backend import choose_backend
from dflash2.ops.block_inputs import can_draft, embed_blocks
from dflash2.ops.selector_walk import draw, finite, one_hot, shape_logits, tempered
from dflash2.ops.top_candidates import top_candidates
from dflash2.ops.window_attention import PagedContext, window_attention
from dflash2.proposal import Proposal
from dflash2.window_kv import WindowKV

__all__ = ["block_pass", "choose_drafts"]


def block_pass(
    network: DraftNetwork,
    kv: WindowKV,
    context: PagedContext,
    embedding: Tensor,
    mask_row: Tensor | None,
    anchors: Tensor,
    n: int,
) -> tuple[Tensor, Tensor]:
    """Final hidden states of rows 1.. of R blocks, and which blocks can draft: arguments and results of `fused_pass`.

    Kernel by kernel where the network's backend allows, else by its modules.
    """
    if choose_backend(network.backend, network.norm.weight, embedding, dots=True) == "triton":
        return fused_pass(network, kv, context, embedding, mask_row, anchors, n)
    c = network.config

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return window_attention(
            q, k, v, kv.keys[layer], kv.values[layer], context, window=c.windows[layer], causal=c.causal[layer],
            backend="torch",
        )  # fmt: skip

    any_anchor = anchors.where((anchors >= 0) & (anchors < c.vocab_size), 0)
    dtype = network.norm.weight.dtype
    rows = embed_blocks(any_anchor, n, c.mask_token_id, embedding, mask_row, c.input_embedding_scale, dtype)
    positions = context.starts[:, None] + torch.arange(n, device=anchors.device)
    hidden = network(rows, positions, attend)
    valid = can_draft(anchors, kv.row_pool.next, context, c.vocab_size, any_context=c.retention == 0)
    valid = valid & hidden.isfinite().flatten(1).all(1)
    return torch.nan_to_num(hidden[:, 1:], posinf=0.0, neginf=0.0), valid


def choose_drafts(
    network: DraftNetwork,
    head: LMHead,
    rows: Tensor,
    anchors: Tensor,
    valid: Tensor,
    temperature: Tensor | None,
    noise: Tensor | None,
) -> Proposal:
    """Drafts from the final hidden states of rows 1..k.

    Args:
        network: its selector and rules.
        head: the target's.
        rows: ``[R, k, H]``.
        anchors: int64 ``[R]``.
        valid: bool ``[R]``, which requests can draft.
        temperature: fp32 ``[R]``, or None: all are greedy.
        noise: fp64 ``[R, k]`` in [0, 1), with a temperature.
    """
    c, shape = network.config, tuple(rows.shape[:2])
    if 0 in shape:
        none = anchors.new_zeros(*shape, c.selector_top_k or c.vocab_size)
        candidates = None if network.candidate_selector is None else none
        return Proposal(anchors.new_zeros(shape), candidates, None if noise is None else none.float(), valid)
    if network.candidate_selector is None:
        return _choose_independently(network, head, rows, valid, temperature, noise)
    ids, raw = head.top(rows.flatten(0, 1), c.vocab_size, c.selector_top_k)
    walk = network.candidate_selector.walk(
        rows,
        anchors,
        ids.unflatten(0, shape),
        raw.unflatten(0, shape),
        multiplier=c.output_multiplier,
        softcap=c.final_logit_softcapping,
        temperature=temperature,
        uniforms=noise,
        backend=network.backend,
    )
    return Proposal(walk.tokens, ids.unflatten(0, shape), walk.q, valid & walk.meaningful)


def _choose_independently(
    network: DraftNetwork, head: LMHead, rows: Tensor, valid: Tensor, temperature: Tensor | None, noise: Tensor | None
) -> Proposal:
    """Each row by itself, the way of v1: the argmax, or a draw from the whole vocabulary at the temperature."""
    c, shape = network.config, tuple(rows.shape[:2])
    if temperature is None or noise is None:
        ids, raw = head.top(rows.flatten(0, 1), c.vocab_size, 1)
        return Proposal(ids.view(shape), None, None, valid & _means_something(raw.view(shape)))
    logits = head.logits(rows.flatten(0, 1), c.vocab_size).unflatten(0, shape)
    best, raw = (x[..., 0] for x in top_candidates(logits, 1))  # of raw logits: a softcap can make ties
    greedy = (temperature <= 0)[:, None]
    shaped = finite(shape_logits(logits, c.output_multiplier, c.final_logit_softcapping))
    q = tempered(shaped, torch.where(greedy, 1.0, temperature[:, None]))
    q = torch.where(greedy[..., None], one_hot(best, q), q)
    return Proposal(torch.where(greedy, best, draw(q, noise)), None, q, valid & _means_something(raw))


def _means_something(best: Tensor) -> Tensor:
    """Whether the best raw logit of every row, ``[R, k]``, is a number: not all NaN or -inf, no +inf. bool ``[R]``."""
    return best.isfinite().all(1)
