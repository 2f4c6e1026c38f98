"""Context rows of prefixes seen before, kept page by page under a chained hash of their tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash2.errors import CapacityError
from dflash2.positions import upload

__all__ = ["PrefixStore", "TokenChain"]


def _digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass
class TokenChain:
    """The tokens of one sequence from position 0, and the hash of every whole page of them."""

    page_size: int
    tokens: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens, and the hashes of pages that are now whole."""
        self.tokens.extend(map(int, tokens))
        for page in range(len(self.digests), len(self.tokens) // self.page_size):
            self.digests.append(_digest(self.parent(page), self.page_tokens(page)))

    def truncate(self, position: int) -> None:
        """Forget tokens from ``position`` on."""
        del self.tokens[position:], self.digests[position // self.page_size :]

    def parent(self, page: int) -> bytes:
        """Hash of everything before a page."""
        return self.digests[page - 1] if page else b""

    def page_tokens(self, page: int) -> tuple[int, ...]:
        """The ids in a page, fewer than `page_size` in the last one."""
        return tuple(self.tokens[page * self.page_size : (page + 1) * self.page_size])


@dataclass
class _Page:
    index: int
    parent: bytes
    tokens: tuple[int, ...]


class PrefixStore:
    """A fixed number of pages, least recently used first out. Its memory is apart from that of live sequences.

    A context row depends on its taps and its position only, and a causal target's taps depend on the tokens up to
    there, so a row found under the same tokens is the row that would be computed.
    """

    def __init__(
        self, budget_bytes: int, page_size: int, row_shape: tuple[int, int, int], *, device: Any, dtype: torch.dtype
    ):
        layers, heads, head_dim = row_shape
        page_bytes = 2 * layers * page_size * heads * head_dim * dtype.itemsize
        self.page_size, self.num_pages = page_size, budget_bytes // page_bytes
        if self.num_pages < 1:
            raise CapacityError(
                f"prefix_store_bytes={budget_bytes:,} holds no page of {page_bytes:,} bytes. Raise it, or set 0 for no "
                "store."
            )
        shape = (layers, self.num_pages, page_size, heads, head_dim)
        try:
            self.keys = torch.empty(shape, device=device, dtype=dtype)
            self.values = torch.empty(shape, device=device, dtype=dtype)
        except RuntimeError as e:
            raise CapacityError(
                f"the prefix store needs {budget_bytes:,} bytes and {device} cannot give them. Lower "
                "prefix_store_bytes."
            ) from e
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()
        # Not sets: the order in them is another in each process, and all ranks of a model must find the same page.
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._free = list(range(self.num_pages))

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    @property
    def nbytes(self) -> int:
        """Bytes held, fixed at creation."""
        return self.keys.nbytes + self.values.nbytes

    def put(self, chain: TokenChain, first: int, keys: Tensor, values: Tensor) -> None:
        """Publish whole pages of a chain, from page ``first`` on; of known ones only the use is noted.

        Args:
            chain: knows the tokens of all of them.
            first: number of the first page.
            keys, values: ``[L, pages * page_size, nkv, hd]``. Of more pages than the store has, the last ones stay.
        """
        count = keys.shape[1] // self.page_size
        skipped = max(0, count - self.num_pages)
        new: list[tuple[int, int]] = []  # place in keys, index in the store
        for place in range(skipped, count):
            page = first + place
            digest = chain.digests[page]
            if digest in self._pages:
                self._pages.move_to_end(digest)
                continue
            new.append((place, self._free.pop() if self._free else self._evict()))
            self._pages[digest] = _Page(new[-1][1], chain.parent(page), chain.page_tokens(page))
            self._children.setdefault(chain.parent(page), {})[digest] = None
        if new:
            places, indices = upload(list(zip(*new, strict=True)), self.keys.device)
            for store, rows in ((self.keys, keys), (self.values, values)):
                pages = rows.unflatten(1, (count, self.page_size))
                store.index_copy_(1, indices, pages if len(new) == count else pages[:, places])

    def _evict(self) -> int:
        digest, page = self._pages.popitem(last=False)
        siblings = self._children[page.parent]
        del siblings[digest]
        if not siblings:
            del self._children[page.parent]
        return page.index

    def tail(self, chain: TokenChain, max_pages: int) -> list[tuple[int, int]]:
        """The longest run of stored pages that ends where the chain ends.

        Args:
            chain: tokens 0 .. P-1. P need not be a multiple of the page size: the last rows then come from a stored
                page that *begins* with the chain's last tokens.
            max_pages: how many pages the window can use.

        Returns:
            (page number in the sequence, index in the store), ascending. Rows after the last whole page are left out
            when no stored page begins with them.
        """
        last, part = divmod(len(chain.tokens), self.page_size)
        found: list[tuple[int, int]] = []
        if part and (page := self._beginning_with(chain.parent(last), tuple(chain.tokens[-part:]))) is not None:
            found.append((last, page))
        for number in reversed(range(last)):
            page_or_none = self._pages.get(chain.digests[number])
            if len(found) >= max_pages or page_or_none is None:
                break
            self._pages.move_to_end(chain.digests[number])
            found.append((number, page_or_none.index))
        return found[::-1]

    def _beginning_with(self, parent: bytes, tokens: tuple[int, ...]) -> int | None:
        for digest in self._children.get(parent, ()):
            if self._pages[digest].tokens[: len(tokens)] == tokens:
                self._pages.move_to_end(digest)
                return self._pages[digest].index
        return None
