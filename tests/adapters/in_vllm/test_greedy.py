"""Greedy requests: the engine's own output, drafts from the whole context, memory that stays at a window."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import stand_in_graphs
from adapters.cold import Round, assert_cold, conversation
from adapters.pairs import WINDOW, K, make_pair
from engine import Engine, named

from dflash2.testing import cpu_as_device

#: 17 blocks of 32 for 8 requests of up to 200 tokens: some of them have to give up theirs.
CROWDED = {"num_gpu_blocks_override": 17}


def greedy(tokens: int, **kw):
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **kw)


def test_200_requests_with_shared_prefixes_preemption_and_aborts(tiny_pair, engines):
    """Token-identical to the engine without a drafter, every draft as from a cold context, and no page left behind."""
    plain, ours = engines(tiny_pair[0], None, **CROWDED), engines(*tiny_pair, **CROWDED)
    prompts = conversation(200)
    aborts = {f"r{i}": 1 + i % 9 for i in range(0, 200, 7)}
    expected = plain.run(prompts, greedy(24))
    with ours.recorded() as (rounds, _):
        got = ours.run(prompts, greedy(24), aborts=aborts, arrivals=3)
    for name, tokens in got.items():
        whole = 24 if name not in aborts else len(tokens)
        assert tokens == expected[name][:whole], name
        assert len(tokens) >= min(aborts.get(name, 24), 24)
    assert ours.metric("num_preemptions") > 0
    assert ours.metric("prefix_cache_hits") > 0
    checked = assert_cold(tiny_pair, {n: [*prompts[n], *t] for n, t in got.items()}, rounds)
    assert checked > 2500
    counters = ours.drafter.counters
    assert counters.restored > 20
    assert counters.holes == 0
    assert not counters.failures
    assert ours.drafter.invalid == 0
    assert ours.drafter.requests == []
    assert ours.drafter.kv.pages_in_use == 0


def test_a_prefix_of_2000_tokens_drafts_from_its_first_step_as_if_cold(tiny_pair, engines):
    """The event that has killed an engine in production: the first rows of a request lie far behind position 0."""
    ours = engines(*tiny_pair, max_model_len=4096, max_num_batched_tokens=512)
    rng = random.Random(5)
    shared = [rng.randrange(256) for _ in range(2000)]
    prompts = {f"r{i}": [*shared, *(rng.randrange(256) for _ in range(20))] for i in range(4)}
    cold_text = ours.run({"r0": prompts["r0"]}, greedy(16))
    before = ours.drafter.counters.restored
    with ours.recorded() as (rounds, chunks):
        warm = ours.run(prompts, greedy(16))
    assert warm["r0"] == cold_text["r0"]
    first = {}
    for c in chunks:
        first.setdefault(named(c.request), c)
    assert all(c.start >= 1900 and c.anchor is not None for c in first.values()), first
    assert {r.request for r in rounds if r.start == first[r.request].start} == set(prompts)
    assert ours.drafter.counters.restored == before + 4
    assert assert_cold(tiny_pair, {n: [*prompts[n], *t] for n, t in warm.items()}, rounds) >= 4


@pytest.mark.parametrize("length", [15_787, 60_000])
def test_long_prompts_need_pages_of_a_window(tiny_pair, engines, length):
    """Near 15.5K tokens engines that count the drafter's pages by the sequence have stopped admitting."""
    sizes = {"max_model_len": 65_536, "max_num_batched_tokens": 4096, "max_num_seqs": 2}
    ours, plain = engines(*tiny_pair, **sizes), engines(tiny_pair[0], None, **sizes)
    rng = random.Random(length)
    prompt = {"long": [rng.randrange(256) for _ in range(length)]}
    most = 0
    step = ours.engine.step

    def watched():
        nonlocal most
        out = step()
        most = max(most, ours.drafter.kv.pages_in_use)
        return out

    ours.engine.step = watched
    try:
        got = ours.run(prompt, greedy(8))
    finally:
        del ours.engine.step
    assert len(got["long"]) == 8
    assert 0 < most <= -(-WINDOW // 16) + 2
    assert ours.drafter.counters.rounds > 0
    if length < 20_000:
        assert got == plain.run(prompt, greedy(8))
    kv = [e.core.scheduler.kv_cache_config for e in (ours, plain)]
    assert kv[0].num_blocks == kv[1].num_blocks
    assert [g.layer_names for g in kv[0].kv_cache_groups] == [g.layer_names for g in kv[1].kv_cache_groups]


def test_v1_drafts_are_those_of_vllm_itself(tmp_path, engines):
    """A DFlash v1 drafter of full attention, against vLLM's own proposer in another process, hits included.

    Weights of q_norm and k_norm are 1: with others vLLM 0.32's own drafts on CPUs differ (243 of 285 rows) from ours,
    which tests/model holds to the published implementation.
    """
    full = {"layer_types": ("full_attention",) * 2, "sliding_window": None}
    pair = make_pair(tmp_path, architecture="DFlashDraftModel", plain_qk=True, **full)
    prompts = conversation(12, seed=3)
    told = tmp_path / "task.json"
    told.write_text(json.dumps({"pair": pair, "prompts": prompts, "tokens": 24}))
    environment = os.environ | {"DFLASH2_VLLM": "off", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parent / "in_tree.py"
    done = subprocess.run(
        [sys.executable, str(script), str(told)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = engines(*pair)
    with ours.recorded() as (rounds, _):
        first = ours.run(prompts, greedy(24))
        again = ours.run(prompts, greedy(24))  # prefix hits of nearly all of the prompt
    assert first == again == theirs["tokens"]
    mine = {f"{r.request} {r.end} {r.anchor}": r.drafts for r in rounds}
    common = mine.keys() & theirs["drafts"].keys()
    assert len(common) > 250
    assert {key for key in common if mine[key] != theirs["drafts"][key]} == set()
    assert ours.drafter.counters.restored >= 5


def test_the_output_is_the_engines_without_prefix_caching_too(tiny_pair, engines):
    ours, plain = (engines(tiny_pair[0], d, enable_prefix_caching=False) for d in (tiny_pair[1], None))
    prompts = conversation(12, seed=8)
    assert ours.drafter.kv.store is None
    with ours.recorded() as (rounds, _):
        got = ours.run(prompts, greedy(20))
    assert got == plain.run(prompts, greedy(20))
    assert assert_cold(tiny_pair, {n: [*prompts[n], *t] for n, t in got.items()}, rounds) > 150


def test_reused_request_ids_begin_anew(tiny_pair, engines):
    ours: Engine = engines(*tiny_pair)
    prompts = conversation(2, seed=21)
    a, b = prompts["r0"], prompts["r1"]
    ours.names = iter([77] * 4)
    with ours.recorded() as (rounds, _):
        first = ours.run({"same": a}, greedy(10))
        ours.names = iter([77] * 4)
        second = ours.run({"same": b}, greedy(10))
    ours.names = iter(range(1000, 1 << 30))
    split = next(i for i, r in enumerate(rounds) if r.end == len(b))
    if len(a) == len(b):
        split = len(rounds) // 2
    assert_cold(tiny_pair, {"same": [*a, *first["same"]]}, rounds[:split])
    assert_cold(tiny_pair, {"same": [*b, *second["same"]]}, rounds[split:])


def test_one_request_at_the_longest_length_does_not_disturb_others(tiny_pair, engines):
    sizes = {"max_model_len": 128}
    ours, plain = engines(*tiny_pair, **sizes), engines(tiny_pair[0], None, **sizes)
    rng = random.Random(9)
    prompts = {f"r{i}": [rng.randrange(256) for _ in range(n)] for i, n in enumerate((117, 40, 20, 121))}
    with ours.recorded() as (rounds, _):
        got = ours.run(prompts, greedy(60))
    assert got == plain.run(prompts, greedy(60))
    assert [len(got[n]) + len(p) for n, p in prompts.items()] == [128, 100, 80, 128]
    ends = sorted(r.end for r in rounds if r.request == "r2")
    assert max(b - a for a, b in pairwise(ends)) <= K + 1  # no step without drafts
    assert_cold(tiny_pair, {n: [*prompts[n], *t] for n, t in got.items()}, rounds)


@pytest.mark.parametrize("graphs", [(), (1, 2, 4)], ids=str)
def test_positions_on_the_device(tiny_pair, engines, monkeypatch, graphs):
    """What the V1 runner does on GPUs, with CPU tensors that count as an accelerator's, and with what graphs replay."""
    plain, ours = engines(tiny_pair[0], None, **CROWDED), engines(*tiny_pair, max_num_seqs=6, **CROWDED)
    prompts = conversation(60, seed=2)
    monkeypatch.setattr(ours.runner.drafter, "live", True)
    step = ours.drafter.step

    def on_device(*args, **kw):
        with cpu_as_device():
            return step(*args, **kw)

    monkeypatch.setattr(ours.drafter, "step", on_device)
    aborts = {f"r{i}": 1 + i % 9 for i in range(0, 60, 7)}
    rounds: list[Round] = []
    noted = Noted(ours, rounds)
    for name in ("propose", "append_and_propose"):
        monkeypatch.setattr(ours.drafter.drafter, name, getattr(noted, name))
    monkeypatch.setattr(ours.drafter.kv, "captured", None)
    if graphs:
        stand_in_graphs.capture(monkeypatch, ours.drafter.drafter, ours.drafter.kv, graphs, K)
    got = ours.run(prompts, greedy(24), aborts=aborts, arrivals=3)
    turn = {f"s{i}": [*prompts[f"r{i}"], *got[f"r{i}"], 65, 66, 67] for i in range(1, 5)}
    more = ours.run(turn, greedy(8))
    expected = plain.run(prompts | turn, greedy(24))
    assert all(t == expected[n][: len(t)] for n, t in (got | more).items())
    assert ours.metric("num_preemptions") > 0
    counters = ours.drafter.counters
    assert (counters.failures, ours.drafter.invalid, counters.holes) == ({}, 0, 0)
    assert counters.restored > 10
    assert (noted.in_one > 200) == bool(graphs)
    assert ours.drafter.kv.pages_in_use == 0
    assert assert_cold(tiny_pair, {n: [*(prompts | turn)[n], *t] for n, t in (got | more).items()}, rounds) > 700


class Noted:
    """Calls of the drafter that also note what it drafted, for requests whose positions the host has to ask for."""

    def __init__(self, engine: Engine, rounds: list[Round]):
        self.engine, self.rounds, drafter = engine, rounds, engine.drafter.drafter
        self._propose, self._both, self.in_one = drafter.propose, drafter.append_and_propose, 0

    def propose(self, kv, seqs, anchors, starts, *args, **kw):
        out = self._propose(kv, seqs, anchors, starts, *args, **kw)
        self._note(seqs, anchors, starts, out)
        return out

    def append_and_propose(self, kv, seqs, taps, starts, lengths, valid, anchors, *args, **kw):
        out = self._both(kv, seqs, taps, starts, lengths, valid, anchors, *args, **kw)
        if out is not None:
            self.in_one += len(seqs)
            self._note(seqs, anchors, starts + valid, out)
        return out

    def _note(self, seqs, anchors, starts, out) -> None:
        names = {seq: request for request, seq in self.engine.drafter.contexts._open.items()}
        for i, seq in enumerate(seqs):
            end, anchor = int(starts[i]), int(anchors[i])
            self.rounds.append(Round(named(names[seq]), end, anchor, out.tokens[i].tolist(), end))
