"""The prefix store: what was published is restored to the bit, what was not is a hole, live sequences always win."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check_row
from tiny import FULL, SLIDING, Toy, assert_same, poison, snapshot, tiny_config

from dflash2.errors import CapacityError, PositionError
from dflash2.prefix_store import PrefixStore, TokenChain


def page_bytes(toy: Toy, page: int) -> int:
    c = toy.config
    return 2 * c.num_hidden_layers * page * c.num_key_value_heads * c.head_dim * 4


def kv_with_store(toy: Toy, page: int, pages: int = 1000, sequences: int = 4, max_tokens: int = 256, **kw):
    return toy.drafter.new_kv(sequences, max_tokens, page, pages * page_bytes(toy, page), **kw)


def assert_restored(toy: Toy, kv, seq: int, first: int, end: int, branch: int = 0) -> None:
    state = kv.export_state(seq)
    assert state.positions.tolist() == list(range(first, end))
    if end > first:
        with torch.no_grad():
            keys, values = toy.drafter.context_rows(toy.taps(first, end, branch), torch.arange(first, end))
        assert torch.equal(state.keys, keys)
        assert torch.equal(state.values, values)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.sampled_from([(SLIDING,), (SLIDING, FULL)]),
    window=st.sampled_from([3, 8, 20]),
    page=st.sampled_from([1, 3, 4, 16]),
    n=st.integers(1, 90),
    cuts=st.lists(st.integers(1, 89), max_size=4),
    back=st.integers(0, 40),
    live=st.booleans(),
)
def test_a_prefix_that_was_published_is_restored(layers, window, page, n, cuts, back, live):
    """Row B13, B21, B22: at any length, page boundary or not, from a live sequence or one that has left."""
    toy = Toy(tiny_config(layer_types=layers, sliding_window=window))
    kv, tokens = kv_with_store(toy, page), [p * 3 % 31 for p in range(n)]
    poison(kv)
    first, at = kv.open(), 0
    for end in sorted({c for c in cuts if c < n} | {n}):
        toy.append(kv, first, at, end, token_ids=tokens[at:end])
        at = end
    if not live:
        kv.close(first)
    poison(kv)
    start = max(0, n - back)
    seq = kv.open(start, tokens[:start])
    whole = n // page * page
    end = start if start <= whole else whole
    pages = -(-end // page)
    lowest = max(0, start - kv.ring, (pages - kv.ring_pages) * page)
    assert_restored(toy, kv, seq, min(lowest, end), end)
    prop = toy.drafter.propose(kv, [seq], [2], [start])
    check_row(prop, 0, toy.oracle, toy.oracle.draft(toy.context(min(lowest, end), end), 2, start, 3), 2)


def test_a_restored_sequence_goes_on_and_publishes_on():
    toy = Toy(tiny_config())
    kv, tokens = kv_with_store(toy, 4), list(range(30))
    a = kv.open()
    toy.append(kv, a, 0, 13, token_ids=tokens[:13])
    b = kv.open(10, tokens[:10])
    toy.append(kv, b, 10, 24, token_ids=tokens[10:24])
    c = kv.open(24, tokens[:24])
    assert_restored(toy, kv, c, 24 - kv.ring, 24)
    prop = toy.drafter.propose(kv, [b, c], [1, 1], [24, 24])
    assert prop.tokens[0].tolist() == prop.tokens[1].tolist()


@pytest.mark.parametrize(
    "other",
    [[9, *range(1, 12)], [*range(11), 9], [*range(5), 9, *range(6, 12)], list(range(1, 13)), [0] * 12],
)
def test_other_tokens_are_another_prefix(other):
    """A page is found under all tokens up to it, not under its own."""
    toy = Toy(tiny_config())
    kv = kv_with_store(toy, 4)
    a = kv.open()
    toy.append(kv, a, 0, 16, token_ids=list(range(16)))
    seq = kv.open(12, other)
    same = next(i for i, (x, y) in enumerate(zip(other, range(12), strict=True)) if x != y) // 4 * 4
    assert kv.spans(seq) == []
    assert same < 12


def test_what_is_not_stored_is_a_hole():
    """Row B07: the last tokens fill no stored page; the pages before them are there."""
    toy = Toy(tiny_config(sliding_window=16))
    kv = kv_with_store(toy, 4)
    a = kv.open()
    toy.append(kv, a, 0, 8, token_ids=list(range(8)))
    seq = kv.open(11, list(range(11)))
    assert kv.spans(seq) == [(0, 8)]
    assert_restored(toy, kv, seq, 0, 8)
    prop = toy.drafter.propose(kv, [seq], [1], [11])
    check_row(prop, 0, toy.oracle, toy.oracle.draft(toy.context(0, 8), 1, 11, 3), 1)


def test_only_known_tokens_are_published():
    toy = Toy(tiny_config())
    kv = kv_with_store(toy, 4)
    unknown = kv.open(4)  # nobody knows what came before
    toy.append(kv, unknown, 4, 12, token_ids=list(range(4, 12)))
    skipped = kv.open()
    kv.skip_to(skipped, 4)
    toy.append(kv, skipped, 4, 12, token_ids=list(range(4, 12)))
    silent = kv.open()
    toy.append(kv, silent, 0, 4)
    toy.append(kv, silent, 4, 12, token_ids=list(range(4, 12)))
    assert len(kv.store) == 0
    kv.reset(silent, 0)
    toy.append(kv, silent, 0, 8, token_ids=list(range(8)))
    assert len(kv.store) == 2


def test_rejected_rows_are_not_published():
    toy = Toy(tiny_config())
    kv = kv_with_store(toy, 4)
    seq = kv.open()
    taps = torch.cat((toy.taps(0, 6), torch.full((4, toy.tap_width), float("nan"))))
    toy.drafter.append(kv, [seq], taps, [0], [10], [6], list(range(10)))
    assert len(kv.store) == 1
    toy.append(kv, seq, 6, 9, branch=1, token_ids=[20, 21, 22])
    assert len(kv.store) == 2
    copy = kv.open(8, [0, 1, 2, 3, 4, 5, 20, 21])
    assert_same_rows(kv, copy, seq, 8)
    assert kv.spans(kv.open(8, list(range(8)))) == []  # positions 6 and 7 were another branch


def assert_same_rows(kv, a: int, b: int, end: int) -> None:
    x, y = kv.export_state(a), kv.export_state(b)
    assert x.positions.tolist() == y.positions.tolist()[:end]
    assert torch.equal(x.keys, y.keys[:, :end])
    assert torch.equal(x.values, y.values[:, :end])


def test_a_branch_after_truncation_is_published_as_itself():
    toy = Toy(tiny_config(sliding_window=16))
    kv = kv_with_store(toy, 4)
    seq = kv.open()
    toy.append(kv, seq, 0, 12, token_ids=list(range(12)))
    kv.truncate(seq, 6)
    toy.append(kv, seq, 6, 12, branch=1, token_ids=[20] * 6)
    old, new = kv.open(12, list(range(12))), kv.open(12, [*range(6), *[20] * 6])
    assert_restored(toy, kv, old, 0, 12)
    context = toy.context(0, 6) | toy.context(6, 12, branch=1)
    prop = toy.drafter.propose(kv, [new], [1], [12])
    check_row(prop, 0, toy.oracle, toy.oracle.draft(context, 1, 12, 3), 1)


def test_the_least_recently_used_page_goes_first():
    toy = Toy(tiny_config(sliding_window=16))
    kv = kv_with_store(toy, 4, pages=4)
    prefixes = [[b] * 8 for b in range(3)]
    for branch in (0, 1):
        seq = kv.open()
        toy.append(kv, seq, 0, 8, branch, token_ids=prefixes[branch])
        kv.close(seq)
    kv.close(kv.open(8, prefixes[0]))  # used again, so the other one is older
    seq = kv.open()
    toy.append(kv, seq, 0, 8, 2, token_ids=prefixes[2])
    assert len(kv.store) == 4
    for branch, there in ((0, True), (1, False), (2, True)):
        again = kv.open(8, prefixes[branch])
        assert_restored(toy, kv, again, 0, 8 if there else 0, branch)
        kv.close(again)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), pages=st.integers(0, 5))
def test_a_full_store_restores_nothing_wrong(data, pages):
    """Eviction in any order: what comes back is a run of right rows that ends where it must."""
    toy = Toy(tiny_config(sliding_window=16))
    kv = kv_with_store(toy, 4, pages=pages, sequences=2)
    for _ in range(12):
        branch = data.draw(st.integers(0, 3))
        n = data.draw(st.integers(0, 20))
        seq = kv.open(n, [branch] * n)
        spans = kv.spans(seq)
        assert len(spans) <= 1
        for first, end in spans:
            assert_restored(toy, kv, seq, first, end, branch)
            assert end in (n, n // 4 * 4)
        more = data.draw(st.integers(0, 8))
        toy.append(kv, seq, n, n + more, branch, token_ids=[branch] * more)
        if kv.store is not None:
            assert len(kv.store) <= pages
        kv.close(seq)


def test_stored_rows_are_copies():
    """Row B33: what a sequence does later leaves the published pages as they are."""
    toy = Toy(tiny_config())
    kv = kv_with_store(toy, 4)
    seq = kv.open()
    toy.append(kv, seq, 0, 12, token_ids=list(range(12)))
    before = kv.store.keys.clone()
    index = [p.index for p in kv.store._pages.values()]
    toy.append(kv, seq, 12, 80)
    kv.keys.fill_(5.0)
    assert torch.equal(kv.store.keys[:, index], before[:, index])


def test_a_budget_of_nothing_is_no_store_and_no_work():
    toy = Toy(tiny_config())
    kv, rows, real = toy.drafter.new_kv(1, 4096, 4), [], toy.drafter.context_rows
    assert kv.store is None
    toy.drafter.context_rows = lambda taps, positions: (rows.append(len(taps)), real(taps, positions))[1]
    seq = kv.open()
    toy.append(kv, seq, 0, 500, token_ids=[0] * 500)
    assert sum(rows) == kv.ring
    assert kv.chain(seq) is None
    assert kv.spans(kv.open_sequences[0]) == [(500 - kv.ring, 500)]


def test_with_a_store_every_row_is_projected_and_published():
    toy = Toy(tiny_config())
    kv, rows, real = kv_with_store(toy, 4), [], toy.drafter.context_rows
    toy.drafter.context_rows = lambda taps, positions: (rows.append(len(taps)), real(taps, positions))[1]
    seq = kv.open()
    toy.append(kv, seq, 0, 201, token_ids=[0] * 201)
    assert sum(rows) == 201
    assert len(kv.store) == 50
    early = kv.open(40, [0] * 40)
    assert kv.span(early) == (40 - kv.ring, 40)


def test_restoring_needs_pages_or_changes_nothing():
    toy = Toy(tiny_config())
    kv = kv_with_store(toy, 4, num_pages=4)
    seq = kv.open()
    toy.append(kv, seq, 0, 12, token_ids=list(range(12)))
    before = snapshot(kv)
    with pytest.raises(CapacityError, match="3 pages are needed and 1 of 4 are free"):
        kv.open(12, list(range(12)))
    assert_same(before, snapshot(kv))
    kv.open(12)  # without its rows there is room


def test_token_ids_must_be_those_before_the_start():
    kv = Toy(tiny_config()).drafter.new_kv(1, 64)
    for ids in ([1, 2], [1, 2, 3, 4]):
        with pytest.raises(PositionError, match=rf"open\(start_position=3\) got {len(ids)} token_ids"):
            kv.open(3, ids)


def test_more_pages_than_the_store_has_leave_the_last_ones():
    """And a page that is known already stays where it is."""
    page_bytes = 2 * 1 * 4 * 1 * 2 * 4
    store = PrefixStore(3 * page_bytes, 4, (1, 1, 2), device="cpu", dtype=torch.float32)
    chain = TokenChain(4)
    chain.extend(range(20))
    keys = torch.arange(40.0).view(1, 20, 1, 2)
    store.put(chain, 2, keys[:, 8:12], -keys[:, 8:12])
    at = store._pages[chain.digests[2]].index
    store.put(chain, 0, keys, -keys)
    assert [d in store for d in chain.digests] == [False, False, True, True, True]
    found = store.tail(chain, 9)
    assert [page for page, _ in found] == [2, 3, 4]
    assert found[0][1] == at
    kept = store.keys[:, [index for _, index in found]].flatten(1, 2)
    assert torch.equal(kept, keys[:, 8:])
    assert torch.equal(store.values[:, [index for _, index in found]].flatten(1, 2), -keys[:, 8:])
