from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dflash2.errors import ConfigError
from dflash2.training.data import load_shards
from dflash2.training.decode import LlamaDecoder
from dflash2.training.synth import Answer, Request, answer, main, read_prompts, write_shard


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 61, rng.integers(1, 23)).tolist() for _ in range(count)]


def decoder(model, *, rows=3, budget=20, eos=(2,)):
    return LlamaDecoder(model, rows=rows, max_tokens=23 + budget, max_new_tokens=budget, eos=eos, graphs=False)


def generated(model, prompt: list[int], budget: int, eos: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=budget,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("rows", [1, 3, 11])
def test_greedy_answers_are_those_of_generate(toy_llama, rows):
    asked = [Request(p, 0.0) for p in prompts(11)]
    # An id that the model often says, so that answers end at many lengths and rows are refilled at odd times.
    said = [t for r in asked for t in generated(toy_llama, r.prompt, 20, 2)]
    eos = int(np.bincount(said).argsort()[-3])
    got = {tuple(a.request.prompt): a.tokens for a in answer(decoder(toy_llama, rows=rows, eos=(eos,)), asked)}
    assert got == {tuple(r.prompt): generated(toy_llama, r.prompt, 20, eos) for r in asked}
    assert len({len(t) for t in got.values()}) > 2


def test_temperatures_are_per_row(toy_llama):
    prompt = prompts(1)[0]
    asked = [Request(prompt, 0.0)] * 8 + [Request(prompt, 1.0)] * 8
    torch.manual_seed(1)
    got = list(answer(decoder(toy_llama, rows=16), asked))
    greedy = {tuple(a.tokens) for a in got if a.request.temperature == 0}
    assert greedy == {tuple(generated(toy_llama, prompt, 20, 2))}
    assert len({tuple(a.tokens) for a in got if a.request.temperature == 1}) > 4


def test_samples_follow_the_softmax(toy_llama):
    prompt, n = prompts(1)[0], 4000
    d = decoder(toy_llama, rows=n, budget=1)
    torch.manual_seed(3)
    d.start(torch.arange(n), [prompt] * n, torch.full((n,), 2.0))
    expected = (toy_llama(torch.tensor([prompt])).logits[0, -1] / 2).softmax(-1) * n
    seen = torch.bincount(d.answers[:, 0], minlength=61).float()
    big = expected > 5
    assert float(((seen - expected).square() / expected)[big].sum()) < 2 * int(big.sum())


def test_shards_read_back(tmp_path):
    answers = [Answer(Request([1, 5, 6], 0.0), [7, 2]), Answer(Request([1], 0.7), [9, 9, 9])]
    write_shard(tmp_path / "a.npz", answers, {"seed": 0})
    docs = load_shards([str(tmp_path / "*.npz")])
    assert docs.tokens.dtype == np.uint16
    assert [docs.document(i).tolist() for i in range(2)] == [[1, 5, 6, 7, 2], [1, 9, 9, 9]]
    assert docs.plens.tolist() == [3, 1]
    assert docs.temps.tolist() == pytest.approx([0, 0.7], abs=1e-3)
    assert not list(tmp_path.glob("*part*"))


def test_a_named_target_answers_prompts(toy_target_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH2_EMBEDDED_TARGET", str(toy_target_folder))
    file, out = tmp_path / "p.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps({"turns": [f"w{i} w7"]}) + "\n" for i in range(3, 8)))
    sizes = ["--rows", "2", "--max-prompt", "8", "--max-new-tokens", "5", "--device", "cpu"]
    main(["--target", "smollm2-135m", "--prompts", str(file), "--out", str(out), *sizes])
    docs = load_shards([str(out / "*.npz")])
    assert sorted(docs.document(i)[:2].tolist() for i in range(len(docs))) == [[i, 7] for i in range(3, 8)]
    made = json.loads((out / "synth0000.json").read_text())
    assert made["target"] == "smollm2-135m"
    assert made["documents"] == 5
    assert {"commit", "device", "torch", "transformers", "dflash2", "date"} <= set(made)


def test_other_architectures_are_refused(toy_llama):
    class Odd:
        config = type("C", (), {"model_type": "gpt2", "rope_parameters": {}, "hidden_act": "silu"})

        def named_parameters(self):
            return []

    with pytest.raises(ConfigError, match="gpt2"):
        LlamaDecoder(Odd(), rows=1, max_tokens=8, max_new_tokens=4, eos=(2,), graphs=False)


def test_prompts_without_turns_are_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"id": 1, "turns": ["hi"]}\n{"id": 2}\n')
    with pytest.raises(ConfigError, match="line 2 has no turns"):
        read_prompts([str(tmp_path / "p.jsonl")])
