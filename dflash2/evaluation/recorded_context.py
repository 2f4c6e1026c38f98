"""The context rows of whole documents, and passes over blocks that begin anywhere in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash2.drafter import DFlash2Drafter
from dflash2.evaluation.trace import Shard
from dflash2.ops.context_rows import context_rows
from dflash2.ops.window_attention import PagedContext
from dflash2.propose import block_pass

__all__ = ["RecordedContext"]

PAGE = 16
#: Tokens whose context rows are made at a time.
APPENDED = 8192


class RecordedContext:
    """What `DFlash2Drafter.append` would have stored of each document of a shard.

    Documents lie in pages, as sequences do in a `WindowKV`, with one difference: rows that have left the window are
    still there, since another block begins earlier.

    Args:
        drafter: bound to the target's tables.
        shard: D documents of N tokens.
        taps: ``[N, T*H]``, the drafter's layers.
    """

    def __init__(self, drafter: DFlash2Drafter, shard: Shard, taps: Tensor):
        c, device = drafter.config, drafter.device
        self.drafter = drafter
        pages = -(-shard.lengths // PAGE)
        first, most = pages.cumsum(0) - pages, int(pages.max())
        document = torch.repeat_interleave(shard.lengths)
        position = torch.arange(len(document)) - shard.starts[document]
        rows = (first[document] * PAGE + position).to(device)
        shape = (c.num_hidden_layers, int(pages.sum()) * PAGE, c.num_key_value_heads, c.head_dim)
        self.keys, self.values = torch.zeros(2, *shape, dtype=drafter.dtype, device=device)
        self.tags = torch.full((shape[1],), -1, device=device)
        self.tags[rows] = position = position.to(device)
        table = (first[:, None] + torch.arange(most)).where(torch.arange(most) < pages[:, None], -1)
        self.page_table = table.to(device)
        weights = drafter.context_weights()
        for part in torch.arange(len(document)).split(APPENDED):
            inputs = (taps[part].to(device), position[part], rows[part])
            context_rows(*inputs, weights, self.keys, self.values, backend=drafter.backend)

    def draft_states(
        self, documents: Tensor, starts: Tensor, anchors: Tensor, k: int, longest: int
    ) -> tuple[Tensor, Tensor]:
        """The pass of `DFlash2Drafter.propose`, for n blocks.

        Args:
            documents: int64 ``[n]``.
            starts: int64 ``[n]``, positions of the blocks' anchors in them.
            anchors: int64 ``[n]``, the tokens there.
            k: drafts.
            longest: the largest start.

        Returns:
            final hidden states of the k drafts ``[n, k, H]``, and bool ``[n]``, False where a block cannot draft.
        """
        retention = self.drafter.config.retention
        length = longest if retention is None else min(longest, retention)
        # A slot for each block, not for each document: in a pool, a slot has one next position.
        slots = torch.arange(len(starts), device=starts.device)
        context = PagedContext(self.tags, self.page_table[documents], slots, starts, PAGE, length)
        pool: Any = _Pool(self.keys, self.values, starts)
        table, mask_row = self.drafter._embedding[0], self.drafter.mask_embedding
        return block_pass(self.drafter, pool, context, table, mask_row, anchors, k + 1)


class _Pool:
    """What `block_pass` reads of a `WindowKV`: rows, and each slot's next position."""

    def __init__(self, keys: Tensor, values: Tensor, next_positions: Tensor):
        self.keys, self.values, self.next = keys, values, next_positions

    @property
    def row_pool(self) -> _Pool:
        return self
