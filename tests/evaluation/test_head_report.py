"""`dflash2 head-report`: flips and KL held against a second model whose head is the rounded one, by hand."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from test_generate import FAMILIES, V, target
from torch import Tensor, nn

from dflash2.errors import ConfigError
from dflash2.evaluation import head_report
from dflash2.evaluation.head_report import default_texts, measure_head, read_texts, table
from dflash2.lm_head import Int8LMHead

TEXT = [torch.randint(4, V, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 1, 23)]


class Tokens:
    """A tokenizer of single letters."""

    chat_template = None

    def __call__(self, texts: list[str]) -> dict:
        return {"input_ids": [[ord(c) - 32 for c in text if 32 <= ord(c) < 32 + V] for text in texts]}


def logits_under_both(model: nn.Module, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Two whole models: one as it is, one whose head holds the int8 grid."""
    other = copy.deepcopy(model)
    weight = model.get_output_embeddings().weight.detach()
    step = weight.abs().amax(1, keepdim=True) / 127
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight.data = step * (weight / step).round()
    other.lm_head = head
    tokens = torch.tensor([ids])
    return model(tokens).logits[0], other(tokens).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_it_is_what_two_models_would_say(family):
    """Gemma's softcap and every other family's way with logits included."""
    model = target(family)
    kl, flips, change, within, widest = [], 0, 0.0, 0, None
    for own, int8 in (logits_under_both(model, ids) for ids in TEXT):
        for a, b in zip(own.tolist(), int8.tolist(), strict=True):
            za, zb = (math.log(math.fsum(math.exp(x) for x in row)) for row in (a, b))
            kl.append(math.fsum(math.exp(x - za) * ((x - za) - (y - zb)) for x, y in zip(a, b, strict=True)))
            change = max(change, *(abs(x - y) for x, y in zip(a, b, strict=True)))
            if a.index(max(a)) != b.index(max(b)):
                best, runner_up = sorted(a)[-1], sorted(a)[-2]
                flips, widest = flips + 1, max(widest or 0.0, best - runner_up)
                within += best - runner_up <= 2 ** (math.floor(math.log2(abs(best))) - 7)
    found = measure_head(model, TEXT)
    assert (found.tokens, found.flips, found.flips_within_rounding) == (64, flips, within)
    assert found.kl_mean == pytest.approx(sum(kl) / len(kl), rel=1e-3, abs=1e-6)
    assert found.kl_max == pytest.approx(max(kl), rel=1e-3, abs=1e-6)
    assert found.kl_median == pytest.approx(sum(sorted(kl)[31:33]) / 2, rel=1e-3, abs=1e-6)
    assert found.kl_median <= found.kl_p99 <= found.kl_max
    assert found.max_logit_change == pytest.approx(change, rel=1e-3)
    assert found.widest_flip == (widest if widest is None else pytest.approx(widest, abs=1e-4))
    assert found.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def test_flips_are_counted(monkeypatch):
    """A head so coarse that it must flip: every weight rounded to -1, 0 or 1 times the largest."""
    model = target("qwen3")

    def coarse(model: nn.Module) -> Int8LMHead:
        weight = model.get_output_embeddings().weight.detach()
        scale = weight.abs().amax(1)
        return Int8LMHead((weight / scale[:, None]).round().to(torch.int8), scale)

    monkeypatch.setattr(head_report, "int8_head", coarse)
    found = measure_head(model, TEXT)
    assert 0 < found.flips < found.tokens
    assert found.flips_within_rounding < found.flips
    assert found.widest_flip > 0
    assert found.kl_mean > 0.01


def test_a_head_that_is_on_the_grid_changes_nothing():
    model = copy.deepcopy(target("qwen3"))
    weight = torch.randint(-127, 128, (V, 32), generator=torch.Generator().manual_seed(0)).float()
    weight[:, 0] = 127
    model.get_output_embeddings().weight.data = 2**-9 * weight
    found = measure_head(model, TEXT)
    assert (found.flips, found.widest_flip) == (0, None)
    # What is left is the rounding of the rows to 16-bit integers, half a step: 2^-16 of a row's largest value, times
    # the sum of a weight row's sizes. Normed rows stay below sqrt(32).
    bound = 2**-16 * 32**0.5 * float((2**-9 * weight).abs().sum(1).max())
    assert found.max_logit_change < bound
    assert 0 <= found.kl_max < bound
    assert (found.head_bytes, found.int8_bytes) == (V * 32 * 4, V * 32 + V * 4)


def test_the_target_is_left_as_it_was():
    model = target("gemma2")
    before = model(torch.tensor([TEXT[0]])).logits
    measure_head(model, TEXT)
    assert torch.equal(model(torch.tensor([TEXT[0]])).logits, before)
    with pytest.raises(ConfigError):
        measure_head(model, [])
    assert torch.equal(model(torch.tensor([TEXT[0]])).logits, before)


def test_rounding_steps():
    values = torch.tensor([1.0, 1.99, 2.0, -20.0, 0.75])
    assert head_report._step(values, torch.bfloat16).tolist() == [2**-7, 2**-7, 2**-6, 2**-3, 2**-8]
    assert head_report._step(values, torch.float32).tolist() == head_report._step(values, torch.bfloat16).tolist()
    assert head_report._step(values, torch.float16)[0] == 2**-10
    for kind in (torch.bfloat16, torch.float16):
        exact = torch.tensor([20.0, 1.5, 0.3]).to(kind)
        above = torch.nextafter(exact, torch.full_like(exact, torch.inf))
        assert torch.equal(head_report._step(exact.float(), kind), (above - exact).float())


def test_tokens_that_are_ruled_out():
    own = torch.tensor([[1.0, 2.0, -torch.inf], [0.0, -torch.inf, 3.0]])
    kl, flip, gap, _, change = head_report._compare(own, own + torch.tensor([[0.0], [1.0]]), torch.float32)
    assert kl.abs().max() < 1e-12
    assert (flip.tolist(), gap.tolist(), change.tolist()) == ([False, False], [1.0, 3.0], [0.0, 1.0])


def test_segments():
    ids = list(range(4, 44)) * 30
    text = "".join(chr(32 + i) for i in ids)
    parts = list(head_report._encode(Tokens(), [{"text": text}, {"turns": ["ABC"]}, {"text": text}], 1300))
    assert [len(p) for p in parts] == [512, 512, 176, 3, 97]
    assert [*parts[0], *parts[1], *parts[2]] == ids
    assert parts[4] == ids[:97]


def test_default_texts_travel_with_the_package():
    texts = read_texts(default_texts())
    assert sum(len(t["text"]) for t in texts) > 4 * 3000, "a few thousand tokens"


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("none.txt", None, "none.txt cannot be read as UTF-8 text"),
        ("a.txt", b" \n", "a.txt is empty"),
        ("b.txt", b"\xff\xfe\x00", "b.txt cannot be read as UTF-8"),
        ("c.jsonl", b"{}", "line 1 has no turns"),
        ("d.jsonl", None, "d.jsonl cannot be read as JSON lines"),
    ],
)
def test_files_that_are_no_text(name, content, match, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=match):
        read_texts([tmp_path / name])


def test_heads_that_cannot_be_measured():
    base = target("llama").model
    with pytest.raises(ConfigError, match="LlamaModel has no output head: expected a causal LM"):
        measure_head(base, TEXT)
    with pytest.raises(ConfigError, match="has no tokens"):
        measure_head(target("llama"), [])
    model = copy.deepcopy(target("qwen3"))
    head = model.get_output_embeddings()
    model.set_output_embeddings(Int8LMHead.from_linear(head))
    with pytest.raises(ConfigError, match=r"head is torch.int8 already: load the target in 16 bits"):
        measure_head(model, TEXT)
    model.set_output_embeddings(nn.Identity())
    with pytest.raises(ConfigError, match="a Identity without a weight as its head"):
        measure_head(model, TEXT)
    model.set_output_embeddings(head)
    model.forward = lambda input_ids, use_cache: target("qwen3")(input_ids)
    with pytest.raises(ConfigError, match="does not call its head as a module"):
        measure_head(model, TEXT)
    model = copy.deepcopy(target("qwen3"))
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(ConfigError, match="logits are not finite on this text"):
        measure_head(model, TEXT)


def test_table_and_json():
    from dataclasses import asdict

    found = {"target": "m", **asdict(measure_head(target("llama"), TEXT)), "texts": [{"file": "a.txt"}]}
    lines = table(found).splitlines()
    assert lines[0] == "m: int8 head beside its own (float32), 64 positions of a.txt"
    assert [line.split("  ")[1] for line in lines[1:]] == [
        "next token differs", "KL, nats", "largest change of a logit", "bytes"
    ]  # fmt: skip
    assert lines[4].endswith("6,400 -> 1,800 (tied to the embedding: the first stays)")
    assert json.loads(json.dumps(found)) == found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_the_gpu(dtype):
    model = copy.deepcopy(target("gemma2")).to("cuda", dtype)
    found, cpu = measure_head(model, TEXT), measure_head(target("gemma2"), TEXT)
    assert found.tokens == cpu.tokens
    assert found.head_dtype == str(dtype).removeprefix("torch.")
    # Logits that change by at most c move every log probability by at most 2c, and KL is a mean of those.
    assert 0 <= found.kl_max <= 2 * found.max_logit_change
    if dtype == torch.float32:
        assert found.kl_mean == pytest.approx(cpu.kl_mean, rel=0.05)
