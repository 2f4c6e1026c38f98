"""Which requests hold a context in the drafter's KV, and where those contexts stand."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from dflash2.adapters.chunks import Chunk
from dflash2.errors import CapacityError
from dflash2.prefix_store import TokenChain
from dflash2.window_kv import WindowKV

__all__ = ["DraftCounters", "RequestContexts"]


@dataclass
class DraftCounters:
    """What happened since the start.

    Attributes:
        steps: calls of `RequestDrafter.step`.
        rounds: requests drafted for, summed over steps.
        proposed: drafts made.
        opened: contexts begun; ``restored`` of them with rows of the prefix store, ``holes`` of them not at position 0
            and without all rows that their window reaches.
        evicted: contexts given up for others.
        unknown: requests that went without drafts, summed over steps, since only the device knows where they are and
            they hold no context: there was no room when they began, or they lost it.
        failures: by kind of error, requests that went without drafts.
    """

    steps: int = 0
    rounds: int = 0
    proposed: int = 0
    opened: int = 0
    restored: int = 0
    holes: int = 0
    evicted: int = 0
    unknown: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class RequestContexts:
    """Sequences of one KV by an engine's request ids.

    Args:
        kv: the memory.
        max_tokens: longest sequence.
    """

    def __init__(self, kv: WindowKV, max_tokens: int):
        self.kv, self.max_tokens = kv, max_tokens
        self._open: OrderedDict[Hashable, int] = OrderedDict()  # least recently stepped first
        self._reserved: set[int] = set()  # sequences whose pages are there for positions that only the device knows

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._open))

    def __contains__(self, request: Hashable) -> bool:
        return request in self._open

    def __getitem__(self, request: Hashable) -> int:
        """The sequence of a request that has one."""
        return self._open[request]

    def forget(self, requests: Collection[Hashable]) -> None:
        """These ids are finished, aborted, or about to name something else. Unknown ones are fine."""
        for request in requests:
            if (seq := self._open.pop(request, None)) is not None:
                self._reserved.discard(seq)
                self.kv.close(seq)

    def finish(self, request: Hashable, tokens: Callable[[], Sequence[int]]) -> None:
        """The request is over. Rows that it got on the device go to the prefix store now: it may be continued.

        Args:
            request: its id.
            tokens: gives its ids from position 0, up to the first unknown one (negative). Only called where rows were
                not published as they came; then this waits for the device.
        """
        seq = self._open.get(request)
        if seq is not None and seq in self._reserved and self.kv.store is not None:
            self._publish(seq, tokens())
        self.forget([request])

    def retain(self, requests: Collection[Hashable]) -> None:
        """Forget all but these: for engines that do not tell of every end."""
        self.forget([r for r in self._open if r not in requests])

    def ready(self, chunk: Chunk) -> bool:
        """Whether the request's context stands, or can be put, where the chunk begins without losing rows."""
        seq = self._open.get(chunk.request)
        if seq is None:
            return False
        self._open.move_to_end(chunk.request)
        if chunk.moved:
            self._reserve(seq)
            return True
        first, end = self.kv.span(seq)
        if chunk.start == end:
            return True
        self._reserved.discard(seq)  # moving on purpose ends a reservation
        if chunk.start > end and self.kv.store is None:
            self.kv.skip_to(seq, chunk.start)
            return True
        if first <= chunk.start < end:
            self.kv.truncate(seq, chunk.start)
            if self.kv.store is None or not self._lacks_rows(seq):
                return True
        self.forget([chunk.request])
        return False

    def going_on(self, chunk: Chunk) -> int | None:
        """The sequence of a request that moved, has a context and drafts; else None."""
        seq = self._open.get(chunk.request)
        if seq is None or not chunk.moved or chunk.anchor is None:
            return None
        self._open.move_to_end(chunk.request)
        self._reserve(seq)
        return seq

    def _reserve(self, seq: int) -> None:
        """All pages that it may ever need: once per request, and nothing is left to do when it moves on."""
        if seq not in self._reserved:
            self.kv.reserve([seq], [self.max_tokens])
            self._reserved.add(seq)

    def _publish(self, seq: int, tokens: Sequence[int]) -> None:
        spans, size, store = self.kv.spans(seq), self.kv.page_size, self.kv.store
        if not spans or store is None:
            return
        first, end = spans[-1]
        chain = TokenChain(size)
        chain.extend(list(takewhile(lambda t: t >= 0, tokens[:end])))
        pages = range(-(-first // size), len(chain.digests))
        if not pages:
            return
        _, keys, values = self.kv.read_back(seq, pages.start * size, pages.stop * size)
        store.put(chain, pages.start, keys, values)

    def _lacks_rows(self, seq: int) -> bool:
        """Whether a window from the next position would reach rows that are not there."""
        first, end = self.kv.span(seq)
        retention = self.kv.config.retention
        return first > (0 if retention is None else max(0, end - retention))

    def begin(self, chunk: Chunk, counters: DraftCounters, busy: Collection[Hashable]) -> None:
        """A new context where the chunk begins, with what the prefix store has of the rows before.

        Args:
            chunk: of a request without a context.
            counters: notes what became of it.
            busy: requests that keep theirs. Those idle longest (preempted ones, say) give theirs up for new ones.

        Raises:
            CapacityError: all are busy.
        """
        start = chunk.start
        prefix = list(chunk.prefix()) if self.kv.store is not None and chunk.prefix is not None and start else None
        while True:
            try:
                seq = self._open[chunk.request] = self.kv.open(start, prefix)
                break
            except CapacityError:
                idle = next((r for r in self._open if r not in busy), None)
                if idle is None:
                    raise
                counters.evicted += 1
                self.forget([idle])
        counters.opened += 1
        counters.restored += self.kv.span(seq)[0] < start
        counters.holes += start > 0 and self._lacks_rows(seq)
