"""Which positions a step drafts from, and which context each group of them has to look at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash2.training.data import PackedRows

__all__ = ["Blocks", "make_blocks", "sample_anchors"]

#: Context slabs are padded to a multiple of this: few distinct shapes, and rows that attention kernels like.
SLAB_MULTIPLE = 128


@dataclass(frozen=True)
class Blocks:
    """N blocks of B rows over flat packed tokens, sorted by anchor and grouped in tiles of neighbours.

    Neighbouring anchors look at nearly the same context, so a tile gathers one contiguous slab of it and masks per
    query: the cost is that of a window per tile, not per anchor.

    Attributes:
        tokens: int64 ``[R*S]``.
        positions: int64 ``[R*S]``, position within the document.
        document: int64 ``[R*S]``.
        anchors: int64 ``[N]``, flat index; ascending.
        valid: bool ``[N]``; False for the blocks that only fill up the last tile.
        ends: int64 ``[N]``, flat index one past the document.
        slab_first: int64 ``[N/tile]``, flat index where a tile's context begins.
        slab_length: context rows per tile.
        tile: anchors per tile.
    """

    tokens: Tensor
    positions: Tensor
    document: Tensor
    anchors: Tensor
    valid: Tensor
    ends: Tensor
    slab_first: Tensor
    slab_length: int
    tile: int

    def to(self, device: torch.device | str) -> Blocks:
        """The same blocks with their tensors on ``device``."""
        moved: dict[str, Any] = {
            k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)
        }
        return replace(self, **moved)

    def rows(self, block_size: int) -> Tensor:
        """Flat indices of the block rows, ``[N, B]``, clamped to the tokens there are."""
        index = self.anchors.unsqueeze(-1) + torch.arange(block_size, device=self.anchors.device)
        return index.clamp(max=len(self.tokens) - 1)

    def supervised(self, block_size: int) -> Tensor:
        """Bool ``[N, B-1]``: rows 1..B-1 whose token is in the anchor's document.

        Blocks that run over the end of their document keep their first rows: the context says nothing of the end, so
        drafting there is what happens at inference too.
        """
        index = self.anchors.unsqueeze(-1) + torch.arange(1, block_size, device=self.anchors.device)
        return (index < self.ends.unsqueeze(-1)) & self.valid.unsqueeze(-1)


def sample_anchors(rows: PackedRows, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` distinct anchors, uniform over the eligible positions; all of them when there are fewer. Sorted."""
    eligible = rows.eligible()
    if len(eligible) > count:
        eligible = rng.choice(eligible, count, replace=False)
    return np.sort(eligible)


def make_blocks(rows: PackedRows, anchors: np.ndarray, count: int, tile: int, retention: int | None) -> Blocks:
    """Group anchors into tiles and find each tile's context.

    Args:
        rows: the packed documents.
        anchors: sorted flat indices, at most ``count`` and at least one.
        count: N, a multiple of ``tile``; missing blocks repeat the last anchor and are not valid.
        tile: anchors per tile.
        retention: context rows before an anchor that some layer can see; None for all.
    """
    if not 0 < len(anchors) <= count or count % tile:
        raise ValueError(
            f"{len(anchors)} anchors for {count} blocks in tiles of {tile}: expected 1..{count}, whole tiles."
        )
    valid = np.arange(count) < len(anchors)
    anchors = np.concatenate((anchors, np.repeat(anchors[-1:], count - len(anchors))))
    document = rows.document.reshape(-1)
    owner = document[anchors]
    oldest = rows.first[owner] if retention is None else np.maximum(rows.first[owner], anchors - retention)
    first, last = oldest.reshape(-1, tile).min(1), anchors.reshape(-1, tile).max(1)
    longest = max(int((last - first).max()), 1)
    return Blocks(
        tokens=torch.from_numpy(rows.tokens).flatten(),
        positions=torch.from_numpy(rows.positions).flatten(),
        document=torch.from_numpy(document),
        anchors=torch.from_numpy(anchors),
        valid=torch.from_numpy(valid),
        ends=torch.from_numpy(rows.end[owner]),
        slab_first=torch.from_numpy(first),
        slab_length=-(-longest // SLAB_MULTIPLE) * SLAB_MULTIPLE,
        tile=tile,
    )
