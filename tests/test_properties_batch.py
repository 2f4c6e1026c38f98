"""P3: what one request gets does not depend on who else is in the batch. Nobody writes into a neighbour's rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check_row
from tiny import FULL, SLIDING, Toy, assert_same, configs, poison, snapshot, tiny_config

from dflash2.testing import cpu_as_device


@settings(max_examples=50, deadline=None)
@given(
    config=configs(),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    starts=st.lists(st.sampled_from([0, 3, 700]), min_size=5, max_size=5),
    order=st.randoms(use_true_random=False),
    page=st.sampled_from([1, 4, 16]),
)
def test_rows_together_equal_each_row_alone(config, lengths, starts, order, page):
    """Rows B09, B38: ragged contexts, sequences without any, every order; one append for all or one each."""
    toy = Toy(config, seed=5)
    kv, alone = (toy.drafter.new_kv(len(lengths), 64, page) for _ in range(2))
    poison(kv)
    starts = starts[: len(lengths)]
    seqs, solo = [kv.open(s) for s in starts], [alone.open(s) for s in starts]
    ends = [s + n for s, n in zip(starts, lengths, strict=True)]
    taps = [toy.taps(s, e, branch=i) for i, (s, e) in enumerate(zip(starts, ends, strict=True))]
    shuffled = list(range(len(seqs)))
    order.shuffle(shuffled)
    toy.drafter.append(
        kv, [seqs[i] for i in shuffled], torch.cat([taps[i] for i in shuffled]), [starts[i] for i in shuffled],
        [lengths[i] for i in shuffled],
    )  # fmt: skip
    for i, seq in enumerate(solo):
        toy.drafter.append(alone, [seq], taps[i], [starts[i]], [lengths[i]])
    order.shuffle(shuffled)
    prop, together = toy.hidden(
        lambda: toy.drafter.propose(kv, [seqs[i] for i in shuffled], shuffled, [ends[i] for i in shuffled])
    )
    for r, i in enumerate(shuffled):
        a, b = kv.export_state(seqs[i]), alone.export_state(solo[i])
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
        _, single = toy.hidden(lambda i=i: toy.drafter.propose(alone, [solo[i]], [i], [ends[i]]))
        torch.testing.assert_close(together[r], single[0], atol=2e-5, rtol=1e-5)
        context = dict(zip(range(starts[i], ends[i]), taps[i], strict=True))
        check_row(prop, r, toy.oracle, toy.oracle.draft(context, i, ends[i], config.max_draft_tokens), i)


def test_rows_leave_and_join_between_rounds():
    """Row B40: 6 requests shrink to 1 and grow again; finished ones are gone."""
    toy = Toy(tiny_config(layer_types=(SLIDING, FULL)))
    kv = toy.drafter.new_kv(6, 128, 4)
    live: dict[int, tuple[int, int]] = {}  # handle -> (branch, length)
    for branch, size in enumerate((6, 5, 3, 1, 1, 4, 6, 2)):
        while len(live) > size:
            gone = min(live)
            kv.close(gone)
            del live[gone]
        while len(live) < size:
            live[kv.open()] = (branch * 10 + len(live), 0)
        seqs = list(live)
        grow = [3 + (s + branch) % 4 for s in seqs]
        taps = [toy.taps(live[s][1], live[s][1] + n, live[s][0]) for s, n in zip(seqs, grow, strict=True)]
        toy.drafter.append(kv, seqs, torch.cat(taps), [live[s][1] for s in seqs], grow)
        live = {s: (live[s][0], live[s][1] + n) for s, n in zip(seqs, grow, strict=True)}
        prop = toy.drafter.propose(kv, seqs, [4] * len(seqs), [n for _, n in live.values()])
        for r, (b, n) in enumerate(live.values()):
            check_row(prop, r, toy.oracle, toy.oracle.draft(toy.context(0, n, b), 4, n, 3), 4)


def test_greedy_rows_of_a_sampled_batch_stay_greedy():
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(3, 128)
    seqs = [kv.open() for _ in range(3)]
    for i, seq in enumerate(seqs):
        toy.append(kv, seq, 0, 10, branch=i)
    greedy = toy.drafter.propose(kv, seqs, [1, 2, 3], [10] * 3)
    mixed = toy.drafter.propose(kv, seqs, [1, 2, 3], [10] * 3, temperature=[0.0, 1.5, -1.0])
    assert greedy.q is None
    assert mixed.tokens[[0, 2]].tolist() == greedy.tokens[[0, 2]].tolist()
    for r, t in enumerate([0.0, 1.5, 0.0]):
        check_row(mixed, r, toy.oracle, toy.oracle.draft(toy.context(0, 10, r), r + 1, 10, 3), r + 1, temperature=t)


def test_padded_rows_write_nothing():
    """Rows B34, B162: a batch padded with rows that do not fit leaves the real rows' memory alone."""
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(4, 128, 4)
    real, padding = [kv.open(), kv.open(), kv.open()], kv.open(9)
    for i, seq in enumerate(real):
        toy.append(kv, seq, 0, 11, branch=i)
        kv.reserve([seq], [20])
    before = [kv.export_state(s) for s in real]
    alone = [toy.drafter.propose(kv, [s], [1], [11]).tokens for s in real]
    taps = torch.cat([toy.taps(11, 13, branch=i) for i in range(3)] + [torch.full((2, toy.tap_width), float("nan"))])
    with cpu_as_device():
        prop = toy.drafter.propose(kv, [*real, padding], torch.tensor([1, 1, 1, 0]), torch.tensor([11, 11, 11, 0]))
        toy.drafter.append(
            kv, [*real, padding], taps, torch.tensor([11, 11, 11, 0]), torch.tensor([2, 2, 2, 2]),
            torch.tensor([0, 1, 2, 2]),
        )  # fmt: skip
    assert prop.valid.tolist() == [True, True, True, False]
    for r, tokens in enumerate(alone):
        assert prop.tokens[r].tolist() == tokens[0].tolist()
    for i, (seq, old) in enumerate(zip(real, before, strict=True)):
        assert kv.span(seq) == (0, 11 + i)
        new = kv.export_state(seq)
        assert torch.equal(new.keys[:, :11], old.keys)
        assert torch.equal(new.values[:, :11], old.values)
    assert kv.span(padding) == (9, 9)
    assert kv.faults[kv.slots([padding])].tolist() == [1]


def test_propose_writes_nothing_anywhere():
    """Rows B33, B71, B72: block rows are never stored, so a rejected block leaves no trace."""
    toy = Toy(tiny_config(layer_types=(SLIDING, FULL)))
    kv = toy.drafter.new_kv(2, 64, 4, prefix_store_bytes=1 << 16)
    seq, other = kv.open(), kv.open()
    toy.append(kv, seq, 0, 16, token_ids=list(range(16)))  # every page full, every page published
    toy.append(kv, other, 0, 7)
    poison(kv, 123.0)
    memory = [t.clone() for t in (kv.keys, kv.values, kv.tags, kv.store.keys[:, 1:], kv.store.values)]
    before, first = snapshot(kv), toy.drafter.propose(kv, [seq, other], [3, 4], [16, 7])
    for _ in range(3):
        again = toy.drafter.propose(kv, [seq, other], [3, 4], [16, 7])
        assert torch.equal(again.tokens, first.tokens)
        toy.drafter.propose(kv, [other], [9], [7], temperature=1.0)
    assert_same(before, snapshot(kv))
    for old, new in zip(memory, (kv.keys, kv.values, kv.tags, kv.store.keys[:, 1:], kv.store.values), strict=True):
        assert torch.equal(old.view(torch.int32), new.view(torch.int32))


def test_no_requests_is_a_batch_too():
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(1, 64)
    toy.drafter.append(kv, [], torch.empty(0, toy.tap_width), [], [])
    with cpu_as_device():
        none = torch.empty(0, dtype=torch.int64)
        toy.drafter.append(kv, [], torch.empty(0, toy.tap_width), none, none)
        assert toy.drafter.propose(kv, [], none, none).tokens.shape == (0, 3)
    assert toy.drafter.propose(kv, [], [], []).valid.shape == (0,)
    assert toy.drafter.propose(kv, [], [], [], temperature=0.5).tokens.shape == (0, 3)


def test_near_the_end_the_neighbour_is_untouched():
    """Row B35: committed = max - 10, one row per page, everything else taken."""
    toy = Toy(tiny_config(layer_types=(FULL,), block_size=8))
    kv = toy.drafter.new_kv(2, 40, 1)
    seq, neighbour = kv.open(), kv.open()
    toy.append(kv, neighbour, 0, 40, branch=1)
    toy.append(kv, seq, 0, 30)
    free, before = sorted(kv._free_pages), kv.export_state(neighbour)
    prop = toy.drafter.propose(kv, [seq, neighbour], [1, 1], [30, 40])
    kv.reserve([seq], [40])
    toy.append(kv, seq, 30, 40)
    after = kv.export_state(neighbour)
    assert torch.equal(before.keys, after.keys)
    check_row(prop, 0, toy.oracle, toy.oracle.draft(toy.context(0, 30), 1, 30, 7), 1)
    check_row(prop, 1, toy.oracle, toy.oracle.draft(toy.context(0, 40, 1), 1, 40, 7), 1)
    kv.truncate(seq, 30)
    assert sorted(kv._free_pages) == free
