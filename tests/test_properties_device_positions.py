"""P13 and the device form: positions that only the device knows mean the same, and nothing waits for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FULL, SLIDING, Toy, tiny_config

from dflash2 import DFlash2Drafter
from dflash2.errors import CapacityError
from dflash2.testing import NoHostReads, cpu_as_device


def tensors(*values):
    return [torch.tensor(v, dtype=torch.int64) for v in values]


@settings(max_examples=60, deadline=None)
@given(
    layers=st.sampled_from([(SLIDING,), (SLIDING, FULL)]),
    rounds=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=6),
    page=st.sampled_from([1, 4, 16]),
    start=st.sampled_from([0, 9, 700]),
    mixed=st.booleans(),
)
def test_the_device_form_equals_the_host_form(layers, rounds, page, start, mixed):
    """Several rounds without a look from the host: append with a rejected suffix, propose, reserve on."""
    toy = Toy(tiny_config(layer_types=layers))
    host, device = (toy.drafter.new_kv(2, 128, page) for _ in range(2))
    a = [host.open(start), host.open(0)]
    b = [device.open(start), device.open(0)]
    at, upper = [start, 0], [start, 0]
    for n, rejected in rounds:
        counts = [n + rejected, n + 1 + rejected]
        valid = [n, n + 1]
        taps = torch.cat([toy.taps(p, p + c, branch=i) for i, (p, c) in enumerate(zip(at, counts, strict=True))])
        toy.drafter.append(host, a, taps, at, counts, valid)
        upper = [u + c for u, c in zip(upper, counts, strict=True)]  # all that the host knows: an upper bound
        device.reserve(b, upper)
        with cpu_as_device():
            lengths = counts if mixed else torch.tensor(counts)
            toy.drafter.append(device, b, taps, torch.tensor(at), lengths, torch.tensor(valid))
        at = [p + v for p, v in zip(at, valid, strict=True)]
        expected, hidden = toy.hidden(lambda: toy.drafter.propose(host, a, [1, 2], at))  # noqa: B023
        with cpu_as_device():
            ids, starts = tensors([1, 2], at)
            found, same = toy.hidden(lambda: toy.drafter.propose(device, b, ids, starts))  # noqa: B023
        torch.testing.assert_close(same, hidden, atol=2e-5, rtol=1e-5)
        assert found.valid.tolist() == expected.valid.tolist()
        assert torch.equal(found.candidates, expected.candidates)
        assert torch.equal(found.tokens, expected.tokens)
    assert device.faults.tolist() == [0, 0]
    for x, y in zip(a, b, strict=True):
        assert host.spans(x) == device.spans(y)
        left, right = host.export_state(x), device.export_state(y)
        assert torch.equal(left.keys, right.keys)
        assert torch.equal(left.values, right.values)


@pytest.mark.parametrize(
    ("starts", "counts", "valid", "fits"),
    [
        ([6, 20], [2, 2], [2, 2], [True, True]),
        ([7, 20], [2, 2], [2, 2], [False, True]),  # a gap
        ([5, 20], [2, 2], [2, 2], [False, True]),  # a repeat
        ([-6, 20], [2, 2], [2, 2], [False, True]),
        ([6, 20], [4, 2], [4, 2], [False, True]),  # beyond what was reserved
        ([6, 20], [4, 2], [3, 2], [True, True]),  # the rejected suffix needs no page
        ([6, 20], [2, 2], [3, 1], [False, True]),  # more valid rows than rows
        ([6, 20], [2, 2], [-1, 2], [False, True]),
        ([6, 20], [3, 2], [2, 2], [False, False]),  # taps do not hold that many rows
        ([6, 20], [5, -1], [2, 2], [False, False]),
        ([6, 20], [0, 4], [0, 3], [True, True]),
    ],
)
def test_misfits_keep_their_state_and_are_counted(starts, counts, valid, fits):
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(3, 128, 4)
    seqs = [kv.open(), kv.open(20), kv.open()]
    toy.append(kv, seqs[0], 0, 6)
    toy.append(kv, seqs[2], 0, 9, branch=9)
    kv.reserve(seqs[:2], [9, 30])
    before = [kv.export_state(s) for s in seqs]
    total = 6 if counts[0] == 4 else 4
    taps = torch.randn(total, toy.tap_width)
    with cpu_as_device():
        toy.drafter.append(kv, seqs[:2], taps, *tensors(starts, counts, valid))
    assert kv.faults[kv.slots(seqs)].tolist() == [*(int(not f) for f in fits), 0]
    for i, (seq, old, fit) in enumerate(zip(seqs, before, [*fits, False], strict=True)):
        new, n = kv.export_state(seq), len(old.positions)
        assert new.next_position == old.next_position + (valid[i] if fit else 0)
        assert len(new.positions) == n + (valid[i] if fit else 0)
        assert torch.equal(new.keys[:, :n], old.keys)
        assert torch.equal(new.values[:, :n], old.values)


def test_a_proposal_that_does_not_fit_is_flagged_alone():
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(3, 128, 4)
    seqs = [kv.open() for _ in range(3)]
    for i, seq in enumerate(seqs):
        toy.append(kv, seq, 0, 10 + i, branch=i)
    expected = toy.drafter.propose(kv, seqs, [1, 2, 3], [10, 11, 12])
    for start in (10, 12, 0, -4, 2**40):
        with cpu_as_device():
            found = toy.drafter.propose(kv, seqs, *tensors([1, 2, 3], [10, start, 12]))
        assert found.valid.tolist() == [True, False, True]
        assert torch.equal(found.tokens[[0, 2]], expected.tokens[[0, 2]])
        assert bool(((found.tokens >= 0) & (found.tokens < toy.config.vocab_size)).all())


def test_pages_must_be_reserved_beforehand():
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(1, 128, 4)
    seq = kv.open()
    with cpu_as_device():
        toy.drafter.append(kv, [seq], toy.taps(0, 2), *tensors([0], [2]))
    assert kv.faults.tolist() == [1]
    assert kv.span(seq) == (0, 0)
    kv.reserve([seq], [2])
    with cpu_as_device():
        toy.drafter.append(kv, [seq], toy.taps(0, 2), *tensors([0], [2]))
    assert kv.faults.tolist() == [1]
    assert kv.span(seq) == (0, 2)


def test_a_reservation_ends_with_a_truncation():
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(2, 128, 4, num_pages=5)
    seq = kv.open()
    toy.append(kv, seq, 0, 3)
    kv.reserve([seq], [14])
    assert kv.pages_in_use == 4
    kv.truncate(seq, 3)
    assert kv.pages_in_use == 1
    other = kv.open()
    kv.reserve([other], [16])
    with pytest.raises(CapacityError, match="pages are needed"):
        kv.reserve([seq], [14])


@pytest.mark.parametrize("temperature", [0.0, 0.8, "tensor"])
@pytest.mark.parametrize(
    "config", [tiny_config(layer_types=(SLIDING, FULL)), tiny_config(architecture="DFlashDraftModel")]
)
def test_nothing_waits_for_the_device(config, temperature):
    """Row B221: append and propose with device positions read no value back."""
    toy = Toy(config)
    kv = toy.drafter.new_kv(2, 128, 4)
    seqs = [kv.open(), kv.open()]
    kv.reserve(seqs, [40, 40])
    t = torch.tensor([0.0, 1.0]) if temperature == "tensor" else temperature
    taps, ids, starts, counts = toy.taps(0, 20), *tensors([1, 2], [0, 0], [9, 11])
    with cpu_as_device(), NoHostReads():
        toy.drafter.append(kv, seqs, taps, starts, counts, counts - 1)
        toy.drafter.propose(kv, seqs, ids, counts - 1, temperature=t)
    assert [kv.span(s) for s in seqs] == [(0, 8), (0, 10)]


def test_the_guard_sees_a_read():
    with NoHostReads():
        x = torch.arange(3)
        for read in (lambda: x[0].item(), lambda: bool(x.any()), lambda: x[x > 1], x.nonzero):
            with pytest.raises(AssertionError, match="wait for the device"):
                read()


def test_append_and_propose_run_without_any_values():
    """Row B221 again: on the meta device a tensor has no values at all."""
    config = tiny_config(layer_types=(SLIDING, FULL))
    drafter = DFlash2Drafter(config, device="meta")
    table = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    drafter.bind_target(table, table)
    kv = drafter.new_kv(2, 128, 4)
    seqs = [kv.open(), kv.open(7)]
    kv.reserve(seqs, [20, 20])
    positions = torch.empty(2, dtype=torch.int64, device="meta")
    drafter.append(kv, seqs, torch.empty(9, 2 * config.hidden_size, device="meta"), positions, positions)
    for temperature in (0.0, 0.9, torch.empty(2, device="meta")):
        prop = drafter.propose(kv, seqs, positions, positions, temperature=temperature)
        assert prop.tokens.shape == (2, config.max_draft_tokens)
        assert prop.tokens.device.type == "meta"
