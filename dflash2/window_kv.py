"""Context rows of many sequences in a fixed number of pages, bounded by the window and addressed by position.

A sequence owns a ring of pages. The slot of a row follows from its absolute position, and every stored row carries the
position it was written for (its tag). A query asks for positions; a row whose tag says something else is invisible. So
a stale, evicted, foreign or never-written row cannot be read, and a hole in the context needs no special case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash2.config import DFlash2Config
from dflash2.errors import CapacityError, PositionError
from dflash2.ops.place_rows import RowPool
from dflash2.pages import NOT_STORED, PagePool
from dflash2.positions import LastUpload, as_list, integer_ids, is_integer, upload, whole_number
from dflash2.prefix_store import PrefixStore, TokenChain
from dflash2.sequence_state import SequenceState
from dflash2.spans import Spans, cut, merge, runs

__all__ = ["WindowKV"]


@dataclass
class _Sequence:
    slot: int
    next: int
    spans: Spans = field(default_factory=list)  # valid rows [first, end), ascending, disjoint
    pages: dict[int, int] = field(default_factory=dict)  # place in the ring -> page
    reserved: int = 0
    chain: TokenChain | None = None
    stale: bool = False  # positions moved on the device: next and spans are to be read back


class WindowKV(PagePool):
    """Create with `DFlash2Drafter.new_kv`. Handles are integers that are never used twice.

    Attributes:
        num_pages: pages in the pool.
        page_size: rows per page.
        ring_pages: the most pages one sequence can own: ceil(W/page_size) + 2 when every layer slides.
        next, limit: int64 ``[max_sequences]``, each sequence's next position and the bound that was reserved.
        faults: int64 ``[max_sequences]`` on the device, appends whose device-side positions did not fit.
        captured: graphs of `DFlash2Drafter.capture` over this memory, or None.
    """

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of that mode
    def __init__(
        self,
        config: DFlash2Config,
        *,
        max_sequences: int,
        max_tokens: int,
        page_size: int = 16,
        prefix_store_bytes: int = 0,
        num_pages: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        sizes = {"max_sequences": max_sequences, "max_tokens": max_tokens, "page_size": page_size}
        sizes |= {"prefix_store_bytes": prefix_store_bytes} | ({} if num_pages is None else {"num_pages": num_pages})
        for name, value in sizes.items():
            least = 0 if name == "prefix_store_bytes" else 1
            if not is_integer(value) or value < least:
                raise CapacityError(f"{name}={value!r}: must be a whole number of at least {least}.")
        all_pages, window_pages = -(-max_tokens // page_size), config.window_pages(page_size)
        ring_pages = all_pages if window_pages is None else min(all_pages, window_pages)
        super().__init__(
            (config.num_hidden_layers, config.num_key_value_heads, config.head_dim),
            slots=max_sequences + 1,
            num_pages=max_sequences * ring_pages if num_pages is None else num_pages,
            ring_pages=ring_pages,
            page_size=page_size,
            device=torch.device(device),
            dtype=dtype,
        )
        self.config, self.max_sequences = config, max_sequences
        self._by_slot = torch.zeros(3, max_sequences + 1, dtype=torch.int64, device=device)
        self._by_slot[0, self.padding_slot] = NOT_STORED
        self.next, self.limit, self.faults = self._by_slot[:, :max_sequences]
        self.captured: Any = None
        self._uploaded = LastUpload(self.device)
        self.store: PrefixStore | None = None
        if prefix_store_bytes:
            self.store = PrefixStore(prefix_store_bytes, page_size, self.row_shape, device=self.device, dtype=dtype)
        self._free_slots = list(range(max_sequences))[::-1]
        self._sequences: dict[int, _Sequence] = {}
        self._last_handle = -1

    # -- what a caller may ask ------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes held, fixed at creation: independent of sequence lengths and of ``max_position_embeddings``."""
        tensors = (self.keys, self.values, self.tags, self.page_table, self._by_slot)
        return sum(t.nbytes for t in tensors) + (0 if self.store is None else self.store.nbytes)

    @property
    def padding_slot(self) -> int:
        """A slot that no sequence owns: for what fills up a batch, and fits nowhere."""
        return self.max_sequences

    @property
    def open_sequences(self) -> list[int]:
        """Handles that are open."""
        return list(self._sequences)

    def pages_needed(self, num_tokens: int, start_position: int = 0) -> int:
        """Pages that one sequence of ``num_tokens`` context rows owns: at most `ring_pages` when every layer slides.

        With a full-attention layer all rows are kept, so the answer grows with ``num_tokens``.
        """
        if num_tokens <= 0:
            return 0
        first, last = start_position // self.page_size, (start_position + num_tokens - 1) // self.page_size
        pages = last - first + 1
        return pages if self.config.retention is None else min(pages, self.ring_pages)

    def span(self, seq: int) -> tuple[int, int]:
        """(first valid position, next position); equal when nothing is stored. Holes may lie between.

        After a call with positions on the device this has to wait for the device.
        """
        s = self._fresh(seq)
        return (s.spans[0][0] if s.spans else s.next), s.next

    def spans(self, seq: int) -> list[tuple[int, int]]:
        """Every run of valid rows, ``[first, end)``, ascending."""
        return list(self._fresh(seq).spans)

    # -- lifecycle ------------------------------------------------------------------------------------------------

    def open(self, start_position: int = 0, token_ids: Sequence[int] | Tensor | None = None) -> int:
        """Begin a sequence whose next row is ``start_position``. What lies before is a hole, or is restored.

        Args:
            start_position: absolute position, >= 0.
            token_ids: ids of positions 0 .. start_position-1. With a prefix store, the longest stored tail ending at
                ``start_position`` is restored, at most a window, and later rows can be published.

        Raises:
            PositionError: a negative start, or a number of ids other than ``start_position``.
            CapacityError: no free sequence or not enough pages.
        """
        start = _position(start_position)
        tokens = _token_list(token_ids)
        if tokens is not None and len(tokens) != start:
            raise PositionError(
                f"open(start_position={start}) got {len(tokens)} token_ids: expected the ids of positions 0 to "
                f"{start - 1}, {start} of them."
            )
        if not self._free_slots:
            raise CapacityError(f"all {self.max_sequences} sequences are open. Close one, or raise max_sequences.")
        chain = None
        if self.store is not None and (tokens is not None or start == 0):
            chain = TokenChain(self.page_size)
            chain.extend(tokens or [])
        s = _Sequence(self._free_slots[-1], start, chain=chain)
        self._restore(s)
        self._free_slots.pop()
        self._begin_on_device(s)
        self._last_handle += 1
        self._sequences[self._last_handle] = s
        return self._last_handle

    def close(self, seq: int) -> None:
        """Give the sequence's pages back. Its handle is never valid again; what was published stays in the store."""
        s = self._get(seq)
        self._release(s, set())
        del self._sequences[seq]
        self._free_slots.append(s.slot)

    def reset(self, seq: int, start_position: int) -> None:
        """Forget every row and begin at ``start_position``, as if newly opened there."""
        s, start = self._get(seq), _position(start_position)
        self._release(s, set())
        s.next, s.spans, s.reserved, s.stale = start, [], 0, False
        s.chain = TokenChain(self.page_size) if self.store is not None and start == 0 else None
        self._begin_on_device(s)

    def truncate(self, seq: int, position: int) -> None:
        """Drop rows from ``position`` on; the next append starts there.

        Rows older than the ring are gone for good: going back further than its slack leaves the window's oldest part
        masked, and `span` says where the valid rows begin.
        """
        s, position = self._fresh(seq), _position(position)
        if position > s.next:
            raise PositionError(
                f"truncate(sequence {seq}, {position}): the sequence is only at {s.next}. To leave a hole use skip_to."
            )
        self._forget(s, position, s.next)
        s.next, s.reserved = position, 0
        if s.chain is not None:
            s.chain.truncate(position)
        self._trim(s)
        self.next[s.slot] = self.limit[s.slot] = position

    def skip_to(self, seq: int, position: int) -> None:
        """Leave a hole: positions up to ``position`` are masked, earlier rows stay visible where a window reaches."""
        s, position = self._fresh(seq), _position(position)
        if position < s.next:
            raise PositionError(
                f"skip_to(sequence {seq}, {position}): the sequence is already at {s.next}. To go back use truncate."
            )
        self._check_fits(seq, s, position)
        if position > s.next:
            s.chain = None
        self._forget(s, 0, position - self.ring)
        s.next = position
        self._trim(s)
        self.next[s.slot] = position

    def reserve(self, seqs: Sequence[int], up_to: Sequence[int]) -> None:
        """Own pages for rows before ``up_to`` beforehand, so that device-side positions need no allocation.

        Raises:
            CapacityError: not enough pages; nothing was reserved.
        """
        seqs, up_to = as_list("seqs", seqs), as_list("up_to", up_to)
        sequences = self._distinct(seqs)
        if len(up_to) != len(sequences):
            raise PositionError(f"reserve: {len(sequences)} sequences but {len(up_to)} bounds.")
        bounds = [_position(u) for u in up_to]
        for seq, s, u in zip(seqs, sequences, bounds, strict=True):
            self._check_fits(seq, s, u)
        self._own([(s, s.next, u) for s, u in zip(sequences, bounds, strict=True)])
        for s, u in zip(sequences, bounds, strict=True):
            s.reserved = max(s.reserved, u)
            self.limit[s.slot] = s.reserved

    def export_state(self, seq: int) -> SequenceState:
        """A copy of the sequence's rows on the CPU, for another process or pool."""
        s = self._fresh(seq)
        positions = torch.cat([torch.arange(a, b) for a, b in s.spans] or [torch.zeros(0, dtype=torch.int64)])
        rows = self.rows(self._slots(s, len(positions)), positions.to(self.device))
        tokens = list(s.chain.tokens) if s.chain is not None else None
        return SequenceState(s.next, positions, self.keys[:, rows].cpu(), self.values[:, rows].cpu(), tokens)

    def import_state(self, state: SequenceState) -> int:
        """Open a sequence that holds the exported rows.

        Raises:
            ConfigError: the rows are another drafter's, or not as `export_state` gives them.
            CapacityError: no free sequence or not enough pages.
        """
        state.check(self.row_shape)
        seq = self.open(state.next_position)
        s = self._sequences[seq]
        try:
            s.spans = runs(state.positions.tolist())
            self._check_fits(seq, s, s.next)
            s.spans = spans = cut(s.spans, s.next - self.ring, s.next)
            self._own([(s, a, b) for a, b in spans])
        except BaseException:
            self.close(seq)
            raise
        kept = state.positions >= s.next - self.ring
        positions = state.positions[kept]
        keys, values = (x[:, kept].to(self.device) for x in (state.keys, state.values))
        self.write(self._slots(s, len(positions)), positions.to(self.device), keys, values)
        if self.store is not None and state.tokens is not None:
            s.chain = TokenChain(self.page_size)
            s.chain.extend(state.tokens)
        return seq

    # -- what the drafter uses ------------------------------------------------------------------------------------

    def slots(self, seqs: Sequence[int]) -> Tensor:
        """int64 ``[R]`` on the device: rows of `page_table` and `next`. Not to be written to."""
        return self._uploaded([self._get(q).slot for q in seqs])

    def distinct_slots(self, seqs: Sequence[int]) -> list[int]:
        """The same on the host, for a call that writes, which must not name a sequence twice."""
        return [s.slot for s in self._distinct(seqs)]

    def distinct_slots_on_device(self, seqs: Sequence[int]) -> Tensor:
        """The same again, on the device."""
        return self._uploaded(self.distinct_slots(seqs))

    @property
    def row_pool(self) -> RowPool:
        """What `place_rows` reads and moves."""
        next_, limit, faults = self._by_slot
        return RowPool(self.page_table, self.tags, next_, limit, faults, self.page_size)

    def check_positions(self, what: str, seqs: Sequence[int], starts: Sequence[int]) -> None:
        """Raises `PositionError` for the first sequence that is not at the given start."""
        for seq, start in zip(seqs, starts, strict=True):
            expected = self._fresh(seq).next
            if _position(start) != expected:
                raise PositionError(
                    f"{what}: sequence {seq} is at position {expected}, start position {start} was given. To move on "
                    "purpose use truncate (back), skip_to (leave a hole) or reset (begin anew)."
                )

    def own(self, seqs: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Pages for ``lengths`` more rows of each sequence; returns the ranges ``[first, end)`` worth storing.

        Raises:
            CapacityError: pages ran out, or a layer still sees rows that no longer fit; nothing has changed.
        """
        wanted = []
        for seq, s, n in zip(seqs, self._distinct(seqs), lengths, strict=True):
            end = _position(s.next + n)
            self._check_fits(seq, s, end)
            wanted.append((s, max(s.next, end - self.ring), end))
        self._own(wanted)
        return [(first, end) for _, first, end in wanted]

    def disown(self, seqs: Sequence[int]) -> None:
        """Undo `own` after a failure: pages without valid rows go back."""
        for seq in seqs:
            self._trim(self._get(seq))

    def read_back(self, seq: int, first: int, end: int) -> tuple[int, Tensor, Tensor]:
        """Stored rows ``[first, end)``: (first, keys, values ``[L, n, nkv, hd]``). One missing: none, from ``end``."""
        s = self._fresh(seq)
        first = first if cut(s.spans, first, end) == [(first, end)] else end
        positions = torch.arange(first, end, device=self.device)
        rows = self.rows(self._slots(s, end - first), positions)
        return first, self.keys[:, rows], self.values[:, rows]

    def advance(
        self, seqs: Sequence[int], ranges: Sequence[tuple[int, int]], chains: Sequence[TokenChain | None]
    ) -> None:
        """Account for rows ``[first, end)`` just placed, and for the tokens up to there where they are known."""
        for seq, (first, end), chain in zip(seqs, ranges, chains, strict=True):
            s = self._get(seq)
            if end > first:
                s.spans = merge([*cut(s.spans, end - self.ring, end), (first, end)])
            s.next, s.chain = end, chain

    def advance_on_device(self, seqs: Sequence[int]) -> None:
        """The same with positions that only the device knows."""
        for seq in seqs:
            s = self._get(seq)
            s.stale, s.chain = True, None

    def chain(self, seq: int) -> TokenChain | None:
        """Its tokens from position 0 with their page hashes, where a prefix store can use them."""
        return self._get(seq).chain

    # -- inside ---------------------------------------------------------------------------------------------------

    def _get(self, seq: int) -> _Sequence:
        try:
            return self._sequences[seq]
        except (KeyError, TypeError):
            raise PositionError(
                f"sequence {seq!r} is not open in this KV: it was closed, or belongs to another. Use kv.open."
            ) from None

    def _distinct(self, seqs: Sequence[int]) -> list[_Sequence]:
        if len(set(seqs)) != len(seqs):
            raise PositionError(f"sequences {list(seqs)} name one twice. Give each sequence once in a call.")
        return [self._get(q) for q in seqs]

    def _fresh(self, seq: int) -> _Sequence:
        """The sequence with next and spans read back if the device has moved them."""
        s = self._get(seq)
        if s.stale:
            tags = self.tags.view(-1, self.page_size)[self.page_table[s.slot]].flatten()
            told = torch.cat((self.next[s.slot, None], tags)).cpu()  # one wait
            s.next, tags = int(told[0]), told[1:]
            there = (tags >= s.next - self.ring) & (tags < s.next) & (tags >= 0)
            there &= tags % self.ring == torch.arange(self.ring)
            s.spans, s.stale = runs(tags[there].sort().values.tolist()), False
        return s

    def _check_fits(self, seq: int, s: _Sequence, end: int) -> None:
        """A ring shorter than what the layers see (full attention, small max_tokens) must not lose visible rows."""
        first = s.spans[0][0] if s.spans else s.next
        if self.config.retention is not None:
            first = max(first, end - self.config.retention)
        if end - first > self.ring:
            raise CapacityError(
                f"sequence {seq} would span {end - first} visible positions up to {end} and this KV holds {self.ring} "
                "per sequence. Raise max_tokens."
            )

    def _begin_on_device(self, s: _Sequence) -> None:
        self.next[s.slot] = self.limit[s.slot] = s.next
        self.faults[s.slot] = 0

    def _slots(self, s: _Sequence, n: int) -> Tensor:
        return torch.full((n,), s.slot, dtype=torch.int64, device=self.device)

    def _own(self, wanted: Iterable[tuple[_Sequence, int, int]]) -> None:
        """Allocate what is missing for the ranges, for all of them or for none."""
        missing: dict[tuple[int, int], _Sequence] = {}
        for s, first, end in wanted:
            for place in sorted(self._places(first, end)):
                if place not in s.pages:
                    missing[s.slot, place] = s
        for (key, s), page in zip(missing.items(), self._allocate(list(missing)), strict=True):
            s.pages[key[1]] = page

    def _release(self, s: _Sequence, keep: set[int]) -> None:
        """Give back the sequence's pages at other places than those to keep."""
        self._give_back(s.slot, {place: s.pages.pop(place) for place in list(s.pages) if place not in keep})

    def _trim(self, s: _Sequence) -> None:
        """Give back pages that neither hold a valid row nor are reserved."""
        if s.stale:
            return
        keep = self._places(s.next, s.reserved)
        for first, end in s.spans:
            keep |= self._places(first, end)
        self._release(s, keep)

    def _forget(self, s: _Sequence, first: int, end: int) -> None:
        """Make rows ``[first, end)`` unreadable, so that they cannot match when the position is reached again."""
        dropped = cut(s.spans, first, end)
        if dropped:
            positions = upload(torch.cat([torch.arange(a, b) for a, b in dropped]), self.device)
            self.tags[self.rows(self._slots(s, len(positions)), positions)] = NOT_STORED
            s.spans = merge([*cut(s.spans, 0, first), *cut(s.spans, end, s.next)])

    def _restore(self, s: _Sequence) -> None:
        """Copy what the prefix store holds of the rows just before ``s.next``."""
        if self.store is None or s.chain is None or s.next == 0:
            return
        found = self.store.tail(s.chain, self.ring_pages)
        if not found:
            return
        first, end = max(found[0][0] * self.page_size, s.next - self.ring), (found[-1][0] + 1) * self.page_size
        end = min(end, s.next)
        self._own([(s, first, end)])
        pages = upload([index for _, index in found], self.device)
        inside = slice(first - found[0][0] * self.page_size, end - found[0][0] * self.page_size)
        positions = torch.arange(first, end, device=self.device)
        slots = self._slots(s, len(positions))
        self.write(slots, positions, self.store.keys[:, pages].flatten(1, 2)[:, inside],
                   self.store.values[:, pages].flatten(1, 2)[:, inside])  # fmt: skip
        s.spans = [(first, end)]


def _position(value: int) -> int:
    return whole_number("position", value)


def _token_list(token_ids: Sequence[int] | Tensor | None) -> list[int] | None:
    return None if token_ids is None else integer_ids("token_ids", token_ids).flatten().tolist()
