"""Two ranks, each a process with half of the vocabulary: the same drafts and outputs as one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest
from adapters.cold import Round
from engine import Engine, named

SETTINGS = {"enforce_eager": True, "max_num_seqs": 4}


def start_recording(worker) -> None:
    """On a rank: keep every round of drafts, and lose a request on rank 1 only if its name says so."""
    proposer = worker.model_runner.drafter
    core, rank = proposer.core, worker.rank
    step, append, worker.rounds = core.step, core._append, []

    def recording(given, taps, *args, **kw):
        out = step(given, taps, *args, **kw)
        for i, c in enumerate(given):
            if c.anchor is not None and bool(out.drafted[i]):
                worker.rounds.append((named(c.request), c.start + c.valid, c.anchor, out.tokens[i].tolist(), c.start))
        return out

    def failing(some, taps):
        if rank == 1 and any(named(p.chunk.request).startswith("lost") for p in some):
            raise RuntimeError("only here")
        append(some, taps)

    core.step, core._append = recording, failing


def recorded(worker) -> tuple[list[tuple], dict]:
    """Since it was asked last; and the counters."""
    rounds, worker.rounds = worker.rounds, []
    proposer = worker.model_runner.drafter
    counters = {**vars(proposer.core.counters), "pages_in_use": proposer.core.kv.pages_in_use}
    return rounds, {**counters, "failed_steps": proposer.guard.failed_steps}


def break_the_pass(worker) -> None:
    def propose(*args, **kwargs):
        raise RuntimeError("out of memory, say")

    if worker.rank == 1:
        worker.model_runner.drafter.core.drafter.propose = propose


@pytest.fixture(scope="module")
def two(tiny_pair) -> Iterator[Engine]:
    from vllm import envs

    envs.disable_envs_cache()  # an engine of another test may have filled it
    with pytest.MonkeyPatch.context() as m:
        m.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions of this file run in vLLM's workers
        m.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        m.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        made = Engine(*tiny_pair, tensor_parallel_size=2, method="probabilistic", **SETTINGS)
        made.llm.collective_rpc(start_recording)
        yield made
        made.core.shutdown()


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    """Longer than a step takes, with a common head that prefix caching finds."""
    rng = random.Random(5)
    head = [rng.randrange(256) for _ in range(70)]
    return {f"r{i}": (head if i % 2 else []) + [rng.randrange(256) for _ in range(20 + 9 * i)] for i in range(6)}


def greedy(tokens: int):
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def by_place(rounds: Iterable[Round]) -> dict[tuple, list[int]]:
    return {(r.request, r.end, r.anchor): r.drafts for r in rounds}


def test_greedy_drafts_and_outputs(two, engines, tiny_pair, prompts):
    one = engines(*tiny_pair, method="probabilistic", **SETTINGS)
    with one.recorded() as (expected, _):
        tokens = [one.run(prompts, greedy(16)) for _ in range(2)]
    assert [two.run(prompts, greedy(16)) for _ in range(2)] == tokens
    (first, counters), (second, same_counters) = two.llm.collective_rpc(recorded)
    assert first == second
    assert counters == same_counters
    assert by_place(Round(*x) for x in first) == by_place(expected)
    assert len(first) > 100
    assert counters["restored"] >= 3
    assert (counters["failures"], counters["failed_steps"], counters["pages_in_use"]) == ({}, 0, 0)


def test_sampled_drafts_are_the_same_on_all_ranks(two, prompts):
    from vllm import SamplingParams

    params = {n: SamplingParams(temperature=0.9 * (i % 3), max_tokens=16) for i, n in enumerate(prompts)}
    two.run(prompts, params)
    (first, counters), (second, _) = two.llm.collective_rpc(recorded)
    assert first == second
    assert len(first) > 60
    assert counters["failures"] == {}


def test_what_one_rank_cannot_follow_no_rank_drafts_for(two, prompts):
    mixed = {"lost": prompts["r1"], "kept": prompts["r2"]}
    expected = two.run({n[::-1]: p for n, p in mixed.items()}, greedy(12))
    two.llm.collective_rpc(recorded)
    assert two.run(mixed, greedy(12)) == {n[::-1]: t for n, t in expected.items()}
    (first, counters), (second, other) = two.llm.collective_rpc(recorded)
    assert first == second
    assert {request for request, *_ in first} == {"kept"}
    assert counters == other
    assert counters["failures"]["RuntimeError"] > 1
    assert (counters["failed_steps"], counters["pages_in_use"]) == (0, 0)


def test_a_rank_that_fails_in_the_pass_ends_the_engine(two, prompts):
    """The others wait for it in the head, and would take its next message for an answer. Comes last."""
    two.llm.collective_rpc(break_the_pass)
    with pytest.raises(Exception, match=r"cancelled|died|EngineCore|[Ww]orker"):
        two.run({"r0": prompts["r0"]}, greedy(4))
