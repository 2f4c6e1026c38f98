"""What surrounds CUDA graphs, on the CPU: a stand-in for a graph calls again what it recorded, into the same memory."""

import pytest
import torch
from tiny import Toy, poison, tiny_config

from dflash2.append import append_rows_on_device
from dflash2.capture import CapturedDrafting, _Graph
from dflash2.testing import cpu_as_device

K, STARTS = 3, [3, 20, 9, 7]


class Again:
    """Replays by calling."""

    def __init__(self, call, inputs, outputs):
        self.call, self.inputs, self.outputs = call, inputs, outputs

    def replay(self):
        new = self.call(**self.inputs)
        if new is not None:
            for name in ("tokens", "candidates", "q", "valid"):
                if getattr(new, name) is not None:
                    getattr(self.outputs, name).copy_(getattr(new, name))


@pytest.fixture
def capture(monkeypatch):
    """``capture(toy, kv, sizes)`` as `DFlash2Drafter.capture` does it."""

    def recorded(self, call, inputs, padding):
        outputs = call(**inputs)
        given = {n: t for n, t in inputs.items() if t is not None}
        return _Graph(Again(call, inputs, outputs), given, outputs, padding)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(CapturedDrafting, "_capture", recorded)

    def capture(toy, kv, sizes):
        drafter = toy.drafter
        kv.captured = CapturedDrafting(
            drafter._captured_weights(),
            lambda **inputs: drafter._draft(kv, K, drafter._most_context(kv), **inputs),
            lambda **inputs: append_rows_on_device(drafter, kv, **inputs),
            sizes, K, torch.empty(0, toy.tap_width), kv.padding_slot,
        )  # fmt: skip

    return capture


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


def test_rounds_store_what_calls_store(capture):
    """Ragged lengths, rejected suffixes, a batch that shrinks and grows; rows that fill up a graph go nowhere."""
    toy, states = Toy(tiny_config()), []
    rounds = [
        (4, [4, 4, 4, 4], [1, 4, 2, 3]),
        (2, [4, 2], [2, 2]),
        (3, [1, 4, 3], [1, 0, 3]),
        (4, [2, 1, 1, 1], [2, 1, 1, 1]),
    ]
    for captured in (False, True):
        kv, seqs = filled(toy)
        kv.reserve(seqs, [s + 20 for s in STARTS])
        if captured:
            capture(toy, kv, (2, 4))
        position = torch.tensor(STARTS)
        with cpu_as_device():
            for step, (n, lengths, valid) in enumerate(rounds):
                taps = torch.cat([toy.taps(9 * step, 9 * step + length, i) for i, length in enumerate(lengths)])
                toy.drafter.append(
                    kv, seqs[:n], taps, position[:n], torch.tensor(lengths), valid_lengths=torch.tensor(valid)
                )
                position[:n] += torch.tensor(valid)
                assert toy.drafter.propose(kv, seqs[:n], torch.arange(n), position[:n], K).valid.all()
        assert kv.faults.tolist() == [0] * 8
        states.append([kv.export_state(q) for q in seqs])
    for a, b in zip(*states, strict=True):
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
