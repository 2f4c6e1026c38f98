"""Attention of many blocks at once over packed documents, with the masks of inference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.config import DFlash2Config
from dflash2.ops.visibility import block_visible, context_visible
from dflash2.training.anchors import Blocks

__all__ = ["TiledAttention", "visible"]


def visible(blocks: Blocks, block_size: int, *, window: int | None, causal: bool) -> Tensor:
    """What each block row sees of its tile's slab and of the tile's block rows.

    A slab row must be of the anchor's document and pass `context_visible`; a block row must be of the same block and
    pass `block_visible`.

    Returns:
        bool ``[tiles, tile*B, slab_length + tile*B]``.
    """
    b, t = block_size, blocks.tile
    anchors = blocks.anchors.view(-1, t)
    start = blocks.positions[anchors]
    query = (start.unsqueeze(-1) + torch.arange(b, device=start.device)).flatten(1).unsqueeze(-1)
    raw = blocks.slab_first.unsqueeze(-1) + torch.arange(blocks.slab_length, device=start.device)
    # Rows past the last token are clamped copies of it: no anchor lies behind them, so they have to be hidden here.
    slab, inside = raw.clamp(max=len(blocks.tokens) - 1), raw < len(blocks.tokens)
    start = start.repeat_interleave(b, dim=1).unsqueeze(-1)
    same = blocks.document[anchors].repeat_interleave(b, dim=1).unsqueeze(-1) == blocks.document[slab].unsqueeze(1)
    key = blocks.positions[slab].unsqueeze(1)
    context = same & inside.unsqueeze(1) & context_visible(query, key, start, window=window)
    block = torch.arange(t, device=start.device).repeat_interleave(b)
    own = block_visible(query, query.transpose(1, 2), window=window, causal=causal)
    return torch.cat((context, own & (block.unsqueeze(-1) == block)), dim=-1)


class TiledAttention:
    """An `Attend` over the context rows of packed documents. One object serves one forward pass.

    Args:
        config: windows and causality per layer.
        blocks: the blocks.
        keys, values: ``[L, R*S, nkv, hd]``, from `DraftNetwork.context_rows`.
    """

    def __init__(self, config: DFlash2Config, blocks: Blocks, keys: Tensor, values: Tensor):
        self.blocks, self.keys, self.values = blocks, keys, values
        self.rules = list(zip(config.windows, config.causal, strict=True))
        self.groups = config.num_attention_heads // config.num_key_value_heads
        slab = blocks.slab_first.unsqueeze(-1) + torch.arange(blocks.slab_length, device=keys.device)
        self.slab = slab.clamp(max=len(blocks.tokens) - 1).flatten()
        self._bias: dict[tuple[int | None, bool], Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [N, B, nq, hd]``, k and v ``[N, B, nkv, hd]`` -> ``[N, B, nq, hd]``."""
        n, b, heads, dim = q.shape
        t, g = self.blocks.tile, self.groups
        # The g query heads that share a key head become more query rows: keys are never repeated.
        folded = q.view(n // t, t * b, heads // g, g, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(
            folded,
            self._with_context(self.keys[layer], k),
            self._with_context(self.values[layer], v),
            self._mask(layer, b, q),
        )
        return out.unflatten(2, (g, t * b)).permute(0, 3, 1, 2, 4).reshape(n, b, heads, dim)

    def _with_context(self, context: Tensor, rows: Tensor) -> Tensor:
        # Slabs overlap; in fp32 the gradients of a row shared by many tiles add up without rounding each time.
        slab = context.float().index_select(0, self.slab).to(rows.dtype)
        tiles = len(self.blocks.slab_first)
        joined = torch.cat((slab.view(tiles, -1, *rows.shape[2:]), rows.reshape(tiles, -1, *rows.shape[2:])), dim=1)
        return joined.transpose(1, 2)

    def _mask(self, layer: int, block_size: int, like: Tensor) -> Tensor:
        """Additive, ``[tiles, nkv, g*tile*B, keys]`` with stride 0 over heads; made once for layers of one rule."""
        window, causal = self.rules[layer]
        if (window, causal) not in self._bias:
            seen = visible(self.blocks, block_size, window=window, causal=causal)
            bias = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))
            self._bias[window, causal] = bias.repeat(1, self.groups, 1).unsqueeze(1)
        return self._bias[window, causal].expand(-1, like.shape[-2] // self.groups, -1, -1)
