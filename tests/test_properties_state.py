"""P4: a recycled sequence is a new one, a failed call changes nothing, an exported state is the state."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check_row
from tiny import FULL, SLIDING, Toy, assert_same, poison, positions_there, snapshot, tiny_config

from dflash2.errors import CapacityError, ConfigError, PositionError
from dflash2.testing import cpu_as_device


def bits(prop) -> list:
    return [None if t is None else t.tolist() for t in (prop.tokens, prop.candidates, prop.valid)]


# -- recycled == new ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    layers=st.sampled_from([(SLIDING,), (SLIDING, FULL)]),
    first=st.tuples(st.sampled_from([0, 5]), st.integers(0, 60)),
    second=st.tuples(st.sampled_from([0, 5, 60]), st.integers(0, 30)),
    how=st.sampled_from(["reset", "close and open", "reset from the device form"]),
    page=st.sampled_from([1, 4, 16]),
)
def test_a_recycled_sequence_equals_a_new_one(layers, first, second, how, page):
    """Rows B27, B28, B30: request A, then B in its place; every sub-store starts clean."""
    toy = Toy(tiny_config(layer_types=layers))
    used, fresh = (toy.drafter.new_kv(1, 80, page) for _ in range(2))
    seq = used.open(first[0])
    toy.append(used, seq, first[0], sum(first), branch=1)
    if how == "close and open":
        used.close(seq)
        assert used.pages_in_use == 0
        seq = used.open(second[0])
    else:
        if how.endswith("form"):
            with cpu_as_device():
                used_up = torch.tensor([sum(first) + 1])
                toy.drafter.append(used, [seq], toy.taps(0, 1), used_up, torch.tensor([1]))
        used.reset(seq, second[0])
    assert used.pages_in_use == 0
    assert used.span(seq) == (second[0], second[0])
    assert used.spans(seq) == []
    assert used.faults.tolist() == [0]
    assert len(used.export_state(seq).positions) == 0
    new = fresh.open(second[0])
    end = sum(second)
    for kv, q in ((used, seq), (fresh, new)):
        toy.append(kv, q, second[0], end)
    a, b = snapshot(used), snapshot(fresh)
    for name in ("device_next", "limit", "faults", "pages_in_use", "chains"):
        left, right = a[name], b[name]
        if isinstance(left, dict):  # by handle, which differs
            left, right = list(left.values()), list(right.values())
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
    props = [toy.drafter.propose(kv, [q], [2], [end]) for kv, q in ((used, seq), (fresh, new))]
    assert bits(props[0]) == bits(props[1])


@pytest.mark.parametrize("layers", [(SLIDING,), (FULL,)])
def test_a_page_taken_over_shows_nothing_of_its_last_owner(layers):
    """The rows of the one before carry positions that the new sequence would look for. One page: it is reused."""
    toy = Toy(tiny_config(layer_types=layers, sliding_window=16))
    kv = toy.drafter.new_kv(2, 64, 8, num_pages=1)
    for n in range(1, 9):
        for start in range(8):
            old = kv.open()
            toy.append(kv, old, 0, n, branch=1)
            kv.close(old)
            new = kv.open(start)
            toy.append(kv, new, start, start + 1)
            prop = toy.drafter.propose(kv, [new], [2], [start + 1])
            draft = toy.oracle.draft(toy.context(start, start + 1), 2, start + 1, 3)
            check_row(prop, 0, toy.oracle, draft, 2)
            assert positions_there(kv, int(kv.slots([new])), start + 1) == [start]
            kv.close(new)


def test_handles_are_never_used_twice():
    """Row B04: conversation B cannot go on in A's place without saying so."""
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(1, 128)
    a = kv.open()
    toy.append(kv, a, 0, 20)
    with pytest.raises(PositionError, match=f"sequence {a} is at position 20, start position 68000 was given"):
        toy.append(kv, a, 68_000, 68_001)
    kv.close(a)
    b = kv.open(68_000)
    assert b != a
    for call in (
        lambda: toy.append(kv, a, 20, 21),
        lambda: toy.drafter.propose(kv, [a], [1], [20]),
        lambda: kv.span(a),
        lambda: kv.export_state(a),
        lambda: kv.reserve([a], [30]),
    ):
        before = snapshot(kv)
        with pytest.raises(PositionError, match=f"sequence {a} is not open"):
            call()
        assert_same(before, snapshot(kv))


# -- failed calls change nothing ---------------------------------------------------------------------------------------


class Fixture:
    """Two live sequences and a third that has wrapped its ring; a store; one page free."""

    def __init__(self, store: bool = True):
        self.toy = Toy(tiny_config())
        self.kv = self.toy.drafter.new_kv(4, 200, 4, prefix_store_bytes=1 << 15 if store else 0, num_pages=8)
        self.a, self.b, self.c = self.kv.open(), self.kv.open(3), self.kv.open()
        self.toy.append(self.kv, self.a, 0, 5, token_ids=[1, 2, 3, 4, 5])
        self.toy.append(self.kv, self.c, 0, 40)  # four pages
        self.toy.append(self.kv, self.b, 3, 4)
        poison(self.kv)
        assert self.kv.num_pages - self.kv.pages_in_use == 1

    def refused(self, error, match, call) -> None:
        before = snapshot(self.kv)
        with pytest.raises(error, match=match):
            call()
        assert_same(before, snapshot(self.kv))


def test_calls_that_do_not_fit_change_nothing():
    f = Fixture()
    toy, kv, append = f.toy, f.kv, f.toy.drafter.append
    taps = toy.taps(5, 25)
    f.refused(CapacityError, "2 pages are needed and 1 of 8 are free", lambda: append(kv, [f.a], taps, [5], [20]))
    f.refused(CapacityError, "pages are needed", lambda: append(kv, [f.b, f.a], taps, [4, 5], [10, 10]))
    f.refused(CapacityError, "pages are needed", lambda: kv.reserve([f.a, f.b], [16, 16]))
    f.refused(PositionError, "name one twice", lambda: append(kv, [f.a, f.a], taps[:2], [5, 5], [1, 1]))
    f.refused(PositionError, "name one twice", lambda: kv.reserve([f.a, f.a], [6, 6]))
    f.refused(
        PositionError, f"sequence {f.b} is at position 4", lambda: append(kv, [f.a, f.b], taps[:2], [5, 5], [1, 1])
    )
    f.refused(PositionError, "lengths has 1 entries", lambda: append(kv, [f.a, f.b], taps[:2], [5, 4], [2]))
    f.refused(PositionError, "lengths holds -1", lambda: append(kv, [f.a, f.b], taps[:2], [5, 4], [3, -1]))
    f.refused(ValueError, "taps hold 2 rows", lambda: append(kv, [f.a], taps[:2], [5], [3]))
    f.refused(ValueError, "taps hold 2 rows", lambda: append(kv, [f.a], taps[:2], [5], [2], [3]))
    f.refused(ValueError, "taps have shape", lambda: append(kv, [f.a], taps[:2, :-1], [5], [2]))
    f.refused(ValueError, "token_ids has 1 entries", lambda: append(kv, [f.a], taps[:2], [5], [2], token_ids=[1]))
    f.refused(ValueError, "expected integers", lambda: append(kv, [f.a], taps[:3], [5], [3], token_ids=[2**64] * 3))
    f.refused(PositionError, "got 2 token_ids", lambda: kv.open(3, [1, 2]))
    f.refused(PositionError, "only at 4", lambda: kv.truncate(f.b, 5))
    f.refused(PositionError, "already at 4", lambda: kv.skip_to(f.b, 3))
    f.refused(ConfigError, "num_draft_tokens=4", lambda: toy.drafter.propose(kv, [f.a], [1], [5], 4))
    f.refused(ValueError, "anchor_ids", lambda: toy.drafter.propose(kv, [f.a], [1, 2], [5]))
    f.refused(ValueError, "temperature", lambda: toy.drafter.propose(kv, [f.a], [1], [5], temperature=[1.0, 1.0]))
    kv.open()
    f.refused(CapacityError, "all 4 sequences are open", lambda: kv.open())


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), KeyboardInterrupt()])
def test_a_network_that_fails_in_the_middle_changes_nothing(monkeypatch, store, after, error):
    """Row B161: with several sequences and several chunks, some already projected and published."""
    f = Fixture(store)
    monkeypatch.setattr("dflash2.append.CHUNK_ROWS", 4)
    real, calls = torch.no_grad()(f.toy.drafter.context_rows), []

    def context_rows(taps, positions):
        if len(calls) == after:
            raise error
        calls.append(len(taps))
        return real(taps, positions)

    monkeypatch.setattr(f.toy.drafter, "context_rows", context_rows)
    taps = torch.cat((f.toy.taps(5, 12), f.toy.taps(40, 60)))

    def call():
        f.toy.drafter.append(f.kv, [f.a, f.c], taps, [5, 40], [7, 20], token_ids=[0] * 27)

    f.refused(type(error), None, call)
    monkeypatch.undo()
    if store:  # what was published before the failure is right: the same tokens may restore it
        f.kv.close(f.b)  # for its page
        restored = f.kv.export_state(f.kv.open(8, [1, 2, 3, 4, 5, 0, 0, 0]))
        keys, values = real(f.toy.taps(0, 8)[restored.positions], restored.positions)
        assert torch.equal(restored.keys, keys)
        assert torch.equal(restored.values, values)
        f.kv.close(f.kv.open_sequences[-1])
    call()  # and the same call works afterwards
    assert f.kv.spans(f.a) == [(0, 12)]
    assert f.kv.span(f.c)[1] == 60


def test_a_failure_in_the_device_form_changes_nothing(monkeypatch):
    f = Fixture()
    f.kv.reserve([f.a], [7])
    monkeypatch.setattr(f.toy.drafter, "context_rows", lambda *args: 1 / 0)
    with cpu_as_device():
        f.refused(
            ZeroDivisionError,
            None,
            lambda: f.toy.drafter.append(f.kv, [f.a], f.toy.taps(5, 6), torch.tensor([5]), torch.tensor([1])),
        )
        f.refused(
            PositionError,
            "name one twice",
            lambda: f.toy.drafter.append(
                f.kv, [f.a, f.a], f.toy.taps(5, 7), torch.tensor([5, 5]), torch.tensor([1, 1])
            ),
        )


# -- export and import -------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    layers=st.sampled_from([(SLIDING,), (SLIDING, FULL)]),
    pages=st.tuples(st.sampled_from([1, 3, 4, 16]), st.sampled_from([1, 3, 4, 16])),
    start=st.sampled_from([0, 11, 500]),
    pieces=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=4),
)
def test_export_and_import_give_the_same_sequence(layers, pages, start, pieces):
    """Row B146: into another pool with other pages; the bits are the same, wherever its ring reaches."""
    toy = Toy(tiny_config(layer_types=layers))
    here, there = (toy.drafter.new_kv(2, 96, p) for p in pages)
    there.open(7)
    poison(there)
    seq, at = here.open(start), start
    for hole, n in pieces:
        here.skip_to(seq, at + hole)
        toy.append(here, seq, at + hole, at + hole + n)
        at += hole + n
    state = here.export_state(seq)
    copy = there.import_state(state)
    again = there.export_state(copy)
    kept = state.positions >= at - there.ring
    assert again.next_position == state.next_position == at
    assert torch.equal(again.positions, state.positions[kept])
    assert torch.equal(again.keys, state.keys[:, kept])
    assert torch.equal(again.values, state.values[:, kept])
    props = [toy.drafter.propose(kv, [q], [2], [at]) for kv, q in ((here, seq), (there, copy))]
    assert bits(props[0]) == bits(props[1])
    for kv, q in ((here, seq), (there, copy)):
        toy.append(kv, q, at, at + 3)
    props = [toy.drafter.propose(kv, [q], [2], [at + 3]) for kv, q in ((here, seq), (there, copy))]
    assert bits(props[0]) == bits(props[1])


def test_an_exported_state_is_a_copy():
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(1, 64)
    seq = kv.open()
    toy.append(kv, seq, 0, 6)
    state = kv.export_state(seq)
    keys = state.keys.clone()
    kv.keys.fill_(7.0)
    assert torch.equal(state.keys, keys)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"next_position": 5}, "must ascend within"),
        ({"positions": torch.tensor([3, 4, 4])}, "must ascend within"),
        ({"positions": torch.tensor([5, 4, 3])}, "must ascend within"),
        ({"positions": torch.tensor([-1, 4, 5])}, "must ascend within"),
        ({"keys": torch.zeros(2, 2, 2, 8)}, "imported rows have shape"),
        ({"values": torch.zeros(1, 3, 2, 8)}, "imported rows have shape"),
        ({"tokens": [1, 2]}, "2 tokens"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(change, match):
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(2, 64)
    seq = kv.open(3)
    toy.append(kv, seq, 3, 6)
    state = dataclasses.replace(kv.export_state(seq), **change)
    before = snapshot(kv)
    with pytest.raises(ConfigError, match=match):
        kv.import_state(state)
    assert_same(before, snapshot(kv))


# -- what truncation loses ---------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 80), back=st.integers(0, 80), page=st.sampled_from([1, 4, 16]), more=st.integers(0, 10))
def test_truncation_beyond_the_slack_masks_what_was_overwritten(n, back, page, more):
    toy = Toy(tiny_config(sliding_window=13))
    kv = toy.drafter.new_kv(1, 1000, page)
    seq, end = kv.open(), max(0, n - back)
    toy.append(kv, seq, 0, n)
    kv.truncate(seq, end)
    first = min(max(0, n - kv.ring), end)
    assert kv.span(seq) == (first, end)
    toy.append(kv, seq, end, end + more, branch=1)
    context = toy.context(first, end) | toy.context(end, end + more, branch=1)
    prop = toy.drafter.propose(kv, [seq], [1], [end + more])
    check_row(prop, 0, toy.oracle, toy.oracle.draft(context, 1, end + more, 3), 1)
