"""Sampled requests: the engine's own distribution, whatever is drafted, and every option as without a drafter."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter

import pytest
from adapters.cold import conversation
from adapters.homogeneity import homogeneity
from test_greedy import greedy

SAMPLES = 20_000
BATCH = {
    "skip_tokenizer_init": True, "max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 64,
    "enable_prefix_caching": False, "disable_log_stats": False,
}  # fmt: skip
PROMPT = [3, 9, 1, 14, 7]


def samples(engine, params, count: int = SAMPLES) -> list[tuple[int, ...]]:
    prompts = {f"s{i}": PROMPT for i in range(count)}
    return [tuple(t) for t in engine.run(prompts, params, arrivals=256).values()]


def sampled(tokens: int, **kw):
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 1.3, "max_tokens": tokens, "ignore_eos": True, "detokenize": False} | kw)


@pytest.fixture(scope="module")
def without_drafter(small_vocabulary, engines):
    return samples(engines(small_vocabulary[0], None, seed=1, **BATCH), sampled(3))


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_the_distribution_is_the_engines_own(small_vocabulary, engines, without_drafter, method):
    ours = engines(*small_vocabulary, method=method, seed=2, **BATCH)
    got = samples(ours, sampled(3))
    accepted = ours.metric("spec_decode_num_accepted_tokens") / ours.metric("spec_decode_num_draft_tokens")
    assert 0.02 < accepted < 0.98  # both outcomes of a test of a draft are there
    for positions in [(0,), (1,), (2,), (0, 1), (1, 2)]:
        pick = [Counter(tuple(s[i] for i in positions) for s in run) for run in (got, without_drafter)]
        assert homogeneity(*pick) > 1e-3, positions


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_greedy_requests_in_a_sampled_batch_stay_greedy(tiny_pair, engines, method):
    prompts = conversation(16, seed=4)
    ours, plain = engines(*tiny_pair, method=method), engines(tiny_pair[0], None)
    params = {n: greedy(16) if i % 2 else sampled(16, temperature=0.9) for i, n in enumerate(prompts)}
    with ours.recorded() as (rounds, chunks):
        got = ours.run(prompts, params)
    expected = plain.run(prompts, greedy(16))
    assert all(got[n] == expected[n] for i, n in enumerate(prompts) if i % 2)
    assert {c.temperature > 0 for c in chunks} == ({True, False} if method == "probabilistic" else {False})
    assert rounds


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.8}], ids=str)
def test_truncated_sampling(small_vocabulary, engines, options):
    plain = engines(small_vocabulary[0], None, seed=1, **BATCH)
    ours = engines(*small_vocabulary, method="probabilistic", seed=2, **BATCH)
    a, b = (samples(e, sampled(3, **options), 4000) for e in (plain, ours))
    assert {s[:1] for s in b} <= {s[:1] for s in a}
    for positions in [(0,), (1,), (2,), (1, 2)]:
        pick = [Counter(tuple(s[i] for i in positions) for s in run) for run in (a, b)]
        assert homogeneity(*pick) > 1e-3, positions


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_options_that_greedy_requests_can_show(tiny_pair, engines, method):
    """Penalties, banned and biased tokens, stops, shortest and longest outputs: token for token."""
    ours, plain = engines(*tiny_pair, method=method), engines(tiny_pair[0], None)
    prompts = conversation(6, seed=12)
    for options in (
        {"repetition_penalty": 1.7}, {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"bad_words": ["a", "b"]}, {"min_tokens": 5, "stop_token_ids": list(range(0, 256, 9))},
    ):  # fmt: skip
        assert ours.run(prompts, greedy(20, **options)) == plain.run(prompts, greedy(20, **options)), options


def test_logprobs(tiny_pair, engines):
    ours, plain = engines(*tiny_pair, method="probabilistic"), engines(tiny_pair[0], None)
    prompts = conversation(5, seed=14)
    found = []
    for e in (ours, plain):
        e.run(prompts, greedy(12, logprobs=3))
        found.append({n: out.outputs[0].logprobs for n, out in e.outputs.items()})
    for name in prompts:
        for mine, theirs in zip(*(f[name] for f in found), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(abs(mine[t].logprob - theirs[t].logprob) < 1e-3 for t in mine)


def test_seeds_repeat(tiny_pair, engines):
    """Prompts in one piece: on CPUs vLLM itself ends at a seeded request whose prompt takes several steps."""
    ours = engines(*tiny_pair, method="greedy", max_num_batched_tokens=1024)
    prompts = conversation(4, seed=15)
    first, second = (ours.run(prompts, sampled(16, seed=11)) for _ in range(2))
    assert first == second
    assert ours.run(prompts, sampled(16, seed=12)) != first


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_structured_output(tiny_pair, engines, method):
    from vllm.sampling_params import StructuredOutputsParams

    ours, plain = engines(*tiny_pair, method=method), engines(tiny_pair[0], None)
    prompts = conversation(4, seed=16)
    texts = []
    for e, (temperature, pattern) in itertools.product((ours, plain), ((0.0, r"\d{3}-[abc]{4}"), (1.2, r"[xy]{6}z"))):
        form = StructuredOutputsParams(regex=pattern)
        e.run(prompts, sampled(16, temperature=temperature, ignore_eos=False, structured_outputs=form))
        decode = e.llm.get_tokenizer().decode
        texts.append({n: decode(o.outputs[0].token_ids, skip_special_tokens=True) for n, o in e.outputs.items()})
    assert texts[0] == texts[2]  # the greedy ones
    assert all(re.fullmatch(r"\d{3}-[abc]{4}", t) for t in texts[0].values()), json.dumps(texts[0])
    assert all(re.fullmatch(r"[xy]{6}z", t) for t in texts[1].values()), json.dumps(texts[1])
