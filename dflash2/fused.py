"""A propose's pass over its blocks in few launches: `DraftNetwork.forward` of the same modules, kernel by kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dflash2.conv import GroupedConv
from dflash2.model import DraftLayer, DraftNetwork, RMSNorm
from dflash2.ops.backend import Backend
from dflash2.ops.block_conv import block_conv
from dflash2.ops.block_inputs import BlockInputs, BlockRules, block_inputs
from dflash2.ops.block_linear import MOST_ROWS, block_linear, gated_linear
from dflash2.ops.int16_rows import GROUP, Int16Rows
from dflash2.ops.residual_norm import residual_norm
from dflash2.ops.rotary_heads import rotary_heads
from dflash2.ops.window_attention import PagedContext, window_attention
from dflash2.window_kv import WindowKV

__all__ = ["fused_pass"]


def fused_pass(
    network: DraftNetwork,
    kv: WindowKV,
    context: PagedContext,
    embedding: Tensor,
    mask_row: Tensor | None,
    anchors: Tensor,
    n: int,
) -> tuple[Tensor, Tensor]:
    """Final hidden states of rows 1.. of R blocks, and which blocks can draft.

    Args:
        network: its parameters are read where they are; linears may be int8. Its backend is that of every operation.
        kv: context rows of all layers, and each sequence's next position.
        context: which rows each request may see.
        embedding: raw rows of the target's table ``[V', H]``.
        mask_row: ``[H]`` in place of the mask token's row, or None.
        anchors: int64 ``[R]``, any value.
        n: rows of a block, 1 + drafts.

    Returns:
        ``[R, n-1, H]``, and bool ``[R]``: False for an anchor outside the vocabulary, a sequence that is elsewhere, no
        context row although layers look at context, or a hidden state that is not finite.
    """
    c, layers, backend = network.config, network.draft_layers, network.backend
    first = layers[0].input_layernorm
    rules = BlockRules(
        c.vocab_size, c.mask_token_id, c.input_embedding_scale, first.eps, network.rope.scale, c.retention == 0
    )
    frequencies = network.rope.frequencies(embedding.device)
    inputs = block_inputs(
        anchors, kv.row_pool.next, context, embedding, mask_row, first.weight, frequencies, n, rules, backend=backend
    )
    # int8 weights multiply rows as integers. Most make them on the way; the largest find them ready.
    few = len(anchors) * n <= MOST_ROWS
    int16 = few and _scale(layers[0].mlp.gate_proj) is not None and c.hidden_size % GROUP == 0
    h, x = inputs.h, inputs.x
    norms = [*[layer.input_layernorm for layer in layers[1:]], network.norm]
    for i, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
        y, after = _before(layer.attention_conv, x, n, False, backend)
        a = _attend(layer, y, inputs, kv.keys[i], kv.values[i], context, n, backend)
        norm, bias = layer.post_attention_layernorm, layer.self_attn.o_proj.bias
        h, x = _after(layer.attention_conv, h, a, bias, after, norm, n, None, backend)
        y, after = _before(layer.mlp_conv, x, n, int16, backend)
        gate, up = layer.mlp.gate_proj, layer.mlp.up_proj
        y = gated_linear(y, gate.weight, up.weight, (_scale(gate), _scale(up)), settled=True, backend=backend)
        a = _linear(y, layer.mlp.down_proj, backend=backend)
        finite = inputs.valid if i + 1 == len(layers) else None
        h, x = _after(layer.mlp_conv, h, a, None, after, next_norm, n, finite, backend)
    return x.view(len(anchors), n - 1, x.shape[-1]), inputs.valid


def _attend(
    layer: DraftLayer, x: Tensor | Int16Rows, inputs: BlockInputs, keys: Tensor, values: Tensor, context: PagedContext,
    n: int, backend: Backend,
) -> Tensor:  # fmt: skip
    at = layer.self_attn
    biases = None if at.q_proj.bias is None else (at.q_proj.bias, at.k_proj.bias, at.v_proj.bias)
    qkv = _linear(x, at.q_proj, at.k_proj, at.v_proj, backend=backend)
    heads = (at.q_proj.weight.shape[0] // at.head_dim, at.k_proj.weight.shape[0] // at.head_dim)
    eps = at.q_norm.eps
    q, k, v = rotary_heads(
        qkv, biases, at.q_norm.weight, at.k_norm.weight, eps, inputs.cos, inputs.sin, heads, backend=backend
    )
    blocks = (-1, n)
    out = window_attention(
        q.unflatten(0, blocks), k.unflatten(0, blocks), v.unflatten(0, blocks), keys, values, context,
        window=at.window, causal=at.causal, backend=backend,
    )  # fmt: skip
    return _linear(out.flatten(2).flatten(0, 1), at.o_proj, backend=backend)


def _before(
    conv: GroupedConv | None, x: Tensor, n: int, int16: bool, backend: Backend
) -> tuple[Tensor | Int16Rows, Tensor | None]:
    if conv is None:
        return x, None
    delta = _linear(x, conv.kernel_projection, backend=backend)
    return block_conv(x, conv.base_kernel[0], delta, n, int16=int16, settled=True, backend=backend)


def _after(
    conv: GroupedConv | None, h: Tensor, a: Tensor, bias: Tensor | None, delta: Tensor | None, norm: RMSNorm, n: int,
    finite: Tensor | None, backend: Backend,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    base = None if conv is None else conv.base_kernel[1]
    return residual_norm(h, a, bias, base, delta, norm.weight, norm.eps, n, finite, settled=True, backend=backend)


def _linear(x: Tensor | Int16Rows, *linears: Any, backend: Backend) -> Tensor:
    return block_linear(x, [m.weight for m in linears], [_scale(m) for m in linears], settled=True, backend=backend)


def _scale(linear: nn.Module) -> Tensor | None:
    scale = getattr(linear, "scale", None)
    return scale if isinstance(scale, Tensor) else None
