"""SmolLM2-135M and the drafter that ships with this package: drafts in the engine are as good as outside of it."""

from __future__ import annotations

import pytest
import torch
from test_greedy import greedy

import dflash2
from dflash2.checkpoint_files import DEFAULT_DRAFTER, find
from dflash2.prompts import load_prompts, prompt_ids

K, TOKENS = 7, 96


@pytest.mark.slow
def test_acceptance_is_that_of_the_stand_alone_loop(engines):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str(dflash2.embedded_target())
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = {f"r{i}": prompt_ids(tokenizer, p["turns"][0]) for i, p in enumerate(load_prompts("builtin", 6))}
    ours = engines(path, str(find(DEFAULT_DRAFTER)), k=K, max_model_len=1024, max_num_batched_tokens=128)
    with ours.recorded() as (rounds, _):
        got = ours.run(prompts, greedy(TOKENS))
    drafts, accepted = (ours.metric(f"spec_decode_num_{n}") for n in ("drafts", "accepted_tokens"))
    in_engine = 1 + accepted / drafts

    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    drafter = dflash2.DFlash2Drafter.from_pretrained(DEFAULT_DRAFTER, dtype=torch.float32)
    produced = made = 0
    for name, ids in prompts.items():
        out = dflash2.generate(
            target, drafter, torch.tensor([ids]), max_new_tokens=TOKENS, num_draft_tokens=K, eos_token_id=[]
        )
        assert out.sequences[0, len(ids) :].tolist() == got[name]
        produced, made = produced + sum(out.acceptance_lengths[0]), made + len(out.acceptance_lengths[0])
    assert in_engine > 1.8
    assert abs(in_engine / (produced / made) - 1) < 0.03
    assert len(rounds) >= drafts
