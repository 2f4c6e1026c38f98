"""Drafts for an engine's requests, by request id: what the adapters of all engines share.

An engine tells in each step which rows of which requests it ran (`Chunk`) and gives the taps of those rows; it gets
drafts back. Everything else that happens to a request (a prefix served from cache, chunked prefill, rejected drafts,
preemption, resumption) shows in where its next rows begin, so one rule covers it: go back or forward to that position,
then append. Nothing here raises on account of one request: it goes without drafts, and is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from dflash2.adapters.chunks import Chunk, Drafts, Live
from dflash2.adapters.contexts import DraftCounters, RequestContexts
from dflash2.drafter import DFlash2Drafter
from dflash2.positions import LastUpload, upload
from dflash2.proposal import Proposal
from dflash2.window_kv import WindowKV

__all__ = ["DraftCounters", "RanksParted", "RequestDrafter"]

_log = logging.getLogger(__name__)

#: Failures of one kind that are logged; the rest is counted only.
LOGGED = 5
#: Each rehearsal has so many times fewer rows than the one before.
REHEARSED = 4


class RanksParted(SystemExit):
    """One process failed in a pass that all make together: the target would go on with different drafts in each.

    No error that an engine catches: the others wait in the pass, and it must see that this process is gone.
    """


@dataclass(frozen=True)
class _Placed:
    """A chunk, its place in the step, and its rows of the step's taps."""

    chunk: Chunk
    index: int
    first: int
    end: int


class RequestDrafter:
    """One drafter and its own KV, addressed by an engine's request ids.

    Args:
        drafter: bound to the engine's target.
        max_requests: requests that the engine runs at a time.
        max_tokens: longest sequence.
        num_draft_tokens: k, by default all the block has room for.
        page_size: rows per page.
        prefix_store_bytes: budget for rows of prefixes; without it a request whose prefix the engine took from its
            cache drafts from a context that begins there.
        agree: where several processes draft the same and ask one head together: gives what is true in all of them of
            what is true here. Called once a step, with as many values as there are chunks.

    Raises:
        CapacityError: the memory cannot be had.
        ConfigError: k is out of range.

    Attributes:
        kv: the memory; nothing of it is the engine's.
        contexts: which requests hold a part of it.
        counters: `DraftCounters`.
        lengths: uploads the numbers of a step's rows, which are mostly those of the step before.
        votes: calls of ``agree``.
    """

    def __init__(
        self,
        drafter: DFlash2Drafter,
        *,
        max_requests: int,
        max_tokens: int,
        num_draft_tokens: int | None = None,
        page_size: int = 16,
        prefix_store_bytes: int = 0,
        agree: Callable[[list[bool]], list[bool]] | None = None,
    ):
        self.drafter, self.agree, self.votes = drafter, agree, 0
        self.k = drafter.config.max_draft_tokens if num_draft_tokens is None else num_draft_tokens
        drafter.check_propose(self.k)
        self.kv: WindowKV = drafter.new_kv(max_requests, max_tokens, page_size, prefix_store_bytes)
        self.counters = DraftCounters()
        self._asked, self._valid = 0, torch.zeros(max_requests, dtype=torch.int64, device=drafter.device)
        self.lengths = LastUpload(drafter.device)
        self.contexts = RequestContexts(self.kv, max_tokens)

    @property
    def requests(self) -> list[Hashable]:
        """Requests that hold a context."""
        return list(self.contexts)

    @property
    def invalid(self) -> int:
        """Rounds in which a request could not draft (see `Proposal.valid`). Waits for the device."""
        return self._asked - int(self._valid.sum())

    def forget(self, requests: Collection[Hashable]) -> None:
        """These ids are finished, aborted, or about to name something else. Unknown ones are fine."""
        self.contexts.forget(requests)

    def finish(self, request: Hashable, tokens: Callable[[], Sequence[int]]) -> None:
        """The request is over, and may be continued by another: see `RequestContexts.finish`."""
        self.contexts.finish(request, tokens)

    def retain(self, requests: Collection[Hashable]) -> None:
        """Forget all but these: for engines that do not tell of every end."""
        self.contexts.retain(requests)

    def warm_up(self, taps: Tensor) -> None:
        """Run all that a step runs, so that kernels are compiled and the memory that they need is seen.

        Kernels are compiled for kinds of sizes: after the largest step come smaller ones, of many requests and of one.

        Args:
            taps: ``[rows, T*H]``, any values: the most rows that a step may have.
        """
        counters, self.counters = self.counters, DraftCounters()
        room, rows = self.kv.max_sequences - len(self.requests), len(taps)
        while room and rows:
            self._rehearse(taps[:rows], min(room, rows))
            self._rehearse(taps[:rows], 1)
            rows //= REHEARSED
        self.counters = counters

    def _rehearse(self, taps: Tensor, requests: int) -> None:
        """A step of requests that nobody has, with as many of the rows as they may have."""
        share = min(-(-len(taps) // requests), max(self.contexts.max_tokens - self.k - 1, 1))
        parts = [min(share, len(taps) - at) for at in range(0, len(taps), share)][:requests]
        nobodys = -1  # rows of such tokens are never looked up in the prefix store
        chunks = [Chunk(("warm up", i), 0, [nobodys] * n, n, n, 0) for i, n in enumerate(parts)]
        self.step(chunks, taps[: sum(parts)])
        self.forget([c.request for c in chunks])

    def step(
        self,
        chunks: Sequence[Chunk],
        taps: Tensor,
        generator: torch.Generator | None = None,
        live: Live | None = None,
    ) -> Drafts:
        """Take what the target ran, then draft for every chunk that has an anchor.

        All rows of the step are stored before any draft is made, and a context that begins at a prefix is opened after
        the rows before it: a request may share a prefix that another one wrote in this same step.

        Args:
            chunks: one per request.
            taps: ``[sum(rows), T*H]``, chunk after chunk.
            generator: noise for sampled drafts.
            live: where the requests are, when some have `Chunk.moved`; then nothing here waits for the device, except
                for requests that begin.

        Returns:
            `Drafts`. A request that fails on the way has none, and its context is dropped.

        Raises:
            RanksParted: with ``agree``, where a pass failed in this process and perhaps in no other.
        """
        self.counters.steps += 1
        if live is not None and (drafts := self._round(chunks, taps, generator, live)) is not None:
            return drafts
        ends = accumulate(c.rows for c in chunks)
        placed = [_Placed(c, i, end - c.rows, end) for i, (c, end) in enumerate(zip(chunks, ends, strict=True))]
        busy = {c.request for c in chunks}
        stays: list[_Placed] = []
        begins: list[_Placed] = []

        def place(some: list[_Placed]) -> None:
            for p in some:
                (stays if self.contexts.ready(p.chunk) else begins).append(p)

        def begin(some: list[_Placed]) -> None:
            for p in some:
                self.contexts.begin(p.chunk, self.counters, busy)

        for p in placed:
            if p.chunk.moved and p.chunk.request not in self.contexts:
                self.counters.unknown += 1
            else:
                self._each("place", [p], place)
        moved = [p for p in stays if p.chunk.moved]
        done = self._each("append", [p for p in stays if not p.chunk.moved], lambda some: self._append(some, taps))
        if live is not None:
            done += self._each("append", moved, lambda some: self._append_live(some, taps, live))
        begins.sort(key=lambda p: p.chunk.start)
        for _, same in groupby(begins, key=lambda p: p.chunk.start):
            opened = [p for p in same if self._each("open", [p], begin)]
            done += self._each("append", opened, lambda some: self._append(some, taps))
        there = self._everywhere(placed, {p.index for p in done})
        drafting = [p for p in placed if p.index in there and p.chunk.anchor is not None]
        return self._draft(len(placed), drafting, generator, live)

    def vote(self, here: list[bool]) -> list[bool]:
        """Which requests of a step can draft in all processes. An engine whose step fails before `step` could say it
        says so here, for all of its requests: the others wait for it.

        Args:
            here: for each request, whether it can in this process.
        """
        self.votes += 1
        return here if self.agree is None else self.agree(here)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _round(
        self, chunks: Sequence[Chunk], taps: Tensor, generator: torch.Generator | None, live: Live
    ) -> Drafts | None:
        """The usual step: all requests go on, and one launch takes their rows and drafts. None where that cannot be."""
        if self.agree is not None or not all(c.moved for c in chunks):
            return None
        rows = [c.rows for c in chunks]
        try:
            seqs = [self.contexts.going_on(c) for c in chunks]
            if None in seqs:
                return None
            proposal = self.drafter.append_and_propose(
                self.kv, cast(list[int], seqs), taps[: sum(rows)], live.starts, self.lengths(rows), live.valid,
                live.anchors, self.k, 0.0 if live.temperature is None else live.temperature, generator,
            )  # fmt: skip
        except Exception:  # noqa: BLE001  as in `_each`: one by one it is seen whose it is
            return None
        if proposal is None:
            return None
        self._count([proposal])
        return Drafts.whole(proposal)

    def _everywhere(self, placed: list[_Placed], here: set[int]) -> set[int]:
        """Places of requests that can draft in all processes. Those that can only here lose their context as well."""
        agreed = self.vote([p.index in here for p in placed])
        for p in placed:
            if p.index in here and not agreed[p.index]:
                self._give_up(p.chunk, "agree", RuntimeError("another rank could not follow it"))
        return {p.index for p in placed if agreed[p.index]}

    def _append(self, some: list[_Placed], taps: Tensor) -> None:
        rows, chunks = _rows(some, taps), [p.chunk for p in some]
        tokens = None
        if self.kv.store is not None:
            tokens = [t for c in chunks for t in c.tokens]
        self.drafter.append(
            self.kv,
            [self.contexts[c.request] for c in chunks],
            rows,
            [c.start for c in chunks],
            [c.rows for c in chunks],
            [c.valid for c in chunks],
            tokens,
        )

    def _append_live(self, some: list[_Placed], taps: Tensor, live: Live) -> None:
        seqs, lengths = [self.contexts[p.chunk.request] for p in some], self.lengths([p.chunk.rows for p in some])
        pick = _picker([p.index for p in some], live.starts)
        self.drafter.append(self.kv, seqs, _rows(some, taps), pick(live.starts), lengths, pick(live.valid))

    def _draft(
        self, count: int, drafting: list[_Placed], generator: torch.Generator | None, live: Live | None
    ) -> Drafts:
        parts: list[tuple[list[int], Proposal]] = []
        sampled = any(p.chunk.temperature > 0 for p in drafting)

        def propose(some: list[_Placed]) -> None:
            chunks, indices = [p.chunk for p in some], [p.index for p in some]
            seqs = [self.contexts[c.request] for c in chunks]
            anchors: Any = [c.anchor for c in chunks]
            starts: Any = [c.start + c.valid for c in chunks]
            temperature: Any = [c.temperature for c in chunks] if sampled else 0.0
            if live is not None:
                pick = _picker(indices, live.starts)
                anchors, starts = pick(live.anchors), pick(live.starts) + pick(live.valid)
                temperature = 0.0 if live.temperature is None else pick(live.temperature)
            try:
                proposal = self.drafter.propose(
                    self.kv, seqs, anchors, starts, self.k, temperature=temperature, generator=generator
                )
            except ValueError:
                raise  # found before anything runs, so in all processes
            except Exception as e:
                if self.agree is None:
                    raise
                _log.critical("drafting failed on this rank and perhaps on no other: this process ends", exc_info=e)
                raise RanksParted(f"drafting failed on this rank: {type(e).__name__}: {e}") from e
            parts.append((indices, proposal))

        self._each("propose", drafting, propose)
        self._count([proposal for _, proposal in parts])
        return Drafts.joined(count, self.k, self.drafter.config, self.kv.device, parts)

    def _count(self, proposals: Sequence[Proposal]) -> None:
        for p in proposals:
            requests = len(p.valid)
            self.counters.rounds += requests
            self.counters.proposed += requests * self.k
            self._asked += requests
            self._valid[:requests] += p.valid

    def _each(self, what: str, items: list[_Placed], call: Callable[[list[_Placed]], None]) -> list[_Placed]:
        """``call(items)``; if that fails, one by one: what is wrong with one request costs its own drafts only."""
        if not items:
            return []
        try:
            call(items)
        except Exception as e:  # noqa: BLE001  whatever it is, an engine does not end because nothing could be drafted
            if len(items) == 1:
                self._give_up(items[0].chunk, what, e)
                return []
            return [good for item in items for good in self._each(what, [item], call)]
        return items

    def _give_up(self, chunk: Chunk, what: str, error: Exception) -> None:
        self.forget([chunk.request])
        kind = type(error).__name__
        self.counters.failures[kind] += 1
        if self.counters.failures[kind] <= LOGGED:
            where = "the device's position" if chunk.moved else chunk.start
            _log.warning("no drafts for request %s, %s at %s: %s: %s", chunk.request, what, where, kind, error)


def _rows(some: list[_Placed], taps: Tensor) -> Tensor:
    """Their taps; in the usual step, of all requests in their order, without a copy."""
    if all(a.end == b.first for a, b in pairwise(some)):
        return taps[some[0].first : some[-1].end]
    return torch.cat([taps[p.first : p.end] for p in some])


def _picker(some: list[int], like: Tensor) -> Callable[[Tensor], Tensor]:
    """Takes the entries of some requests; of all of them without a copy."""
    if some == list(range(len(like))):
        return lambda t: t
    index = upload(some, like.device)
    return lambda t: t[index]
