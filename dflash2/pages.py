"""Pages of context rows on the device: where a position's row lies, and whether the row there is really its."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash2.errors import CapacityError
from dflash2.positions import upload

__all__ = ["PagePool"]

NOT_STORED = -1


class PagePool:
    """Rows addressed by (sequence slot, position) through a ring of pages per slot.

    Args:
        row_shape: (L, nkv, hd).
        slots: sequences that can own pages.
        num_pages: pages in the pool.
        ring_pages: the most pages one slot can own.
        page_size: rows per page.

    Attributes:
        keys, values: ``[L, (num_pages + 1) * page_size, nkv, hd]``. The extra page takes rows that are not to be kept.
        tags: int64 ``[(num_pages + 1) * page_size]``, the position each row was written for, or -1.
        page_table: int64 ``[slots, ring_pages]``, page at each place of the ring, or -1.

    Raises:
        CapacityError: the device cannot give the memory.
    """

    def __init__(
        self,
        row_shape: tuple[int, int, int],
        *,
        slots: int,
        num_pages: int,
        ring_pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        layers, heads, head_dim = row_shape
        self.row_shape, self.num_pages, self.ring_pages, self.page_size = row_shape, num_pages, ring_pages, page_size
        rows = (num_pages + 1) * page_size
        try:
            self.keys = torch.empty(layers, rows, heads, head_dim, device=device, dtype=dtype)
            self.values = torch.empty_like(self.keys)
            self.tags = torch.full((rows,), NOT_STORED, device=device, dtype=torch.int64)
            self.page_table = torch.full((slots, ring_pages), NOT_STORED, device=device, dtype=torch.int64)
        except RuntimeError as e:  # torch.OutOfMemoryError is one, and so is the CPU allocator's error
            need = 2 * layers * rows * heads * head_dim * dtype.itemsize
            raise CapacityError(
                f"the drafter's KV needs {need:,} bytes ({num_pages} pages of {page_size} rows) and {device} cannot "
                "give them. Lower max_sequences, max_tokens or num_pages."
            ) from e
        self._free_pages = list(range(num_pages))[::-1]

    @property
    def ring(self) -> int:
        """Rows one sequence can hold."""
        return self.ring_pages * self.page_size

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.keys.device

    @property
    def pages_in_use(self) -> int:
        """Pages that sequences own."""
        return self.num_pages - len(self._free_pages)

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Row of each position in `keys` and `tags`, int64, broadcast shape; the extra page where none is owned."""
        page = self.page_table[slots, (positions // self.page_size) % self.ring_pages]
        page = torch.where(page < 0, self.num_pages, page)
        return page * self.page_size + positions % self.page_size

    def write(self, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys, values [L, N, nkv, hd]`` at ``positions [N]`` of ``slots [N]``, which own the pages."""
        rows = self.rows(slots, positions)
        self.write_rows(rows, keys, values)
        self.tags.index_copy_(0, rows, positions)

    def write_rows(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """The same at ``rows [N]``, without tags."""
        self.keys.index_copy_(1, rows, keys.to(self.keys.dtype))
        self.values.index_copy_(1, rows, values.to(self.values.dtype))

    def _places(self, first: int, end: int) -> set[int]:
        """Places in the ring that rows ``[first, end)`` use."""
        if end <= first:
            return set()
        pages = range(first // self.page_size, (end - 1) // self.page_size + 1)
        return set(range(self.ring_pages)) if len(pages) >= self.ring_pages else {p % self.ring_pages for p in pages}

    def _allocate(self, wanted: list[tuple[int, int]]) -> list[int]:
        """A clean page for each (slot, place), for all of them or for none."""
        if len(wanted) > len(self._free_pages):
            raise CapacityError(
                f"{len(wanted)} pages are needed and {len(self._free_pages)} of {self.num_pages} are free. Close "
                "sequences, or create the KV with more pages."
            )
        pages = [self._free_pages.pop() for _ in wanted]
        if pages:
            slots, places, pages_there = upload([*zip(*wanted, strict=True), pages], self.device)
            self.tags.view(-1, self.page_size)[pages_there] = NOT_STORED
            self.page_table[slots, places] = pages_there
        return pages

    def _give_back(self, slot: int, pages: dict[int, int]) -> None:
        """Take pages (place -> page) from a slot."""
        if pages:
            self.page_table[slot, upload(list(pages), self.device)] = NOT_STORED
            self._free_pages.extend(pages.values())
