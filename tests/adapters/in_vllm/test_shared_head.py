"""One int8 head for target and drafter, the 16-bit one gone; refused where the embedding needs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapters.cold import conversation
from engine import Engine
from safetensors.torch import load_file, save_file
from test_greedy import greedy

from dflash2 import Int8LMHead
from dflash2.adapters.vllm.settings import Settings
from dflash2.errors import ConfigError


def test_a_shared_head_computes_the_targets_logits(tiny_pair, monkeypatch):
    monkeypatch.setenv("DFLASH2_INT8_LM_HEAD", "1")
    ours = Engine(*tiny_pair)
    lm_head = ours.runner.model.lm_head
    head = ours.drafter.drafter._head[0]
    assert isinstance(head, Int8LMHead)
    assert lm_head.weight.numel() == 0
    assert head.freed_bytes > head.weight.nbytes
    seen = []
    apply = lm_head.quant_method.apply
    monkeypatch.setattr(lm_head.quant_method, "apply", lambda *a, **kw: seen.append(apply(*a, **kw)) or seen[-1])
    prompts = conversation(6, seed=40)
    got = ours.run(prompts, greedy(16))
    assert seen
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32)
    reference.lm_head = Int8LMHead.from_linear(reference.lm_head)
    for name, prompt in prompts.items():
        text = torch.tensor([[*prompt, *got[name]]])
        with torch.no_grad():
            logits = reference(text).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits.gather(-1, torch.tensor(got[name])[:, None])[:, 0]
        assert ((best - chosen) < 1e-3 * best.abs()).all()


def test_a_copy_for_drafts_leaves_the_output_alone(tiny_pair, engines):
    ours, plain = engines(*tiny_pair, plugin={"int8_head": "drafts"}), engines(tiny_pair[0], None)
    prompts = conversation(6, seed=41)
    assert ours.run(prompts, greedy(16)) == plain.run(prompts, greedy(16))


def test_a_tied_head_is_refused_with_the_reason(tiny_pair, tmp_path):
    source = Path(tiny_pair[0])
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r'int8_head "shared": .*tied to its embedding.*cannot be freed.*"drafts"'):
        Engine(str(tmp_path), tiny_pair[1], plugin={"int8_head": "shared"})


def test_settings_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("DFLASH2_INT8_LM_HEAD", "1")
    assert Settings.of({}).int8_head == "shared"
    assert Settings.of({"dflash2": {"int8_head": "off"}}).int8_head == "off"
    with pytest.raises(ConfigError, match="expected one of"):
        Settings.of({"dflash2": {"int8_head": "both"}})
