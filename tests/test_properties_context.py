"""P1, P2, P6: context may begin anywhere, in any pieces, with holes; only positions that were appended are seen."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check_row
from tiny import FULL, SLIDING, Toy, assert_same, configs, poison, snapshot, tiny_config

from dflash2.errors import PositionError

NAN, INF = float("nan"), float("inf")


def proposal_bits(prop) -> tuple:
    return tuple(None if x is None else x.clone() for x in (prop.tokens, prop.candidates, prop.q, prop.valid))


def assert_bit_equal(a: tuple, b: tuple) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)


def check(toy: Toy, kv, seq: int, context: dict, anchor: int = 3, k: int | None = None) -> None:
    start = kv.span(seq)[1]
    k = toy.config.max_draft_tokens if k is None else k
    prop = toy.drafter.propose(kv, [seq], [anchor], [start], k)
    check_row(prop, 0, toy.oracle, toy.oracle.draft(context, anchor, start, k), anchor)


# -- P1: any start, holes, poisoned memory -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    config=configs(),
    page=st.sampled_from([1, 2, 3, 16, 64]),
    start=st.sampled_from([0, 1, 7, 512, 20_000, 250_000]),
    pieces=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=4),
    bad=st.sampled_from([NAN, INF, -INF, 1e30]),
)
def test_only_appended_positions_are_seen(config, page, start, pieces, bad):
    """Rows B01, B03, B07, B65: pieces of context with holes between, in memory full of rubbish."""
    toy = Toy(config, seed=2)
    kv = toy.drafter.new_kv(2, 128, page)
    poison(kv, bad)
    seq, at, context = kv.open(start), start, {}
    for hole, n in pieces:
        kv.skip_to(seq, at + hole)
        toy.append(kv, seq, at + hole, at + hole + n)
        context |= toy.context(at + hole, at + hole + n)
        at += hole + n
        poison(kv, bad)
    prop, hidden = toy.hidden(lambda: toy.drafter.propose(kv, [seq], [3], [at]))
    draft = toy.oracle.draft(context, 3, at, config.max_draft_tokens)
    assert bool(hidden.isfinite().all())
    torch.testing.assert_close(hidden[0].double(), draft.hidden, atol=1e-3, rtol=1e-3)
    check_row(prop, 0, toy.oracle, draft, 3)


@pytest.mark.parametrize("layers", [(SLIDING,), (SLIDING, FULL)])
def test_rubbish_in_memory_changes_no_bit(layers):
    toy, seen = Toy(tiny_config(layer_types=layers)), []
    for bad in (0.0, NAN, INF, -1e38):
        kv = toy.drafter.new_kv(3, 128, 4)
        poison(kv, bad)
        seq = kv.open(40)
        toy.append(kv, seq, 40, 61)
        poison(kv, bad)
        seen.append(proposal_bits(toy.drafter.propose(kv, [seq], [5], [61])))
    for other in seen[1:]:
        assert_bit_equal(seen[0], other)


def test_context_begins_at_the_first_append():
    """Rows B01, B03, B13: nothing before 20000 was ever written; the valid range says so."""
    toy = Toy(tiny_config(layer_types=(SLIDING, FULL), sliding_window=64))
    kv = toy.drafter.new_kv(1, 256)
    poison(kv)
    seq = kv.open(20_000)
    assert kv.span(seq) == (20_000, 20_000)
    toy.append(kv, seq, 20_000, 20_050)
    assert kv.span(seq) == (20_000, 20_050)
    check(toy, kv, seq, toy.context(20_000, 20_050))


def test_resumed_context_does_not_claim_what_was_evicted():
    """Row B02: the draft side alone was reset and refilled from 900."""
    toy = Toy(tiny_config(layer_types=(FULL,)))
    kv = toy.drafter.new_kv(1, 1024, 16)
    seq = kv.open()
    toy.append(kv, seq, 0, 1000)
    kv.reset(seq, 900)
    toy.append(kv, seq, 900, 1000, branch=1)
    assert kv.span(seq) == (900, 1000)
    check(toy, kv, seq, toy.context(900, 1000, branch=1))


def test_a_sequence_without_context_says_so():
    """Row B08: no silent drafts. Tokens are in range all the same."""
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(2, 128)
    empty, full = kv.open(50), kv.open(0)
    toy.append(kv, full, 0, 9)
    prop = toy.drafter.propose(kv, [empty, full], [1, 2], [50, 9])
    assert prop.valid.tolist() == [False, True]
    assert bool(((prop.tokens >= 0) & (prop.tokens < toy.config.vocab_size)).all())


def test_context_that_left_every_window_is_no_context():
    toy = Toy(tiny_config(sliding_window=8))
    kv = toy.drafter.new_kv(1, 128)
    seq = kv.open()
    toy.append(kv, seq, 0, 5)
    kv.skip_to(seq, 11)  # row 0 of the block sees back to position 4
    assert toy.drafter.propose(kv, [seq], [1], [11]).valid.tolist() == [True]
    kv.skip_to(seq, 12)
    assert toy.drafter.propose(kv, [seq], [1], [12]).valid.tolist() == [False]


# -- P2: any split gives the same bits ---------------------------------------------------------------------------------


def state_after(toy: Toy, taps: torch.Tensor, cuts: list[int], first: int, page: int) -> tuple:
    kv = toy.drafter.new_kv(1, first + len(taps) + 64, page)
    seq, cuts = kv.open(first), sorted({0, *cuts, len(taps)})
    for a, b in pairwise(cuts):
        toy.drafter.append(kv, [seq], taps[a:b], [first + a], [b - a])
    state = kv.export_state(seq)
    prop = toy.drafter.propose(kv, [seq], [1], [first + len(taps)])
    q = toy.drafter.propose(
        kv, [seq], [1], [first + len(taps)], temperature=0.7, generator=torch.Generator().manual_seed(1)
    )
    return state.positions, state.keys, state.values, *proposal_bits(prop), *proposal_bits(q)


def assert_splits_agree(toy: Toy, taps: torch.Tensor, splits: list[list[int]], first: int, page: int) -> None:
    states = [state_after(toy, taps, cuts, first, page) for cuts in splits]
    for other in states[1:]:
        assert_bit_equal(states[0], other)


@settings(max_examples=60, deadline=None)
@given(
    config=configs(),
    n=st.integers(1, 120),
    first=st.sampled_from([0, 3, 5000]),
    splits=st.lists(st.lists(st.integers(0, 120), max_size=8), min_size=1, max_size=3),
    page=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_split_gives_the_same_bits(config, n, first, splits, page, dtype):
    toy = Toy(config, seed=7, dtype=dtype)
    cuts = [[c for c in split if c < n] for split in splits]
    assert_splits_agree(toy, toy.taps(first, first + n), [[], list(range(n)), *cuts], first, page)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splits_of_a_long_prompt_at_a_real_width(dtype, threads):
    """Row B10: 5000 rows of width 576 in chunks of 1, 7, 64, W-1, W, W+1 rows and at once."""
    window, n = 48, 5000
    config = tiny_config(
        hidden_size=576, intermediate_size=64, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        layer_types=(SLIDING,), sliding_window=window, target_layer_ids=(0, 1, 2),
    )  # fmt: skip
    toy = Toy(config, dtype=dtype)
    taps = torch.randn(n, toy.tap_width, generator=torch.Generator().manual_seed(0)).to(dtype)
    chunks = (7, 64, 512, window - 1, window, window + 1, 4097)
    splits = [[], *(list(range(0, n, c)) for c in chunks), [*range(n - 70, n)], [1, n - 1]]
    if threads > 1:  # which wait for each other on a busy machine
        splits = [[], list(range(0, n, 512)), [1, n - window, n - 1]]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_splits_agree(toy, taps, splits, 0, 16)
    finally:
        torch.set_num_threads(before)


def test_a_missing_chunk_is_noticed():
    """Row B10."""
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(1, 128)
    seq = kv.open()
    toy.append(kv, seq, 0, 16)
    with pytest.raises(PositionError, match=f"sequence {seq} is at position 16, start position 32 was given"):
        toy.append(kv, seq, 32, 48)
    assert kv.span(seq) == (0, 16)


def test_rows_that_no_query_can_see_are_not_projected():
    """Row B12: the tail of a long prompt gives what the whole prompt gives."""
    toy = Toy(tiny_config(sliding_window=16))
    whole, tail = toy.drafter.new_kv(1, 5000, 4), toy.drafter.new_kv(1, 5000, 4)
    a, b = whole.open(), tail.open(1000 - whole.ring)
    rows, real = [], toy.drafter.context_rows
    toy.drafter.context_rows = lambda taps, positions: (rows.append(len(taps)), real(taps, positions))[1]
    toy.append(whole, a, 0, 1000)
    del toy.drafter.context_rows
    assert sum(rows) == whole.ring == 24
    toy.append(tail, b, 1000 - tail.ring, 1000)
    assert_bit_equal(
        proposal_bits(toy.drafter.propose(whole, [a], [1], [1000])),
        proposal_bits(toy.drafter.propose(tail, [b], [1], [1000])),
    )


def test_an_append_of_ten_windows_touches_only_its_own_pages():
    """Row B70: positions without a page are skipped, not written somewhere."""
    toy = Toy(tiny_config(sliding_window=8))
    kv = toy.drafter.new_kv(3, 1000, 4, num_pages=9)
    neighbour, seq = kv.open(3), kv.open()
    toy.append(kv, neighbour, 3, 9)
    before = kv.export_state(neighbour)
    poison(kv)
    toy.append(kv, seq, 0, 80)
    after = kv.export_state(neighbour)
    assert torch.equal(before.keys, after.keys)
    assert torch.equal(before.values, after.values)
    unwritten = kv.tags == -1
    assert bool(kv.keys[:, : kv.num_pages * 4][:, unwritten[: kv.num_pages * 4]].isnan().all())
    assert bool((kv.tags[kv.num_pages * 4 :] == -1).all())
    check(toy, kv, seq, toy.context(80 - kv.ring, 80))


# -- P6: positions are explicit ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(delta=st.integers(-12, 40).filter(bool), n=st.integers(0, 5))
def test_gaps_and_repeats_are_refused_and_change_nothing(delta, n):
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(2, 128, 4)
    seq = kv.open(2)
    toy.append(kv, seq, 2, 12)
    before = snapshot(kv)
    position = 12 + delta
    wanted = f"sequence {seq} is at position 12, start position {position}" if position >= 0 else "whole number"
    with pytest.raises(PositionError, match=wanted):
        toy.drafter.append(kv, [seq], toy.taps(0, n), [position], [n])
    with pytest.raises(PositionError, match=wanted):
        toy.drafter.propose(kv, [seq], [1], [position])
    assert_same(before, snapshot(kv))


@pytest.mark.parametrize("start", [-1, 1.5, True, None, "3", NAN, INF, 2**62])
def test_a_start_that_is_no_position_is_refused(start):
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(1, 128)
    seq = kv.open()
    for call in (
        lambda: kv.open(start),
        lambda: kv.truncate(seq, start),
        lambda: kv.skip_to(seq, start),
        lambda: kv.reset(seq, start),
        lambda: kv.reserve([seq], [start]),
        lambda: toy.drafter.append(kv, [seq], toy.taps(0, 1), [start], [1]),
        lambda: toy.drafter.propose(kv, [seq], [1], [start]),
    ):
        before = snapshot(kv)
        with pytest.raises(PositionError, match="whole number"):
            call()
        assert_same(before, snapshot(kv))


@pytest.mark.parametrize("start", [130_000, 1_000_000, 16_000_000])
def test_positions_beyond_max_position_embeddings_are_positions(start):
    toy = Toy(tiny_config(max_position_embeddings=1024))
    kv = toy.drafter.new_kv(1, 128)
    seq = kv.open(start)
    toy.append(kv, seq, start, start + 20)
    check(toy, kv, seq, toy.context(start, start + 20))


def test_a_block_may_reach_beyond_max_tokens():
    """Block rows are not stored, so the last block needs no room."""
    toy = Toy(tiny_config(layer_types=(FULL,), block_size=8))
    kv = toy.drafter.new_kv(1, 32, 8)
    seq = kv.open()
    toy.append(kv, seq, 0, 32)
    check(toy, kv, seq, toy.context(0, 32))


def test_positions_are_absolute_and_only_differences_matter():
    """Row B47: one convention. A shift of everything changes rounding, nothing else."""
    toy, hidden = Toy(tiny_config(sliding_window=64)), []
    for shift in (0, 64, 16_000):
        kv = toy.drafter.new_kv(1, 128)
        seq = kv.open(shift)
        toy.drafter.append(kv, [seq], toy.taps(0, 70), [shift], [70])
        hidden.append(toy.hidden(lambda: toy.drafter.propose(kv, [seq], [1], [shift + 70]))[1])  # noqa: B023
    torch.testing.assert_close(hidden[1], hidden[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(hidden[2], hidden[0], atol=2e-2, rtol=0)  # fp32 angles at 16000: 1e-3 rad
