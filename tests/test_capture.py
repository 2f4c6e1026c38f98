"""What surrounds CUDA graphs, on the CPU, with stand-ins for these."""

import pytest
import stand_in_graphs
import torch
from stand_in_graphs import Again
from tiny import Toy, poison, tiny_config

from dflash2.testing import cpu_as_device

K, STARTS = 3, [3, 20, 9, 7]


@pytest.fixture
def capture(monkeypatch):
    """``capture(toy, kv, sizes)`` as `DFlash2Drafter.capture` does it."""
    return lambda toy, kv, sizes: stand_in_graphs.capture(monkeypatch, toy.drafter, kv, sizes, K)


def filled(toy):
    kv = toy.drafter.new_kv(8, 64, page_size=4)
    seqs = [kv.open() for _ in STARTS]
    for i, (seq, end) in enumerate(zip(seqs, STARTS, strict=True)):
        toy.append(kv, seq, 0, end, branch=i)
    poison(kv)
    return kv, seqs


def same(a, b):
    return all(x is y is None or torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


@pytest.mark.parametrize("temperature", [0.0, [0.0, 1.0, 2.0, 0.5]])
def test_batches_of_every_size_in_larger_graphs(capture, temperature):
    """Rows B162, B164: what a larger batch left behind does not reach a smaller one."""
    toy = Toy(tiny_config())
    kv, seqs = filled(toy)
    drafter, anchors = toy.drafter, torch.tensor([5, 36, 0, 11])

    def propose(n):
        t = temperature[:n] if isinstance(temperature, list) else temperature
        generator = torch.Generator().manual_seed(n)
        return drafter.propose(kv, seqs[:n], anchors[:n], STARTS[:n], K, t, generator)

    order = [4, 1, 3, 2, 4, 0, 1]
    plain = [propose(n) for n in order]
    capture(toy, kv, (2, 4))
    replayed = [propose(n) for n in order]
    assert all(same(a, b) for a, b in zip(plain, replayed, strict=True))
    capture(toy, kv, (2,))  # three are more than any graph holds
    assert same(propose(3), plain[2])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_rounds_store_and_draft_what_calls_do(capture, temperature):
    """Ragged lengths, rejected suffixes, a batch that shrinks and grows; rows that fill up a graph go nowhere."""
    toy, states, drafts = Toy(tiny_config()), [], []
    rounds = [
        (4, [4, 4, 4, 4], [1, 4, 2, 3]),
        (2, [4, 2], [2, 2]),
        (3, [1, 4, 3], [1, 0, 3]),
        (4, [2, 1, 1, 1], [2, 1, 1, 1]),
    ]
    for way in ("calls", "graphs", "one graph"):
        kv, seqs = filled(toy)
        kv.reserve(seqs, [s + 20 for s in STARTS])
        if way != "calls":
            capture(toy, kv, (2, 4))
        position, made, before = torch.tensor(STARTS), [], Again.replays
        with cpu_as_device():
            for step, (n, lengths, valid) in enumerate(rounds):
                taps = torch.cat([toy.taps(9 * step, 9 * step + length, i) for i, length in enumerate(lengths)])
                append = kv, seqs[:n], taps, position[:n].clone(), torch.tensor(lengths), torch.tensor(valid)
                position[:n] += torch.tensor(valid)
                heat = torch.full((n,), temperature) if temperature else 0.0
                drafting = {"temperature": heat, "generator": torch.Generator().manual_seed(step)}
                if way == "one graph":
                    made.append(toy.drafter.append_and_propose(*append, torch.arange(n), K, **drafting))
                else:
                    toy.drafter.append(*append)
                    made.append(toy.drafter.propose(kv, seqs[:n], torch.arange(n), position[:n], K, **drafting))
                assert made[-1].valid.all()
        assert Again.replays - before == {"calls": 0, "graphs": 8, "one graph": 4}[way]
        assert kv.faults.tolist() == [0] * 8
        states.append([kv.export_state(q) for q in seqs])
        drafts.append(made)
    for a, b in ((0, 1), (1, 2)):
        assert all(same(x, y) for x, y in zip(drafts[a], drafts[b], strict=True))
        assert_same_states(states[a], states[b])


def assert_same_states(some, others):
    for a, b in zip(some, others, strict=True):
        assert torch.equal(a.positions, b.positions)
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


def test_graphs_end_when_what_they_read_moves(capture):
    toy = Toy(tiny_config())
    kv, _ = filled(toy)
    capture(toy, kv, (1,))
    assert toy.drafter._captured(kv) is kv.captured
    toy.drafter.bind_target(toy.embed.clone(), toy.head)
    assert toy.drafter._captured(kv) is None


def test_a_round_that_no_graph_holds_does_nothing(capture):
    toy = Toy(tiny_config())
    kv, seqs = filled(toy)
    kv.reserve(seqs, [s + 20 for s in STARTS])
    before = kv.next.clone()

    def round_(n, k=K):
        with cpu_as_device():
            numbers = torch.tensor(STARTS[:n]), torch.ones(n, dtype=torch.int64), torch.ones(n, dtype=torch.int64)
            taps = torch.cat([toy.taps(STARTS[i], STARTS[i] + 1, i) for i in range(n)])
            return toy.drafter.append_and_propose(kv, seqs[:n], taps, *numbers, torch.arange(n), k)

    assert round_(2) is None  # no graphs at all
    capture(toy, kv, (2,))
    assert round_(3) is None
    assert round_(2, K - 1) is None
    assert torch.equal(kv.next, before)
    assert [kv.span(q)[1] for q in seqs] == STARTS
    assert round_(2).valid.all()


def test_a_sequence_that_cannot_draft_has_tokens_0_in_a_round(capture):
    toy = Toy(tiny_config())
    kv, seqs = filled(toy)
    kv.reserve(seqs, [s + 20 for s in STARTS])
    capture(toy, kv, (4,))
    ones = torch.ones(4, dtype=torch.int64)
    with cpu_as_device():
        starts = torch.tensor(STARTS) + torch.tensor([0, 1, 0, 0])
        taps = torch.cat([toy.taps(s, s + 1, i) for i, s in enumerate(STARTS)])
        out = toy.drafter.append_and_propose(kv, seqs, taps, starts, ones, ones, torch.tensor([1, 1, -1, 1]), K)
    assert out.valid.tolist() == [True, False, False, True]
    assert not out.tokens[1:3].any()
    assert kv.faults.sum() == 1
