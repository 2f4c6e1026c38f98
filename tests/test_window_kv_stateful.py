"""Any order of calls on many sequences, against a model that keeps every position's history in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import check_row
from tiny import FULL, SLIDING, Toy, assert_same, poison, positions_there, snapshot, tiny_config
from torch import Tensor

from dflash2.errors import CapacityError, PositionError
from dflash2.testing import cpu_as_device

LAYERS = {"sliding": (SLIDING,), "two sliding": (SLIDING, SLIDING), "mixed": (SLIDING, FULL), "full": (FULL,)}
V1, V2 = "DFlashDraftModel", "DFlash2DraftModel"


@cache
def toy_for(layers: str, window: int, is_causal: bool | None, architecture: str) -> Toy:
    config = tiny_config(
        layer_types=LAYERS[layers], sliding_window=window, is_causal=is_causal, architecture=architecture,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return Toy(config, seed=1)


@cache
def tap_of(history_hash: int, width: int) -> Tensor:
    """Taps of a position: they depend on every token up to there, as a causal target's do."""
    return torch.randn(width, generator=torch.Generator().manual_seed(history_hash % 2**63))


class History:
    """Token of every position before next, negative where nobody knows it, with a running hash."""

    def __init__(self, tokens: list[int]):
        self.tokens: list[int] = []
        self.hashes: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.hashes.append(hash((self.hashes[-1] if self.hashes else 0, token)))
            self.tokens.append(token)

    def __add__(self, tokens: list[int]) -> History:
        longer = History([])
        longer.tokens, longer.hashes = list(self.tokens), list(self.hashes)
        longer.extend(tokens)
        return longer

    def __getitem__(self, part: slice) -> History:
        shorter = History([])
        shorter.tokens, shorter.hashes = self.tokens[part], self.hashes[part]
        return shorter

    def __len__(self) -> int:
        return len(self.tokens)

    def taps(self, positions, width: int) -> Tensor:
        rows = [tap_of(self.hashes[p], width) for p in positions]
        return torch.stack(rows) if rows else torch.empty(0, width)


@dataclass
class Model:
    """What a sequence should be."""

    history: History
    rows: set[int] = field(default_factory=set)  # positions whose rows are valid
    reserved: int = 0
    limit: int = 0
    faults: int = 0
    chain: bool = False  # the KV knows all tokens from position 0
    synced: bool = True  # no device call since the host last looked

    @property
    def next(self) -> int:
        return len(self.history)

    def spans(self) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        for p in sorted(self.rows):
            if spans and spans[-1][1] == p:
                spans[-1] = (spans[-1][0], p + 1)
            else:
                spans.append((p, p + 1))
        return spans


class WindowKVMachine(RuleBasedStateMachine):
    unknown = 0

    @initialize(
        layers=st.sampled_from(list(LAYERS)),
        window=st.sampled_from([64, 33, 16, 7, 4, 3, 2, 1]),
        is_causal=st.sampled_from([None, False, True]),
        architecture=st.sampled_from([V2, V2, V1]),
        page=st.sampled_from([4, 1, 2, 3, 5, 8, 16, 64]),
        sequences=st.sampled_from([2, 3, 4, 1]),
        max_tokens=st.sampled_from([200, 1000, 70, 24, 5]),
        share=st.sampled_from([1.0, 1.0, 0.7, 0.4]),
        store_pages=st.sampled_from([1000, 0, 3]),
    )
    def create(self, layers, window, is_causal, architecture, page, sequences, max_tokens, share, store_pages):
        self.toy = toy_for(layers, window, is_causal, architecture)
        drafter, c = self.toy.drafter, self.toy.config
        whole = drafter.new_kv(sequences, max_tokens, page).num_pages
        page_bytes = 2 * c.num_hidden_layers * page * c.num_key_value_heads * c.head_dim * 4
        self.kv = drafter.new_kv(
            sequences, max_tokens, page, store_pages * page_bytes, num_pages=max(1, int(whole * share))
        )
        self.other = drafter.new_kv(2, max_tokens, 5)
        self.page, self.slides = page, FULL not in c.layer_types
        self.ring = self.kv.ring
        self.seqs: dict[int, Model] = {}
        self.published: set[tuple[int, ...]] = set()  # prefixes that end with a stored page
        self.evicts = store_pages < 1000
        self.store = store_pages > 0
        self.bytes = self.kv.nbytes
        if self.slides:
            assert self.kv.ring_pages <= -(-window // page) + 2
        poison(self.kv)

    # -- the model ------------------------------------------------------------------------------------------------

    def places(self, m: Model, rows=None) -> set[int]:
        """Places in the ring that a sequence's valid and reserved rows occupy."""
        held = set(m.rows if rows is None else rows)
        held |= set(range(m.next, min(m.reserved, m.next + self.ring + self.page)))
        return {(p // self.page) % self.kv.ring_pages for p in held}

    def free(self) -> int:
        return self.kv.num_pages - sum(len(self.places(m)) for m in self.seqs.values())

    def overfull(self, m: Model, end: int) -> bool:
        """Whether visible rows would no longer fit in the ring."""
        first = min(m.rows, default=m.next)
        if self.slides:
            first = max(first, end - (self.toy.config.sliding_window - 1))
        return end - first > self.ring

    def need(self, m: Model, first: int, end: int) -> int:
        wanted = range(max(first, end - self.ring), end)
        return len(self.places(m, m.rows | set(wanted))) - len(self.places(m))

    def advance(self, m: Model, history: History) -> None:
        first = m.next
        m.history = history
        m.rows = {p for p in m.rows | set(range(first, m.next)) if p >= m.next - self.ring}

    def unknown_tokens(self, n: int) -> list[int]:
        WindowKVMachine.unknown -= n
        return list(range(WindowKVMachine.unknown, WindowKVMachine.unknown + n))

    def refused(self, error, call) -> None:
        before = snapshot(self.kv)
        with pytest.raises(error):
            call()
        assert_same(before, snapshot(self.kv))
        self.look()

    def pick(self, data, count: int | None = None) -> list[int]:
        order = data.draw(st.permutations(sorted(self.seqs)))
        return order[: count if count is not None else data.draw(st.integers(1, len(order)))]

    # -- opening and closing --------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.seqs) < self.kv.max_sequences or self.kv.max_sequences < 3)
    @rule(start=st.sampled_from([0, 0, 0, 1, 5, 61, 20_000]))
    def open(self, start):
        if len(self.seqs) == self.kv.max_sequences:
            self.refused(CapacityError, lambda: self.kv.open(start))
            return
        seq = self.kv.open(start)
        assert seq not in self.seqs
        self.seqs[seq] = Model(History(self.unknown_tokens(start)), limit=start, chain=self.store and start == 0)
        assert self.kv.span(seq) == (start, start)

    @precondition(lambda self: len(self.seqs) < self.kv.max_sequences and self.published)
    @rule(data=st.data(), extra=st.lists(st.integers(0, 1), max_size=3))
    def open_with_tokens(self, data, extra):
        """A prefix that was published, or nearly."""
        base = list(data.draw(st.sampled_from(sorted(self.published, key=len, reverse=True))))
        keep = len(base) - data.draw(st.integers(0, min(len(base), self.page)))
        history = base[:keep] + extra
        start = len(history)
        m = Model(History(history), limit=start, chain=self.store)
        expected = self.restorable(history)
        if len(self.seqs) == self.kv.max_sequences:
            self.refused(CapacityError, lambda: self.kv.open(start, history))
            return
        if self.evicts and self.store:
            try:
                seq = self.kv.open(start, history)
            except CapacityError:
                assert len(self.places(m, expected)) > self.free()
                return
            m.rows = {p for a, b in self.kv.spans(seq) for p in range(a, b)}
            assert m.rows <= expected
        elif len(self.places(m, expected)) > self.free():
            self.refused(CapacityError, lambda: self.kv.open(start, history))
            return
        else:
            seq = self.kv.open(start, torch.tensor(history, dtype=torch.int64))
            m.rows = expected
        self.seqs[seq] = m
        self.look()

    def restorable(self, history: list[int]) -> set[int]:
        """Rows of the longest run of published pages up to the end, at most a ring of them."""
        last, part = divmod(len(history), self.page)
        rows: set[int] = set()
        starts = {p[: len(history)] for p in self.published if len(p) == (last + 1) * self.page}
        pages = 0
        if part and tuple(history) in starts:
            rows, pages = set(range(last * self.page, len(history))), 1
        for page in reversed(range(last)):
            if pages == self.kv.ring_pages or tuple(history[: (page + 1) * self.page]) not in self.published:
                break
            rows |= set(range(page * self.page, (page + 1) * self.page))
            pages += 1
        return {p for p in rows if p >= len(history) - self.ring} if self.store else set()

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), how=st.sampled_from(["close", "reset", "reset to 0"]), start=st.integers(0, 9))
    def begin_anew(self, data, how, start):
        (seq,) = self.pick(data, 1)
        if how == "close":
            self.kv.close(seq)
            del self.seqs[seq]
            self.refused(PositionError, lambda: self.kv.close(seq))
            self.refused(PositionError, lambda: self.toy.drafter.propose(self.kv, [seq], [0], [0]))
        else:
            start = 0 if how == "reset to 0" else start
            self.kv.reset(seq, start)
            self.seqs[seq] = Model(History(self.unknown_tokens(start)), limit=start, chain=self.store and start == 0)

    # -- rows in --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), with_tokens=st.booleans())
    def append(self, data, with_tokens):
        self.try_append(self.pick(data), data, with_tokens, "fine")

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def append_one_with_tokens(self, data):
        self.try_append(self.pick(data, 1), data, True, "fine")

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), with_tokens=st.booleans(), how=st.sampled_from(["wrong start", "fails"]))
    def append_in_vain(self, data, with_tokens, how):
        self.try_append(self.pick(data), data, with_tokens, how)

    def try_append(self, seqs, data, with_tokens, how):
        models = [self.seqs[q] for q in seqs]
        size = st.sampled_from([5, 1, 3, 8, 0, 17, 40, self.page, self.ring, self.ring + 3, 2 * self.ring + 1])
        counts = [data.draw(size) for _ in seqs]
        valid = [data.draw(st.just(n) | st.integers(0, n)) for n in counts]
        bits = [data.draw(st.integers(0, 3)) for n in counts]  # tokens are 0, but for the first two: shared prefixes
        new = [([b & 1, b >> 1] + [0] * n)[:n] for b, n in zip(bits, counts, strict=True)]
        starts = [m.next for m in models]
        taps = self.new_taps(models, new)
        tokens = [t for part in new for t in part] if with_tokens else None

        def call():
            self.toy.drafter.append(self.kv, seqs, taps, starts, counts, valid, tokens)

        if how == "wrong start":
            starts[-1] += 1
            self.refused(PositionError, call)
            return
        fits = not any(self.overfull(m, m.next + v) for m, v in zip(models, valid, strict=True))
        if not fits or sum(self.need(m, m.next, m.next + v) for m, v in zip(models, valid, strict=True)) > self.free():
            self.refused(CapacityError, call)
            return
        if how == "fails" and sum(valid):
            self.break_off(call)
            return
        call()
        for m, v, t in zip(models, valid, new, strict=True):
            first = m.next
            m.chain = m.chain and (with_tokens or not v)
            before = set(m.rows)
            self.advance(m, m.history + t[:v])
            m.synced = True
            if m.chain and v:
                self.publish(m, before, first)

    def new_taps(self, models: list[Model], new: list[list[int]]) -> Tensor:
        return torch.cat(
            [
                (m.history + t).taps(range(m.next, m.next + len(t)), self.toy.tap_width)
                for m, t in zip(models, new, strict=True)
            ]
        )

    def publish(self, m: Model, before: set[int], first: int) -> None:
        for end in range(self.page, m.next + 1, self.page):
            head = set(range(end - self.page, first))
            if end > first and head <= before:
                self.published.add(tuple(m.history.tokens[:end]))

    def break_off(self, call) -> None:
        """The network fails in the middle, after one good piece of work."""
        drafter, calls = self.toy.drafter, []
        real = drafter.context_rows

        def context_rows(*args):
            calls.append(args)
            if len(calls) > 1:
                raise RuntimeError("injected")
            real(*args)
            raise RuntimeError("injected")

        drafter.context_rows = context_rows
        try:
            self.refused(RuntimeError, call)
        finally:
            del drafter.context_rows

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), misfit=st.sampled_from([None, None, "start", "limit", "rows", "negative"]))
    def append_on_device(self, data, misfit):
        seqs = self.pick(data)
        models = [self.seqs[q] for q in seqs]
        room = [max(0, m.limit - m.next) for m in models]
        valid = [data.draw(st.integers(0, min(r, 40)) | st.just(r)) for r in room]
        counts = [v + data.draw(st.integers(0, 2)) for v in valid]
        starts = [m.next for m in models]
        bad: set[int] = set()
        if misfit == "start":
            starts[0] += data.draw(st.sampled_from([-1, 1, 10]))
            bad = {0}
        elif misfit == "limit":
            counts[0] += room[0] + 1
            valid[0] = room[0] + 1
            bad = {0}
        elif misfit == "negative":
            valid[0] = -1
            bad = {0}
        new = [[0] * n for n in counts]
        taps = self.new_taps(models, new)
        if misfit == "rows":
            taps = torch.cat((taps, torch.zeros(1, self.toy.tap_width)))
            bad = set(range(len(seqs)))
        with cpu_as_device():
            self.toy.drafter.append(
                self.kv, seqs, taps, torch.tensor(starts), torch.tensor(counts), torch.tensor(valid)
            )
        for i, (m, v, t) in enumerate(zip(models, valid, new, strict=True)):
            m.chain, m.synced = False, False
            if i in bad:
                m.faults += 1
            else:
                self.advance(m, m.history + t[:v])

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def reserve(self, data):
        seqs = self.pick(data)
        models = [self.seqs[q] for q in seqs]
        ahead = st.sampled_from([9, 3, 40, 0, -3, self.ring + 7])
        bounds = [max(0, m.next + data.draw(ahead)) for m in models]
        too_far = any(self.overfull(m, u) for m, u in zip(models, bounds, strict=True))
        need = 0
        for m, u in zip(models, bounds, strict=True):
            need += len(self.places(Model(m.history, m.rows, max(m.reserved, u)))) - len(self.places(m))
        if too_far or need > self.free():
            self.refused(CapacityError, lambda: self.kv.reserve(seqs, bounds))
            return
        self.kv.reserve(seqs, bounds)
        for m, u in zip(models, bounds, strict=True):
            m.reserved = max(m.reserved, u)
            m.limit = m.reserved

    # -- moving ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), back=st.sampled_from([1, 2, 0, -1, 4, 7, 30, 90]))
    def truncate(self, data, back):
        (seq,) = self.pick(data, 1)
        m = self.seqs[seq]
        position = max(0, m.next - back)  # -1: beyond the end
        if position > m.next:
            self.refused(PositionError, lambda: self.kv.truncate(seq, position))
            return
        self.kv.truncate(seq, position)
        m.history = m.history[:position]
        m.rows = {p for p in m.rows if p < position}
        m.reserved, m.limit, m.synced = 0, position, True

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), ahead=st.integers(1, 3))
    def leave_a_hole(self, data, ahead):
        (seq,) = self.pick(data, 1)
        self.skip(seq, ahead)
        self.try_append([seq], data, False, "fine")

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), ahead=st.sampled_from([1, 5, 0, -1, 40, 300]))
    def skip_to(self, data, ahead):
        (seq,) = self.pick(data, 1)
        self.skip(seq, ahead)

    def skip(self, seq, ahead):
        m = self.seqs[seq]
        position = m.next + ahead
        if position < 0:
            return
        if ahead < 0:
            self.refused(PositionError, lambda: self.kv.skip_to(seq, position))
            return
        if self.overfull(m, position):
            self.refused(CapacityError, lambda: self.kv.skip_to(seq, position))
            return
        self.kv.skip_to(seq, position)
        m.history = m.history + self.unknown_tokens(ahead)
        m.rows = {p for p in m.rows if p >= position - self.ring}
        m.chain, m.synced = m.chain and not ahead, True

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), through_other=st.booleans())
    def export_import(self, data, through_other):
        (seq,) = self.pick(data, 1)
        m = self.seqs[seq]
        before = snapshot(self.kv)
        state = self.kv.export_state(seq)
        assert_same(before, snapshot(self.kv))
        self.check_rows(m, state)
        rows = set(m.rows)
        if through_other:
            try:
                guest = self.other.import_state(state)
            except CapacityError:
                assert self.other.ring < self.ring
                return
            state = self.other.export_state(guest)
            rows = {p for p in rows if p >= m.next - self.other.ring}
            assert self.other.spans(guest) == Model(m.history, rows).spans()
            self.other.close(guest)
            assert self.other.pages_in_use == 0
        tokens_known = m.chain and not (through_other and m.next)  # the other KV has no store to keep them for
        copy = Model(m.history[:], rows, 0, m.next, chain=self.store and (tokens_known or m.next == 0))
        if len(self.seqs) == self.kv.max_sequences or len(self.places(copy)) > self.free():
            self.refused(CapacityError, lambda: self.kv.import_state(state))
            return
        self.seqs[self.kv.import_state(state)] = copy

    # -- looking --------------------------------------------------------------------------------------------------

    def check_rows(self, m: Model, state) -> None:
        """Stored rows are what the taps give, to the bit, whatever happened to them on the way."""
        assert state.next_position == m.next
        assert state.positions.tolist() == sorted(m.rows)
        assert (state.tokens is not None) == m.chain
        if m.chain:
            assert state.tokens == m.history.tokens
        if m.rows:
            taps = m.history.taps(sorted(m.rows), self.toy.tap_width)
            with torch.no_grad():
                keys, values = self.toy.drafter.context_rows(taps, state.positions)
            assert torch.equal(state.keys, keys)
            assert torch.equal(state.values, values)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), device=st.booleans(), bad=st.sampled_from([float("nan"), float("inf")]))
    def propose(self, data, device, bad):
        seqs = self.pick(data)
        models = [self.seqs[q] for q in seqs]
        k = data.draw(st.integers(1, self.toy.config.max_draft_tokens))
        anchors = [data.draw(st.integers(0, self.toy.config.vocab_size - 1)) for _ in seqs]
        starts = [m.next for m in models]
        poison(self.kv, bad)
        propose = self.toy.drafter.propose
        if device:
            with cpu_as_device():
                prop = propose(self.kv, seqs, anchors, torch.tensor(starts), k)
                late = propose(self.kv, seqs, anchors, torch.tensor(starts) + 1, k)
            assert not late.valid.any()
            assert bool(((late.tokens >= 0) & (late.tokens < self.toy.config.vocab_size)).all())
        else:
            prop = propose(self.kv, seqs, anchors, starts, k)
            starts[0] += 1
            self.refused(PositionError, lambda: propose(self.kv, seqs, anchors, starts, k))
        for r, (m, anchor) in enumerate(zip(models, anchors, strict=True)):
            context = {p: tap_of(m.history.hashes[p], self.toy.tap_width) for p in m.rows}
            check_row(prop, r, self.toy.oracle, self.toy.oracle.draft(context, anchor, m.next, k), anchor)

    @rule()
    def look(self) -> None:
        """Everything the host can ask, device positions read back."""
        for seq, m in self.seqs.items():
            assert self.kv.spans(seq) == m.spans()
            assert self.kv.span(seq) == (min(m.rows, default=m.next), m.next)
            m.synced = True

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "kv"):
            return
        kv = self.kv
        assert kv.nbytes == self.bytes
        assert kv.open_sequences == sorted(self.seqs)
        assert kv.pages_in_use == sum(len(self.places(m)) for m in self.seqs.values())
        assert kv.num_pages - kv.pages_in_use == len(set(kv._free_pages)) == len(kv._free_pages)
        slots = kv.slots(list(self.seqs)).tolist()
        owned = kv.page_table[kv.page_table >= 0].tolist()
        assert sorted(owned + kv._free_pages) == list(range(kv.num_pages))
        for slot, m in zip(slots, self.seqs.values(), strict=True):
            assert len(self.places(m)) <= kv.ring_pages
            assert {p for p, page in enumerate(kv.page_table[slot].tolist()) if page >= 0} == self.places(m)
            assert int(kv.next[slot]) == m.next
            assert int(kv.limit[slot]) == m.limit
            assert int(kv.faults[slot]) == m.faults
            assert positions_there(kv, slot, m.next) == sorted(m.rows)
        for seq, m in self.seqs.items():
            if m.synced:
                assert kv.spans(seq) == m.spans()
        assert bool((kv.tags[kv.num_pages * kv.page_size :] == -1).all())


WindowKVMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWindowKV = WindowKVMachine.TestCase
