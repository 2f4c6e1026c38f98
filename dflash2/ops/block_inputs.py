"""What the draft layers start from: embedded rows, their norm and rotation, and whether drafting makes sense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.ops.backend import Backend, choose_backend
from dflash2.ops.residual_norm import rms_norm
from dflash2.ops.window_attention import PagedContext

__all__ = ["BlockInputs", "BlockRules", "block_inputs", "block_inputs_reference", "can_draft", "embed_blocks"]


@dataclass(frozen=True)
class BlockRules:
    """What does not change from call to call.

    Attributes:
        vocab_size: V; anchors outside of it cannot draft.
        mask_id: token of rows 1.. of a block.
        embedding_scale: factor on the embedded rows.
        eps: of the norms.
        rope_scale: factor on cos and sin.
        any_context: drafting makes sense without a visible context row, since no layer looks at context.
    """

    vocab_size: int
    mask_id: int
    embedding_scale: float
    eps: float
    rope_scale: float
    any_context: bool


class BlockInputs(NamedTuple):
    """Rows of R blocks of n, N = R n.

    Attributes:
        h: the embedded rows ``[N, H]``, x: the same normed; in the norm's dtype.
        cos, sin: fp32 ``[N, hd/2]``.
        valid: bool ``[R]``, whether the anchor is in the vocabulary, the sequence is at the start asked for, and a
            context row is there.
    """

    h: Tensor
    x: Tensor
    cos: Tensor
    sin: Tensor
    valid: Tensor


def block_inputs(
    anchors: Tensor, next_positions: Tensor, context: PagedContext, embedding: Tensor, mask_row: Tensor | None,
    weight: Tensor, frequencies: Tensor, block_rows: int, rules: BlockRules, *, backend: Backend = "auto",
) -> BlockInputs:  # fmt: skip
    """Embed anchors and masks and all that the layers need of positions.

    Args:
        anchors: int64 ``[R]``, any value.
        next_positions: int64 ``[slots]``, each sequence's next position.
        context: slots, starts, tags and pages.
        embedding: floating ``[V', H]``.
        mask_row: floating ``[H]`` in place of the mask token's row, or None.
        weight: of the first norm, floating ``[H]``; its dtype is the result's.
        frequencies: fp32 ``[hd/2]``.
        block_rows: n.
        rules: see `BlockRules`.
        backend: ``"auto"`` (the kernel on a GPU), ``"torch"`` or ``"triton"``.

    Raises:
        ValueError: the backend cannot run here.
    """
    if choose_backend(backend, embedding, weight) == "torch":
        return block_inputs_reference(
            anchors, next_positions, context, embedding, mask_row, weight, frequencies, block_rows, rules
        )
    from dflash2.kernels import block_inputs as kernel

    found = kernel.block_inputs(
        anchors, context.starts, context.slots, next_positions, context.rows("triton"), embedding, mask_row,
        frequencies, weight, block_rows=block_rows, vocab_size=rules.vocab_size, mask_id=rules.mask_id, eps=rules.eps,
        embedding_scale=rules.embedding_scale, rope_scale=rules.rope_scale, any_context=rules.any_context,
        dtype=weight.dtype,
    )  # fmt: skip
    return BlockInputs(*found)


def block_inputs_reference(
    anchors: Tensor, next_positions: Tensor, context: PagedContext, embedding: Tensor, mask_row: Tensor | None,
    weight: Tensor, frequencies: Tensor, block_rows: int, rules: BlockRules,
) -> BlockInputs:  # fmt: skip
    """The definition, in torch."""
    any_anchor = anchors.where((anchors >= 0) & (anchors < rules.vocab_size), 0)
    h = embed_blocks(
        any_anchor, block_rows, rules.mask_id, embedding, mask_row, rules.embedding_scale, weight.dtype
    ).flatten(0, 1)
    positions = (context.starts[:, None] + torch.arange(block_rows, device=anchors.device)).flatten()
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * rules.rope_scale, angles.sin() * rules.rope_scale
    valid = can_draft(anchors, next_positions, context, rules.vocab_size, any_context=rules.any_context)
    return BlockInputs(h, rms_norm(h, weight, rules.eps), cos, sin, valid)


def embed_blocks(
    anchors: Tensor, block_rows: int, mask_id: int, embedding: Tensor, mask_row: Tensor | None, scale: float,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Input rows of blocks, anchors int64 ``[...]`` and masks: raw rows times the scale, ``[..., block_rows, H]``."""
    ids = torch.full((*anchors.shape, block_rows), mask_id, dtype=torch.int64, device=anchors.device)
    ids[..., 0] = anchors
    rows = F.embedding(ids, embedding).to(dtype)
    if mask_row is not None:
        rows = torch.where((ids == mask_id)[..., None], mask_row.to(dtype), rows)
    return rows * scale if scale != 1.0 else rows


def can_draft(
    anchors: Tensor, next_positions: Tensor, context: PagedContext, vocab_size: int, *, any_context: bool
) -> Tensor:
    """`BlockInputs.valid`; see `BlockRules` for ``any_context``."""
    valid = (anchors >= 0) & (anchors < vocab_size) & (next_positions[context.slots] == context.starts)
    return valid if any_context else valid & context.there.any(1)
