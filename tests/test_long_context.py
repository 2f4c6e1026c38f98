"""Long contexts: what is stored, read and paid for follows from the window, not from the length."""

from __future__ import annotations

import pytest
import torch
from oracle import check_row
from tiny import FULL, SLIDING, Toy, poison, tiny_config

from dflash2.errors import CapacityError

W, PAGE, PAGES = 2048, 16, 130


def long_toy(**changes) -> Toy:
    return Toy(
        tiny_config(
            layer_types=(SLIDING,), sliding_window=W, num_attention_heads=2, num_key_value_heads=1,
            target_layer_ids=(1,), **changes,
        )
    )  # fmt: skip


def rows_of(toy: Toy, first: int, end: int) -> torch.Tensor:
    """Cheap rows of their own per position, for lengths at which `Toy.taps` would take minutes."""
    p = torch.arange(first, end, dtype=torch.float64)[:, None]
    return torch.sin(p * (1 + torch.arange(toy.tap_width, dtype=torch.float64)) * 0.37 + 0.1 * p.remainder(7)).float()


def check_visible(toy: Toy, kv, seq: int, start: int, valid: list[tuple[int, int]]) -> None:
    """The proposal against the oracle on the rows that are valid and in reach."""
    context = {}
    for first, end in valid:
        first = max(first, start - W - 100)
        context |= dict(zip(range(first, end), rows_of(toy, first, end), strict=True))
    prop, hidden = toy.hidden(lambda: toy.drafter.propose(kv, [seq], [3], [start]))
    draft = toy.oracle.draft(context, 3, start, toy.config.max_draft_tokens)
    torch.testing.assert_close(hidden[0].double(), draft.hidden, atol=1e-3, rtol=1e-3)
    check_row(prop, 0, toy.oracle, draft, 3)


def test_a_sequence_opened_at_20000():
    """Row B01: nothing is stored before it; memory is full of NaN."""
    toy = long_toy()
    kv = toy.drafter.new_kv(2)
    poison(kv)
    seq, bytes_ = kv.open(20_000), kv.nbytes
    assert kv.pages_in_use == 0
    toy.drafter.append(kv, [seq], rows_of(toy, 20_000, 20_050), [20_000], [50])
    assert kv.span(seq) == (20_000, 20_050)
    assert kv.pages_in_use == 4
    check_visible(toy, kv, seq, 20_050, [(20_000, 20_050)])
    toy.drafter.append(kv, [seq], rows_of(toy, 20_050, 25_000), [20_050], [4950])
    assert kv.pages_in_use == PAGES
    check_visible(toy, kv, seq, 25_000, [(20_050, 25_000)])
    assert kv.nbytes == bytes_


@pytest.mark.parametrize("hole", [1, 100, W - 60, W + 3])
def test_a_sequence_with_a_hole(hole):
    toy = long_toy()
    kv = toy.drafter.new_kv(1)
    poison(kv)
    seq = kv.open()
    toy.drafter.append(kv, [seq], rows_of(toy, 0, 5000), [0], [5000])
    kv.skip_to(seq, 5000 + hole)
    poison(kv)
    end = 5000 + hole + 40
    toy.drafter.append(kv, [seq], rows_of(toy, end - 40, end), [end - 40], [40])
    assert kv.pages_in_use <= PAGES
    valid = [(end - kv.ring, 5000), (end - 40, end)] if end - kv.ring < 5000 else [(end - 40, end)]
    assert kv.spans(seq) == valid
    check_visible(toy, kv, seq, end, valid)


@pytest.mark.parametrize("chunk", [262_144, 8192 + 17])
def test_262144_tokens_take_130_pages(chunk):
    """Row B77."""
    toy, n = long_toy(), 262_144
    kv = toy.drafter.new_kv(1, n, PAGE)
    poison(kv)
    seq, bytes_, rows, real = kv.open(), kv.nbytes, [], toy.drafter.context_rows
    toy.drafter.context_rows = lambda taps, positions: (rows.append(len(taps)), real(taps, positions))[1]
    appends = 0
    for first in range(0, n, chunk):
        end = min(first + chunk, n)
        toy.drafter.append(kv, [seq], rows_of(toy, first, end), [first], [end - first])
        appends += 1
        assert kv.pages_in_use == kv.num_pages == kv.ring_pages == PAGES
    assert kv.nbytes == bytes_
    assert kv.span(seq) == (n - PAGES * PAGE, n)
    assert sum(rows) <= appends * kv.ring
    check_visible(toy, kv, seq, n, [(n - kv.ring, n)])
    # the loop goes on from there, and may go back within the slack
    toy.drafter.append(kv, [seq], rows_of(toy, n, n + 5), [n], [5])
    kv.truncate(seq, n + 2)
    check_visible(toy, kv, seq, n + 2, [(n + 5 - kv.ring, n + 2)])


def test_100000_rows_cost_what_a_window_costs():
    """Row B12: the rows that go through ``fc`` and the layers, counted."""
    toy, n = long_toy(), 100_000
    kv, rows, real = toy.drafter.new_kv(1), [], toy.drafter.context_rows
    toy.drafter.context_rows = lambda taps, positions: (rows.append(len(taps)), real(taps, positions))[1]
    seq = kv.open()
    toy.drafter.append(kv, [seq], rows_of(toy, 0, n), [0], [n])
    assert sum(rows) == kv.ring == PAGES * PAGE
    check_visible(toy, kv, seq, n, [(n - kv.ring, n)])


def test_full_attention_keeps_everything_and_says_so():
    toy = Toy(tiny_config(layer_types=(SLIDING, FULL), target_layer_ids=(1,)))
    kv = toy.drafter.new_kv(1, 3000, PAGE)
    assert kv.pages_needed(3000) == kv.num_pages == 188
    seq = kv.open()
    toy.drafter.append(kv, [seq], rows_of(toy, 0, 3000), [0], [3000])
    assert kv.pages_in_use == kv.pages_needed(3000)
    assert kv.span(seq) == (0, 3000)
    with pytest.raises(CapacityError, match=r"3009 visible positions .* holds 3008 .* Raise max_tokens"):
        toy.drafter.append(kv, [seq], rows_of(toy, 3000, 3009), [3000], [9])
    assert kv.span(seq) == (0, 3000)
