"""Requests in a real engine: its own output, drafts from the whole context, memory that stays at a window."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from adapters import cold
from adapters.cold import Round, assert_cold
from adapters.homogeneity import homogeneity
from adapters.pairs import WINDOW, K

import dflash2
from dflash2.checkpoint_files import DEFAULT_DRAFTER, find
from dflash2.prompts import load_prompts, prompt_ids

PAGE = 16
#: 4 requests of up to 190 tokens and one block of slack each do not fit: some have to give up theirs.
CROWDED = {"max_total_tokens": 420, "max_running_requests": 6, "schedule_conservativeness": 0.05}
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
conversation = partial(cold.conversation, tokens=31)  # the pair's last token is the mask


def lacks_rows(steps: list[dict], r: Round) -> bool:
    """Whether a round may see fewer rows than a cold one: after a retraction a request begins where the radix cache
    ends, which may be inside a page whose other rows came on the device, and only whole pages are stored."""
    begins = [c[1] for s in steps for c in s["chunks"] if c[0] == r.request and c[2] != K + 1 and c[1] % PAGE]
    return any(start <= r.end < start + WINDOW + K for start in begins[1:])


def test_50_greedy_requests_with_shared_prefixes(tiny_pair, engines):
    """Token-identical to the engine without a drafter, every draft as from a cold context; the radix cache is on."""
    plain, ours = engines(tiny_pair[0], None), engines(*tiny_pair)
    prompts = conversation(50)
    expected = list(plain.run(prompts, GREEDY).values())
    for concurrency in (1, 2, 4):
        mine = {f"c{concurrency}-{name}": p for name, p in prompts.items()}
        got = ours.run(mine, GREEDY, concurrency)
        assert list(got.values()) == expected, concurrency
    cached = [ours.outputs[n]["meta_info"]["cached_tokens"] for n in mine]
    assert sum(c > 0 for c in cached) > 30
    assert ours.tokens_per_pass(mine) > 1.01
    assert assert_cold(tiny_pair, {n: [*p, *got[n]] for n, p in mine.items()}, ours.rounds(mine)) > 700
    last = ours.steps()[-1]
    assert (last["failures"], last["failed_steps"], last["invalid"], last["counters"]["holes"]) == ({}, 0, 0, 0)
    assert last["counters"]["restored"] > 60


def test_overlapped_schedule_retraction_and_aborts(tiny_pair, engines):
    """A step is prepared before the last one is known, and the pool is too small for what is admitted."""
    plain = engines(tiny_pair[0], None)
    ours = engines(*tiny_pair, **CROWDED, disable_overlap_schedule=False, variables={"DFLASH2_TEST_OVERLAP": "1"})
    prompts = conversation(30, seed=2, name="x")
    params = {"temperature": 0.0, "max_new_tokens": 60}  # with ignore_eos SGLang admits only what must fit
    aborts = {f"x{i}": 1 + i % 9 for i in range(0, 30, 7)}
    expected, got = plain.run(prompts, params), ours.run(prompts, params, concurrency=6, aborts=aborts)
    for name, tokens in got.items():
        assert tokens == expected[name][: len(tokens)], name
        assert len(tokens) == 60 or name in aborts
    assert sum(ours.outputs[n]["meta_info"]["num_retractions"] for n in prompts if n not in aborts) > 0
    whole = [r for r in ours.rounds(prompts) if not lacks_rows(ours.steps(), r)]
    assert assert_cold(tiny_pair, {n: [*p, *got[n]] for n, p in prompts.items()}, whole) > 700
    ours.run(conversation(2, seed=5, name="last"), GREEDY)
    steps = ours.steps()
    assert max(s["pages"] for s in steps) <= 6 * (-(-WINDOW // 16) + 2)
    last = steps[-1]
    assert (last["failures"], last["failed_steps"], last["invalid"]) == ({}, 0, 0)
    assert last["requests"] <= 2


def test_a_request_that_fails_goes_without_drafts(tiny_pair, engines):
    plain = engines(tiny_pair[0], None)
    ours = engines(*tiny_pair)
    prompts = conversation(4, seed=4, name="failing")
    assert ours.run(prompts, GREEDY) == plain.run(prompts, GREEDY)
    got = {name: len(ours.rounds([name])) for name in prompts}
    assert got["failing0"] == 0
    assert all(n > 5 for name, n in got.items() if name != "failing0")
    assert ours.steps()[-1]["failures"]["ValueError"] >= 5


def test_ids_can_be_used_again(tiny_pair, engines):
    plain, ours = engines(tiny_pair[0], None), engines(*tiny_pair)
    first, second = (conversation(2, seed=s, name="same") for s in (21, 22))
    for prompts in (first, second):
        assert ours.run(prompts, GREEDY) == plain.run(prompts, GREEDY)


def test_the_distribution_is_the_engines_own(tiny_pair, engines):
    """Sampled requests, whole and truncated; greedy ones beside them stay greedy."""
    plain, ours = engines(tiny_pair[0], None), engines(*tiny_pair)
    prompt = conversation(1, seed=6)["r0"]
    for n, options in enumerate(({}, {"top_k": 4}, {"top_p": 0.6, "min_p": 0.05})):
        params = {"temperature": 0.9, "max_new_tokens": 3, "ignore_eos": True} | options
        runs = []
        for engine in (plain, ours):
            prompts = {f"s{n}-{i}": prompt for i in range(500)}
            runs.append([tuple(t) for t in engine.run(prompts, params, concurrency=16).values()])
        for places in [(0,), (1,), (2,), (1, 2)]:
            a, b = (Counter(tuple(s[i] for i in places) for s in run) for run in runs)
            assert homogeneity(a, b) > 1e-3, (options, places)
    mixed = conversation(12, seed=7, name="m")
    params = {n: GREEDY if i % 2 else GREEDY | {"temperature": 0.8} for i, n in enumerate(mixed)}
    got, expected = ours.run(mixed, params), plain.run(mixed, GREEDY)
    assert all(got[n] == expected[n] for i, n in enumerate(mixed) if i % 2)
    assert {t > 0 for s in ours.steps() for t in s["temperatures"]} == {True, False}


def test_requests_that_cannot_be_exact_are_refused(tiny_pair, engines):
    ours = engines(*tiny_pair)
    ours.run(conversation(1, seed=8, name="p"), GREEDY | {"frequency_penalty": 0.5})
    reason = ours.outputs["p0"]["meta_info"]["finish_reason"]
    assert reason["type"] == "abort"
    assert "frequency_penalty: SGLang does not count" in reason["message"]
    assert len(ours.run(conversation(1, seed=8, name="q"), GREEDY)["q0"]) == 24


@pytest.mark.slow
def test_acceptance_is_that_of_the_stand_alone_loop(engines):
    """SmolLM2-135M and the drafter that ships with this package."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str(dflash2.embedded_target())
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = {f"t{i}": prompt_ids(tokenizer, p["turns"][0]) for i, p in enumerate(load_prompts("builtin", 3))}
    ours = engines(path, str(find(DEFAULT_DRAFTER)))
    got = ours.run(prompts, GREEDY | {"max_new_tokens": 48})
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    drafter = dflash2.DFlash2Drafter.from_pretrained(DEFAULT_DRAFTER, dtype=torch.float32)
    lengths: list[int] = []
    for name, ids in prompts.items():
        out = dflash2.generate(target, drafter, torch.tensor([ids]), max_new_tokens=48, eos_token_id=[])
        assert out.sequences[0, len(ids) :].tolist() == got[name]
        lengths += out.acceptance_lengths[0]
    assert ours.tokens_per_pass(prompts) > 1.8
    assert abs(ours.tokens_per_pass(prompts) / (sum(lengths) / len(lengths)) - 1) < 0.03


def test_the_algorithm_is_registered_once_and_answers_like_one_of_sglangs():
    import copy

    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from dflash2.adapters.sglang import register

    register()
    register()
    ours = SpeculativeAlgorithm.from_string("dflash2")
    assert ours.is_dflash_family()
    assert not ours.is_dflash()
    assert ours.is_speculative()
    assert not ours.need_topk()
    assert type(copy.deepcopy(ours)) is type(ours)
