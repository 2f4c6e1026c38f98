"""Where new context rows go: positions and rows of the pool, and what the pool then knows of its sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash2.ops.backend import Backend, choose_backend

__all__ = ["Placement", "RowPool", "accept", "place_rows", "plan_rows"]


@dataclass(frozen=True)
class RowPool:
    """The integer side of a pool of pages. Its last page takes the rows that are not to be kept.

    Attributes:
        page_table: int64 ``[slots, ring_pages]``, page at each place of a sequence's ring, or -1.
        tags: int64 ``[(num_pages + 1) * page_size]``, the position each row was written for, or -1.
        next, limit: int64 ``[slots]``, the next position, and the bound of what may be written unasked.
        faults: int64 ``[slots]``, calls that did not fit.
        page_size: rows per page.
    """

    page_table: Tensor
    tags: Tensor
    next: Tensor
    limit: Tensor
    faults: Tensor
    page_size: int


@dataclass(frozen=True)
class Placement:
    """What `plan_rows` found.

    Attributes:
        positions: int64 ``[N]``, absolute; 0 where a row is not kept.
        rows: int64 ``[N]``, of the pool; on its last page where a row is not kept.
        kept: bool ``[N]``.
        nexts: int64 ``[R]``, positions after the valid rows.
        fits: bool ``[R]``, whether the request is what the pool expected.
    """

    positions: Tensor
    rows: Tensor
    kept: Tensor
    nexts: Tensor
    fits: Tensor


def place_rows(
    starts: Tensor,
    lengths: Tensor,
    valid_lengths: Tensor,
    slots: Tensor,
    pool: RowPool,
    rows: int,
    *,
    checked: bool = True,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Give each of N new rows its place, and move the sequences on: `plan_rows`, then `accept`.

    Request r brings rows of positions ``starts[r] .. starts[r] + lengths[r] - 1``, in the order of the requests, of
    which the first ``valid_lengths[r]`` count. It fits when ``starts[r]`` is the slot's next position, its valid rows
    lie below the slot's limit (no valid row needs no room), 0 <= valid <= length, and all lengths are >= 0 with the sum
    N. Of a request that fits, the valid rows among the last ``ring`` before its new next position are kept.

    Args:
        starts, lengths, valid_lengths: int64 ``[R]``.
        slots: int64 ``[R]``; those of requests that fit are different.
        pool: ``tags`` of kept rows, ``next`` and ``faults`` are changed. A request that does not fit adds a fault and
            changes nothing else.
        rows: N.
        checked: False takes every request as fitting, for callers who have checked and own the pages.
        backend: see `choose_backend`; the kernel is one launch.

    Returns:
        positions and rows of the pool, int64 ``[N]``, as in `Placement`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend cannot run here.
    """
    integers = (starts, lengths, valid_lengths, slots)
    if any(t.shape != slots.shape or t.dtype != torch.int64 for t in integers) or slots.dim() != 1:
        found = [(list(t.shape), t.dtype) for t in integers]
        raise ValueError(f"place_rows got {found}; expected starts, lengths, valid_lengths and slots, each int64 [R].")
    if any(t.device != pool.tags.device for t in integers):
        raise ValueError(f"place_rows got requests on {[str(t.device) for t in integers]} and a pool on "
                         f"{pool.tags.device}; move them together.")  # fmt: skip
    # The kernel takes integers only: an empty float tensor stands for where they are.
    if choose_backend(backend, slots.new_empty(0, dtype=torch.float32)) == "torch":
        placement = plan_rows(*integers, pool, rows, checked=checked)
        accept(placement, slots, pool)
        return placement.positions, placement.rows
    from dflash2.kernels import place_rows as kernel

    starts, lengths, valid_lengths, slots = (t.contiguous() for t in integers)
    return kernel.place_rows(starts, lengths, valid_lengths, slots, pool, rows, checked)


def plan_rows(
    starts: Tensor, lengths: Tensor, valid_lengths: Tensor, slots: Tensor, pool: RowPool, rows: int, *, checked: bool
) -> Placement:
    """The definition of the places, in torch; changes nothing. Arguments as of `place_rows`."""
    ring_pages, size = pool.page_table.shape[1], pool.page_size
    row, ends = torch.arange(rows, device=slots.device), lengths.cumsum(0)
    owner = torch.searchsorted(ends, row, right=True).clamp_max(len(slots) - 1)
    offset, nexts = row - (ends - lengths)[owner], starts + valid_lengths
    fits = torch.ones_like(slots, dtype=torch.bool)
    if checked:
        in_order = (pool.next[slots] == starts) & (valid_lengths >= 0) & (valid_lengths <= lengths)
        packed = (lengths >= 0).all() & (lengths.sum() == rows)
        fits = in_order & packed & ((nexts <= pool.limit[slots]) | (valid_lengths == 0))
    positions = starts[owner] + offset
    kept = fits[owner] & (offset < valid_lengths[owner]) & (positions >= nexts[owner] - ring_pages * size)
    positions = positions.where(kept, 0)
    page = pool.page_table[slots[owner], positions // size % ring_pages]
    kept = kept & (page >= 0)
    discard = pool.tags.shape[0] - size + row % size
    return Placement(positions.where(kept, 0), torch.where(kept, page * size + positions % size, discard), kept, nexts,
                     fits)  # fmt: skip


def accept(placement: Placement, slots: Tensor, pool: RowPool) -> None:
    """The definition of what the pool then knows; the rows themselves are to be there already."""
    pool.tags.index_copy_(0, placement.rows, placement.positions.where(placement.kept, -1))
    pool.next[slots] = torch.where(placement.fits, placement.nexts, pool.next[slots])
    pool.faults[slots] += (~placement.fits).to(torch.int64)
