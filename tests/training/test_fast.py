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


GPU_DRAFTER = DRAFTER | {
    "block_size": 8,
    "selector_top_k": 16,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


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


def one_step(model, shard, out, fast, dtype):
    """Losses and gradients of a step's part, and the curve and evaluation of a run of three."""
    t = trainer(
        model.to(getattr(torch, dtype)), shard, out, fast=fast, device="cuda", dtype=dtype, drafter=GPU_DRAFTER,
        tv_weight=0.3, lk_weight=0.2, anchors_per_row=48, val_permille=300, max_steps=3,
    )  # fmt: skip
    batch = t.batches[0][0]
    loss = t._part(batch, batch.blocks.to("cuda"), torch.tensor(100.0, device="cuda"))
    gradients = {n: p.grad.float() for n, p in t.drafter.named_parameters() if p.grad is not None}
    for p in t.drafter.parameters():
        p.grad = None
    result = t.run()
    return loss, gradients, [x["base"] for x in lines_of(out)], result.documents


@pytest.mark.gpu
def test_a_step_on_a_gpu(shard, tmp_path):
    """fp32: sums in another order. bf16: errs about as the plain form does, against the plain form in fp32."""
    model = toy().to("cuda", torch.bfloat16)
    kinds = {"exact": (False, "float32"), "fast": (True, "float32"), "plain16": (False, "bfloat16")}
    kinds["fast16"] = (True, "bfloat16")
    made = {name: one_step(copy.deepcopy(model), shard, tmp_path / name, *kind) for name, kind in kinds.items()}
    loss, gradients, curve, documents = made["exact"]
    assert documents > 0
    for name, tolerance in (("fast", 1e-4), ("fast16", 0.05)):
        for part in ("total", "base", "selector"):
            a, b = (getattr(x, part).float() for x in (made[name][0], loss))
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert made[name][1].keys() == gradients.keys()
        assert made[name][2] == pytest.approx(curve, rel=2 * tolerance)
        assert made[name][3] == documents
    for name, truth in gradients.items():
        ours, fast16, plain16 = ((made[kind][1][name] - truth).norm() for kind in ("fast", "fast16", "plain16"))
        assert ours <= 1e-4 * truth.norm() + 1e-6, name
        assert fast16 <= 3 * plain16 + 2**-7 * truth.norm() + 1e-6, name


def lines_of(folder) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [x for x in lines if "loss" in x]
