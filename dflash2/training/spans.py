"""Attention over packed documents in which every query sees one or two ranges of keys, by flex attention.

Documents lie one after the other, so all masks of training are ranges: a target's token sees its document up to itself,
a block row sees its context (cut by the window) and rows of its own block. No mask is ever laid out key by key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention, or_masks

from dflash2.config import DFlash2Config
from dflash2.training.anchors import Blocks

__all__ = ["Span", "SpanAttention", "attend_spans", "block_spans", "document_spans", "span_mask"]

#: For each query the first key that it sees and one past the last, int32 ``[Q]``; empty where the second is no larger.
Span = tuple[Tensor, Tensor]
#: Queries and keys of one tile of flex attention.
TILE = 128


def document_spans(document: Tensor, window: int | None) -> Span:
    """What each token of packed documents sees: its own document up to itself.

    Args:
        document: int64 ``[T]``, ordinal per token, each document's tokens next to each other.
        window: W of a sliding layer, counting the token itself; None for full attention.
    """
    at = torch.arange(len(document), device=document.device)
    begins = torch.cat((document.new_ones(1, dtype=torch.bool), document[1:] != document[:-1]))
    low = torch.where(begins, at, 0).cummax(0).values
    low = low if window is None else torch.maximum(low, at - window + 1)
    return low.int(), (at + 1).int()


def block_spans(blocks: Blocks, block_size: int, *, window: int | None, causal: bool) -> tuple[Span, Span]:
    """What each block row sees: context tokens, keys 0 to T-1, and block rows, keys T to T + N*B - 1.

    Positions within a document differ as flat indices do, so `context_visible` and `block_visible` are ranges of those.
    """
    i = torch.arange(block_size, device=blocks.anchors.device)
    anchors, starts = blocks.anchors.unsqueeze(-1), blocks.starts.unsqueeze(-1)
    low = starts.expand(-1, block_size)
    if window is not None:
        low = torch.maximum(low, anchors + i - window + 1)
    first_row = len(blocks.tokens) + block_size * torch.arange(len(blocks.anchors), device=i.device).unsqueeze(-1)
    reach = block_size if window is None else window
    own_low = first_row + (i - reach + 1).clamp_min(0)
    own_high = first_row + (i + 1 if causal else (i + reach).clamp_max(block_size))
    ranges = [x.flatten().int() for x in (low, anchors.expand_as(low), own_low, own_high)]
    return (ranges[0], ranges[1]), (ranges[2], ranges[3])


def span_mask(spans: Sequence[Span], keys: int) -> BlockMask:
    """The mask of flex attention, made from the ranges alone.

    Args:
        spans: what Q queries see; the ranges of one query do not overlap.
        keys: how many there are.
    """
    queries = len(spans[0][0])
    down, across = -(-queries // TILE), -(-keys // TILE)
    # +1 where a range enters a tile of keys and -1 behind the last one it reaches: sums along a row say who is needed.
    edges = torch.zeros(down, across + 1, dtype=torch.int32, device=spans[0][0].device)
    row = torch.arange(queries, device=edges.device) // TILE * (across + 1)
    for low, high in spans:
        some = (low < high).int()
        edges.view(-1).scatter_add_(0, row + (low // TILE).clamp(0, across), some)
        edges.view(-1).scatter_add_(0, row + ((high - 1) // TILE + 1).clamp(0, across), -some)
    needed = edges.cumsum(1)[:, :across] > 0
    count = needed.sum(1, dtype=torch.int32)
    tiles = needed.to(torch.int8).argsort(dim=1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        count[None, None],
        tiles[None, None],
        BLOCK_SIZE=TILE,
        mask_mod=or_masks(*(_within(low, high) for low, high in spans)),
        seq_lengths=(queries, keys),
    )


def _within(low: Tensor, high: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= low[query]) & (key < high[query])

    return seen


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def attend_spans(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None = None) -> Tensor:
    """``q [1, nq, Q, hd]``, k and v ``[1, nkv, K, hd]`` -> ``[1, nq, Q, hd]``.

    On a GPU it is compiled. Elsewhere flex attention writes out all scores and has no backward pass: for tests.
    """
    compiled = q.is_cuda and not torch.compiler.is_compiling()
    run = _compiled() if compiled else flex_attention
    return run(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


class SpanAttention:
    """An `Attend` over the context rows of packed documents, as `TiledAttention`, for GPUs.

    Args:
        config: windows and causality per layer.
        blocks: the blocks.
        keys, values: ``[L, R*S, nkv, hd]``, from `DraftNetwork.context_rows`.
    """

    def __init__(self, config: DFlash2Config, blocks: Blocks, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values
        self.rules = list(zip(config.windows, config.causal, strict=True))
        total = len(blocks.tokens) + len(blocks.anchors) * config.block_size
        self.masks = {
            (window, causal): span_mask(block_spans(blocks, config.block_size, window=window, causal=causal), total)
            for window, causal in set(self.rules)
        }

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [N, B, nq, hd]``, k and v ``[N, B, nkv, hd]`` -> ``[N, B, nq, hd]``."""
        keys = torch.cat((self.keys[layer], k.flatten(0, 1)))
        values = torch.cat((self.values[layer], v.flatten(0, 1)))
        queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q.flatten(0, 1), keys, values))
        out = attend_spans(queries, keys, values, self.masks[self.rules[layer]])
        return out.squeeze(0).transpose(0, 1).unflatten(0, q.shape[:2])
