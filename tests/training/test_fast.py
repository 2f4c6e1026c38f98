"""The fast form of a step against the plain one that defines it: same losses, gradients and weights."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from test_train import DRAFTER, settings
from torch.nn import functional as F

from dflash2.training import spans
from dflash2.training.target import FrozenTarget
from dflash2.training.train import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:::torch", "ignore::DeprecationWarning")


def toy():
    """As `toy_llama`, with heads of 16: flex attention takes no smaller ones on a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=96, intermediate_size=128, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.2,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def trainer(model, shard, out, *, fast, **kw) -> Trainer:
    c = settings(shard, out, **kw)
    c.fast = fast
    return Trainer(c, FrozenTarget(copy.deepcopy(model), ()))


def dense(q, k, v, mask, scale=None):
    """Flex attention with a backward pass on the CPU."""
    at = torch.meshgrid(torch.arange(q.shape[2]), torch.arange(k.shape[2]), indexing="ij")
    seen = mask.mask_mod(*torch.zeros(2, 1, 1), *at)
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)


def test_everything_compiles_without_a_break_and_changes_nothing(shard, tmp_path, monkeypatch):
    import torch._dynamo as dynamo

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compiler(f, backend="aot_eager", fullgraph=True, **kw))
    monkeypatch.setattr(spans, "attend_spans", dense)
    dynamo.reset()
    fast = trainer(toy(), shard, tmp_path / "fast", fast=True, val_permille=300, max_steps=3)
    plain = trainer(toy(), shard, tmp_path / "plain", fast=False, val_permille=300, max_steps=3)
    results = [t.run() for t in (fast, plain)]
    assert results[0] == results[1]
    lines = [lines_of(tmp_path / n) for n in ("fast", "plain")]
    assert len(lines[0]) == 3
    for mine, theirs in zip(*lines, strict=True):
        for name in ("loss", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5)
    # A graph for each kind of piece, not for each layer: norms of the drafter and of heads within one, the target's
    # layer, the MLP, both sides of the convolution, the projections.
    assert dynamo.utils.counters["stats"]["unique_graphs"] <= 8


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_a_step_on_a_gpu(shard, tmp_path, dtype, tolerance):
    """fp32: sums in another order. bf16: a few roundings (2^-8 each) more or less on the way through the layers."""
    model = toy().to("cuda", getattr(torch, dtype))
    drafter = DRAFTER | {"block_size": 8, "selector_top_k": 16, "num_hidden_layers": 3}
    drafter |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    losses, results, gradients = [], [], []
    for fast in (True, False):
        t = trainer(
            model, shard, tmp_path / str(fast), fast=fast, device="cuda", dtype=dtype, drafter=drafter, tv_weight=0.3,
            lk_weight=0.2, anchors_per_row=48, val_permille=300, max_steps=3,
        )  # fmt: skip
        batch = t.batches[0][0]
        blocks = batch.blocks.to("cuda")
        losses.append(t._part(batch, blocks, torch.tensor(100.0, device="cuda")))
        gradients.append({n: p.grad.float() for n, p in t.drafter.named_parameters() if p.grad is not None})
        for p in t.drafter.parameters():
            p.grad = None
        results.append((t.run(), lines_of(tmp_path / str(fast))))
    for name in ("total", "base", "selector"):
        a, b = (getattr(x, name) for x in losses)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert gradients[0].keys() == gradients[1].keys()
    for name, a in gradients[0].items():
        b = gradients[1][name]
        assert (a - b).norm() <= tolerance * b.norm() + 1e-6, name
    (mine, curve), (theirs, expected) = results
    assert mine.documents == theirs.documents > 0
    assert [x["base"] for x in curve] == pytest.approx([x["base"] for x in expected], rel=2 * tolerance)


def lines_of(folder) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [x for x in lines if "loss" in x]
