"""What every engine's requests go through, against a drafter that computes each context from scratch."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace

import pytest
import stand_in_graphs
import torch
from adapters.scripted import Request, ScriptedEngine, texts
from stand_in_graphs import Again
from tiny import FULL, SLIDING, tiny_config

from dflash2 import DFlash2Drafter
from dflash2.adapters.base import RequestDrafter
from dflash2.adapters.chunks import Chunk, Live, moved_chunk
from dflash2.testing import NoHostReads, cpu_as_device

V, PAGE = 37, 4
KINDS = {
    "sliding": {},
    "mixed": {"layer_types": (SLIDING, FULL)},
    "v1": {"architecture": "DFlashDraftModel"},
}


def drafter(kind: str = "sliding") -> DFlash2Drafter:
    torch.manual_seed(3)
    made = DFlash2Drafter(tiny_config(**KINDS[kind]))
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return made.bind_target(torch.randn(V, 16), torch.randn(V, 16))


def adapter(made: DFlash2Drafter, *, requests: int = 4, store: int = 1 << 20, **kw) -> RequestDrafter:
    return RequestDrafter(made, max_requests=requests, max_tokens=256, page_size=PAGE, prefix_store_bytes=store, **kw)


def engine(under_test: RequestDrafter, **kw) -> ScriptedEngine:
    width = 2 * under_test.drafter.config.hidden_size
    return ScriptedEngine(under_test.step, taps_width=width, vocab=V - 1, **kw)


def line(seed: int, length: int) -> list[int]:
    return torch.randint(0, V - 1, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def from_scratch(made: DFlash2Drafter, host: ScriptedEngine, r: Request, first: int = 0) -> list[int]:
    """Drafts over the context ``[first, computed)`` and nothing else."""
    kv = made.new_kv(1, 256)
    seq = kv.open(first)
    rows = host.taps(r.text[: r.computed])[first:]
    made.append(kv, [seq], rows, [first], [len(rows)])
    return made.propose(kv, [seq], [r.text[r.computed]], [r.computed]).tokens[0].tolist()


def run_alone(host: ScriptedEngine, r: Request, check=None, steps: int = 40) -> int:
    host.admit(r)
    hit = r.computed
    for _ in range(steps):
        if r.done:
            break
        host.step([r], check)
    return hit


def test_a_prefix_hit_drafts_from_its_first_step_as_if_cold():
    made = drafter()
    under_test = adapter(made)
    host = engine(under_test, chunk=64)
    text = line(1, 60)
    run_alone(host, Request("cold", text, 44))
    seen = []

    def check(r, drafts):
        seen.append(r.computed)
        assert drafts == from_scratch(made, host, r)

    warm = Request("warm", text, 44)
    assert run_alone(host, warm, check) >= 40
    assert seen[0] == 44  # the first step that computed anything
    assert under_test.counters.restored == 1
    assert under_test.counters.holes == 0


def test_without_a_store_the_prefix_is_a_hole():
    made = drafter()
    under_test = adapter(made, store=0)
    host = engine(under_test, chunk=64)
    text = line(1, 60)
    run_alone(host, Request("cold", text, 44))
    under_test.forget(["cold"])
    firsts = []

    def check(r, drafts):
        firsts.append(under_test.kv.span(under_test.contexts[r.name])[0])
        assert drafts == from_scratch(made, host, r, 40)

    assert run_alone(host, Request("warm", text, 44), check, steps=1) == 40
    assert firsts == [40]
    assert under_test.counters.holes == 1


def test_two_requests_of_one_step_share_a_prefix_that_one_of_them_writes():
    made = drafter()
    under_test = adapter(made)
    host = engine(under_test, chunk=64)
    shared = line(5, 24)
    a, b = Request("a", [*shared, 1, 2, 3, 4, 5], 26), Request("b", [*shared, 9, 8, 7, 6, 5], 26)
    host.admit(a)
    b.computed, b.known, b.running = 24, 26, True  # the scheduler lets b hit what a computes in this step
    checked = []

    def check(r, drafts):
        checked.append(r.name)
        assert drafts == from_scratch(made, host, r)

    host.step([b, a], check)
    assert sorted(checked) == ["a", "b"]


def test_more_requests_than_room_costs_drafts_not_the_engine(caplog):
    under_test = adapter(drafter(), requests=2)
    host = engine(under_test)
    many = [Request(f"r{i}", t, 3) for i, t in enumerate(texts(2, 4, V - 1, 6, 8))]
    for r in many:
        host.admit(r)
    with caplog.at_level(logging.WARNING):
        out = host.step(many)
    assert out.drafted.sum() <= 2
    assert sum(under_test.counters.failures.values()) == 2
    assert "no drafts for request" in caplog.text


def test_idle_requests_make_room():
    made = drafter()
    under_test = adapter(made, requests=2)
    host = engine(under_test, chunk=64)
    a, b, c = (Request(name, line(i, 30), 12) for i, name in enumerate("abc"))
    for r in (a, b):
        host.admit(r)
    host.step([a, b])
    host.preempt(a)
    host.admit(c)
    assert host.step([b, c]).drafted.tolist() == [True, True]
    assert under_test.counters.evicted == 1
    assert under_test.requests == ["b", "c"]


def chunk(name: str, start: int, rows: int, *, anchor: int | None = 1, temperature: float = 0.0, **kw) -> Chunk:
    return Chunk(name, start, [1] * rows, rows, kw.pop("valid", rows), anchor, temperature, **kw)


@pytest.mark.parametrize("kind", KINDS)
def test_one_bad_request_does_not_spoil_the_step(kind):
    """Taps of NaN, an infinite temperature: the others draft as if alone."""
    made = drafter(kind)
    taps = torch.randn(9, 32)
    taps[6:] = float("nan")
    under_test = adapter(made)
    chunks = [
        chunk("good", 0, 3),
        chunk("hot", 0, 3, temperature=float("inf")),
        chunk("sick", 0, 3),
    ]
    out = under_test.step(chunks, taps)
    alone = adapter(made).step([chunk("good", 0, 3)], taps[:3])
    assert out.drafted.tolist() == [True, False, False]
    assert torch.equal(out.tokens[0], alone.tokens[0])
    assert not out.tokens[1:].any()
    assert under_test.counters.failures == {"ValueError": 1}
    assert under_test.invalid == 1
    assert under_test.requests == ["good", "sick"]


@pytest.mark.parametrize("kind", KINDS)
def test_distributions_are_those_that_tokens_were_drawn_from(kind):
    made = drafter(kind)
    under_test = adapter(made)
    taps = torch.randn(9, 32)
    chunks = [chunk("hot", 0, 3, temperature=1.3), chunk("cold", 0, 3), chunk("prompt", 0, 3, anchor=None)]
    out = under_test.step(chunks, taps, torch.Generator().manual_seed(5))
    dense = out.dense_q(V + 3)
    assert dense.shape == (3, under_test.k, V + 3)
    torch.testing.assert_close(dense.sum(-1), torch.ones(3, under_test.k))
    chosen = dense.gather(-1, out.tokens[..., None]).squeeze(-1)
    assert (chosen[0] > 0).all()
    assert (chosen[1:] == 1).all()  # greedy, and none at all
    kv = made.new_kv(1)
    seq = kv.open()
    made.append(kv, [seq], taps[:3], [0], [3])
    mine = made.propose(kv, [seq], [1], [3], temperature=1.3)
    q = mine.q if mine.candidates is None else torch.zeros(1, under_test.k, V).scatter_(-1, mine.candidates, mine.q)
    torch.testing.assert_close(dense[0, 0, :V], q[0, 0], atol=1e-6, rtol=1e-5)


def test_a_batch_that_fails_as_a_whole_still_has_distributions(monkeypatch):
    """Requests drafted one by one: greedy ones beside sampled ones stay one-hot on what they drafted."""
    under_test = adapter(drafter())
    real = under_test.drafter.propose

    def only_single(kv, seqs, *args, **kw):
        if len(seqs) > 1:
            raise RuntimeError("no batches today")
        return real(kv, seqs, *args, **kw)

    monkeypatch.setattr(under_test.drafter, "propose", only_single)
    out = under_test.step([chunk("hot", 0, 3, temperature=1.0), chunk("cold", 0, 3)], torch.randn(6, 32))
    assert out.drafted.all()
    assert (out.dense_q(V)[1].gather(-1, out.tokens[1, :, None]) == 1).all()


def test_steps_without_anything_to_draft():
    under_test = adapter(drafter())
    out = under_test.step([], torch.zeros(0, 32))
    assert out.tokens.shape == (0, under_test.k)
    out = under_test.step([chunk("a", 0, 2, anchor=None)], torch.randn(2, 32))
    assert out.drafted.tolist() == [False]
    assert under_test.kv.span(under_test.contexts["a"]) == (0, 2)


def test_a_gap_without_a_store_keeps_the_older_rows():
    """Rounds in which the engine did not tell of rows (near its longest length, say) are a hole."""
    under_test = adapter(drafter(), store=0)
    under_test.step([chunk("a", 0, 4)], torch.randn(4, 32))
    assert under_test.step([chunk("a", 6, 1)], torch.randn(1, 32)).drafted.all()
    assert under_test.kv.span(under_test.contexts["a"]) == (0, 7)


# -- positions that only the device knows ---------------------------------------------------------------------------


def as_live(under_test: RequestDrafter, requests: dict[str, Request]):
    """``step`` of an engine with asynchronous scheduling: after the prompt its host knows upper bounds only."""

    def step(chunks, taps):
        ids = torch.tensor
        live = Live(
            ids([c.start for c in chunks]), ids([c.valid for c in chunks]), ids([c.anchor or 0 for c in chunks])
        )
        told = []
        for c in chunks:
            r = requests[c.request]
            if (c.start >= r.prompt or c.valid < c.rows) and r.name not in exact:
                c = replace(c, start=c.start + 3, tokens=(), moved=True)
            told.append(replace(c, valid=c.rows, anchor=None if c.anchor is None else 0))
        exact.clear()
        with cpu_as_device(), NoHostReads() if all(c.moved for c in told) else nullcontext():
            return under_test.step(told, taps, live=live)

    exact: set[str] = set()
    return step, exact


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graphs", [(), (1, 2), (3,)], ids=str)
def test_positions_on_the_device_draft_the_same(kind, graphs, monkeypatch):
    """Hits, chunked prompts, rejections, preemption, resumption; nothing is read back while requests go on."""
    made = drafter(kind)
    under_test = adapter(made)
    if graphs:
        stand_in_graphs.capture(monkeypatch, made, under_test.kv, graphs, under_test.k)
    pool = [Request(f"r{i}", t, max(1, len(t) - 9)) for i, t in enumerate(texts(7, 6, V - 1, 12, 20))]
    step, exact = as_live(under_test, {r.name: r for r in pool})
    host = engine(under_test, chunk=5)
    host.run_drafter = step

    def check(r: Request, drafts: list[int]) -> None:
        assert drafts == from_scratch(made, host, r), (r.name, r.computed)

    running = pool[:3]
    for r in running:
        host.admit(r)
    for i in range(60):
        host.step(running, check)
        if i == 4:
            host.preempt(running[0])
            host.step(running[1:], check)
            host.admit(running[0])
            exact.add(running[0].name)
        for r in [r for r in running if r.done]:
            running.remove(r)
            under_test.forget([r.name])
        while len(running) < 3 and (new := next((r for r in pool if not r.known), None)):
            host.admit(new)
            running.append(new)
    assert all(r.done for r in pool)
    assert host.checked > 20
    assert under_test.counters.rounds >= host.checked
    assert under_test.invalid == 0
    assert not under_test.counters.failures
    assert under_test.kv.pages_in_use == 0


def test_a_request_that_moved_without_a_context_goes_without_drafts():
    under_test = adapter(drafter())
    one = torch.ones(1, dtype=torch.int64)
    with cpu_as_device():
        out = under_test.step(
            [replace(chunk("lost", 9, 1), moved=True)], torch.randn(1, 32), live=Live(9 * one, one, one)
        )
    assert out.drafted.tolist() == [False]
    assert under_test.counters.unknown == 1
    assert not under_test.counters.failures


def moving(under_test: RequestDrafter, names: str, taps: torch.Tensor, starts: list[int], rows: int = 2):
    """A step of requests that go on, two rows each, of which one counts."""
    ids = torch.tensor
    live = Live(ids(starts), ids([1] * len(names)), ids([5] * len(names)))
    with cpu_as_device():
        return under_test.step([moved_chunk(n, rows) for n in names], taps, live=live)


def test_a_usual_step_is_one_launch(monkeypatch):
    """Which requests go on in one graph, and what takes a step out of it: a beginner, or one that does not draft."""
    made, alone = drafter(), drafter()
    under_test, reference = adapter(made), adapter(alone)
    stand_in_graphs.capture(monkeypatch, made, under_test.kv, (2,), under_test.k)
    first, later = torch.randn(6, 32), torch.randn(3, 4, 32)
    replays = []
    for core in (under_test, reference):
        core.step([chunk("a", 0, 3), chunk("b", 0, 3)], first)
    for i in (0, 1, 2):  # pages are reserved in the first
        before = Again.replays
        out, expected = (moving(core, "ab", later[i], [3 + i, 3 + i]) for core in (under_test, reference))
        replays.append(Again.replays - before)
        assert torch.equal(out.tokens, expected.tokens)
        assert torch.equal(out.candidates, expected.candidates)
        assert out.drafted.all()
    assert replays == [1, 1, 1]
    assert under_test.counters == reference.counters
    with cpu_as_device():
        live = Live(torch.tensor([6, 6]), torch.tensor([1, 1]), torch.tensor([5, 5]))
        out = under_test.step([moved_chunk("a", 2), moved_chunk("b", 2, drafting=False)], later[0], live=live)
    assert out.drafted.tolist() == [True, False]


def test_a_round_that_fails_costs_nobody_else_drafts(monkeypatch):
    """The launch of all fails: the step is made as if there were none."""
    made = drafter()
    under_test = adapter(made)
    stand_in_graphs.capture(monkeypatch, made, under_test.kv, (2,), under_test.k)
    under_test.step([chunk("a", 0, 3), chunk("b", 0, 3)], torch.randn(6, 32))
    moving(under_test, "ab", torch.randn(4, 32), [3, 3])

    def broken(*args, **kwargs):
        raise RuntimeError("no graphs today")

    monkeypatch.setattr(under_test.kv.captured, "round", broken)
    assert moving(under_test, "ab", torch.randn(4, 32), [4, 4]).drafted.all()
    assert not under_test.counters.failures
    assert under_test.kv.next[:2].sum() == 10


def test_a_step_of_sampled_drafts_for_all_is_one_hot_where_there_are_none():
    under_test = adapter(drafter())
    taps = torch.randn(6, 32)
    taps[3:] = float("nan")
    chunks = [chunk("hot", 0, 3, temperature=1.3), chunk("sick", 0, 3, temperature=1.3)]
    out = under_test.step(chunks, taps, torch.Generator().manual_seed(5))
    assert out.drafted.tolist() == [True, False]
    assert not out.tokens[1].any()
    dense = out.dense_q(V)
    torch.testing.assert_close(dense.sum(-1), torch.ones(2, under_test.k))
    assert (dense[1, :, 0] == 1).all()
    assert (dense[0].gather(-1, out.tokens[0, :, None]) > 0).all()


def test_a_warm_up_leaves_nothing_behind(monkeypatch, caplog):
    under_test, sizes = adapter(drafter()), []
    step = under_test.step
    monkeypatch.setattr(
        under_test, "step", lambda chunks, taps: (sizes.append((len(taps), len(chunks))), step(chunks, taps))
    )
    under_test.warm_up(torch.zeros(11, 32))
    assert under_test.requests == []
    assert under_test.kv.pages_in_use == 0
    assert under_test.counters.steps == 0
    most = under_test.kv.max_sequences
    assert sizes == [(11, min(11, most)), (11, 1), (2, min(2, most)), (2, 1)]
    assert not caplog.records


def test_a_warm_up_of_one_request_has_no_more_rows_than_it_may_have(caplog):
    under_test = adapter(drafter())
    under_test.warm_up(torch.zeros(3 * under_test.contexts.max_tokens, 32))
    assert under_test.requests == []
    assert not caplog.records


@pytest.mark.parametrize("known", [None, 43])
def test_a_conversation_goes_on_from_rows_made_on_the_device(known):
    """The next turn's prompt holds the last answer, whose rows were appended where the host did not see them."""
    made = drafter()
    under_test = adapter(made)
    turn = Request("first", line(4, 46), 20)
    step, _ = as_live(under_test, {"first": turn})
    host = engine(under_test, chunk=64)
    host.run_drafter = step
    host.admit(turn)
    while not turn.done:
        host.step([turn])
    if known is None:
        under_test.finish("first", lambda: turn.text)
    else:
        under_test.finish("first", lambda: [*turn.text[:known], -1, -1])  # the newest are not there yet
    assert under_test.kv.pages_in_use == 0
    end = (known or turn.computed) // PAGE * PAGE
    seq = under_test.kv.open(end, turn.text[:end])
    assert under_test.kv.span(seq)[0] <= end - 8  # a whole window
    again = made.new_kv(1, 256)
    cold = again.open()
    made.append(again, [cold], host.taps(turn.text[:end]), [0], [end])
    drafts = [made.propose(kv, [s], [5], [end]).tokens for kv, s in ((under_test.kv, seq), (again, cold))]
    assert torch.equal(*drafts)
