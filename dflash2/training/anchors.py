"""Which positions a step drafts from, and which context each group of them has to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash2.training.data import PackedRows

__all__ = ["Blocks", "draw_blocks", "make_blocks", "sample_anchors"]

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
        starts, ends: int64 ``[N]``, flat index of the document's first token, and one past its last.
        slab_first: int64 ``[N/tile]``, flat index where a tile's context begins.
        slab_length: context rows per tile.
        tile: anchors per tile.
    """

    tokens: Tensor
    positions: Tensor
    document: Tensor
    anchors: Tensor
    valid: Tensor
    starts: Tensor
    ends: Tensor
    slab_first: Tensor
    slab_length: int
    tile: int

    def to(self, device: torch.device | str) -> Blocks:
        """The same blocks with their tensors on ``device``."""
        return self._each(lambda x: x.to(device, non_blocking=True))

    def pin(self) -> Blocks:
        """The same blocks in memory that a GPU copies from without making the stream wait."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Blocks:
        changed: dict[str, Any] = {k: change(v) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **changed)

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


def draw_blocks(
    rows: PackedRows, per_row: int, rngs: Sequence[np.random.Generator], tile: int, retention: int | None
) -> Blocks:
    """``per_row`` blocks of every row. What a row gets depends on its generator only, not on the rows beside it.

    Args:
        rows: the packed documents, R rows.
        per_row: a multiple of ``tile``. A row with fewer eligible positions fills up with blocks that are not valid.
        rngs: one generator for each row.
        tile, retention: see `make_blocks`.
    """
    width, eligible = rows.tokens.shape[1], rows.eligible()
    bounds = np.searchsorted(eligible, np.arange(len(rngs) + 1) * width)
    anchors, valid = np.empty((len(rngs), per_row), np.int64), np.zeros((len(rngs), per_row), bool)
    for r, rng in enumerate(rngs):
        found = eligible[bounds[r] : bounds[r + 1]]
        if len(found) > per_row:
            found = np.sort(rng.choice(found, per_row, replace=False))
        valid[r, : len(found)] = True
        anchors[r] = np.pad(found, (0, per_row - len(found)), mode="edge") if len(found) else r * width
    return _blocks(rows, anchors.reshape(-1), valid.reshape(-1), tile, retention)


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
    return _blocks(rows, np.pad(anchors, (0, count - len(anchors)), mode="edge"), valid, tile, retention)


def _blocks(rows: PackedRows, anchors: np.ndarray, valid: np.ndarray, tile: int, retention: int | None) -> Blocks:
    document = rows.document.reshape(-1)
    # A row without documents has one block all the same, at padding: it sees itself, and counts nowhere.
    owner = document[anchors]
    starts = np.where(owner < 0, anchors, rows.first[owner])
    ends = np.where(owner < 0, anchors, rows.end[owner])
    oldest = starts if retention is None else np.maximum(starts, anchors - retention)
    first, last = oldest.reshape(-1, tile).min(1), anchors.reshape(-1, tile).max(1)
    longest = max(int((last - first).max()), 1)
    return Blocks(
        tokens=torch.from_numpy(rows.tokens).flatten(),
        positions=torch.from_numpy(rows.positions).flatten(),
        document=torch.from_numpy(document),
        anchors=torch.from_numpy(anchors),
        valid=torch.from_numpy(valid),
        starts=torch.from_numpy(starts),
        ends=torch.from_numpy(ends),
        slab_first=torch.from_numpy(first),
        slab_length=-(-longest // SLAB_MULTIPLE) * SLAB_MULTIPLE,
        tile=tile,
    )
