from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_blocks import config, drafter, packed_blocks, table

import dflash2
from dflash2.errors import CheckpointError, ConfigError
from dflash2.ops.distill import LossWeights
from dflash2.training.anchors import make_blocks
from dflash2.training.config import TrainConfig
from dflash2.training.config_file import config_yaml, help_text, load_config
from dflash2.training.data import Documents, Plan, assign, pack
from dflash2.training.loss import LossOptions, block_loss, block_targets, draft_states
from dflash2.training.replay import greedy_drafts, replay
from dflash2.training.target import FrozenTarget
from dflash2.training.train import Trainer

MASK = 60
DRAFTER = {
    "mask_token_id": MASK,
    "num_hidden_layers": 2,
    "sliding_window": 24,
    "conv_group_size": 8,
    "selector_rank": 4,
}
DRAFTER |= {"selector_top_k": 4, "block_size": 4, "target_layer_ids": [1, 2, 4]}


def settings(shard, out, **kw) -> TrainConfig:
    base = {
        "target": "toy", "shards": [str(shard)], "out": str(out), "drafter": dict(DRAFTER), "device": "cpu",
        "dtype": "float32", "row_tokens": 96, "rows_per_step": 2, "anchors_per_row": 32, "tile": 8, "max_steps": 6,
        "log_seconds": 0, "eval_seconds": 0, "save_seconds": 0, "val_permille": 0,
    }  # fmt: skip
    return TrainConfig(**(base | kw))


def trainer(model, shard, out, **kw) -> Trainer:
    return Trainer(settings(shard, out, **kw), FrozenTarget(model, ()))


def test_target_pass_on_packed_rows_equals_each_document_alone(toy_llama):
    rows, _ = packed_blocks(config())
    target = FrozenTarget(toy_llama, (1, 4))
    taps, states = target(*map(torch.from_numpy, (rows.tokens, rows.positions, rows.document)))
    flat = torch.from_numpy(rows.tokens).flatten()
    for first, end in zip(rows.first.tolist(), rows.end.tolist(), strict=True):
        alone = toy_llama(flat[None, first:end], output_hidden_states=True)
        expected = torch.cat((alone.hidden_states[2], alone.hidden_states[5]), -1)[0]
        torch.testing.assert_close(taps[first:end], expected, rtol=1e-4, atol=1e-5)
        logits = states[first:end] @ target.head.T
        torch.testing.assert_close(logits, alone.logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_drafts_equal_those_of_the_inference_drafter(softcap):
    c = config(6, final_logit_softcapping=softcap)
    rows, blocks = packed_blocks(c, seed=5)
    tied, taps = table(torch.float32), torch.randn(rows.tokens.size, 32)
    net = drafter(c, tied)
    with torch.no_grad():
        z = draft_states(net, blocks, taps)
        path, _ = greedy_drafts(net, z, tied, blocks.tokens[blocks.anchors], chunk=10)
    for n, anchor in enumerate(blocks.anchors.tolist()):
        first = int(rows.first[blocks.document[anchor]])
        start = anchor - first
        kv = net.new_kv(1, 64)
        seq = kv.open()
        net.append(kv, [seq], taps[first:anchor], [0], [start])
        proposal = net.propose(kv, [seq], blocks.tokens[anchor : anchor + 1], [start])
        assert proposal.tokens[0].tolist() == path[n].tolist()


class CopyTarget:
    """Its tap at position p shows the token at p + B: row i of a block has to look back exactly B positions."""

    def __init__(self, vocab: int, hidden: int, block: int):
        torch.manual_seed(0)
        self.embedding = torch.nn.functional.normalize(torch.randn(vocab, hidden), dim=-1)
        self.head, self.block = 4 * self.embedding, block

    def __call__(self, tokens, positions, document):
        flat, owner = tokens.flatten(), document.flatten()
        ahead = torch.arange(len(flat)) + self.block
        inside = (ahead < len(flat)) & (owner[ahead.clamp(max=len(flat) - 1)] == owner)
        taps = self.embedding[flat[ahead.clamp(max=len(flat) - 1)]] * inside.unsqueeze(-1)
        return torch.cat((taps, taps), -1), 8 * self.embedding[flat.roll(-1)]


def test_perfect_copy_is_learnt_exactly():
    """P8: labels, context or positions shifted by one would make some row impossible, and its loss would stay."""
    c = config(16, ("sliding_attention",), False)
    target = CopyTarget(31, 16, c.block_size)
    rng = np.random.default_rng(0)
    lens = rng.integers(12, 30, 60)
    docs = Documents(rng.integers(0, 30, lens.sum()), lens.astype(np.int64), np.full(60, 4), np.zeros(60))
    net = dflash2.DFlash2Drafter(c, dtype=torch.float32).bind_target(target.embedding, target.head)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    plan = Plan(docs, 128, 4, 0)
    how = LossOptions(LossWeights(1.0, 0.0), selector_weight=0.1, gold="token", chunk=2048)
    for step in range(250):
        rows = pack(docs, plan[step], 128)
        blocks = make_blocks(rows, rows.eligible()[:320], 320, 8, c.retention)
        taps, states = target(*map(torch.from_numpy, (rows.tokens, rows.positions, rows.document)))
        z = draft_states(net, blocks, taps)
        targets = block_targets(blocks, states, c.block_size, 4.0)
        loss = block_loss(net, z, target.head, targets, how)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    result = replay(net, target, docs, row_tokens=128, rows_per_step=4, blocks_per_step=320, tile=8, chunk=2048)
    assert result.by_row == [1.0] * 3


def test_one_document_is_overfitted_and_generation_agrees(toy_llama, shard, tmp_path):
    """B204, B205: what replay promises is what generating delivers. Block 8: more than 7.5 of 8."""
    eight = DRAFTER | {"block_size": 8, "dtype": "float32"}
    t = trainer(
        toy_llama, shard, tmp_path, rows_per_step=1, row_tokens=48, anchors_per_row=40, max_steps=300, lr=1e-2,
        log_seconds=1e9, drafter=eight,
    )  # fmt: skip
    t.documents = t.documents.select(np.argmax(t.documents.lens)[None])
    t.batches, t.validation = t._batches(t.drafter.config.retention), t.documents
    result = t.run()
    saved = dflash2.DFlash2Drafter.from_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    document = t.documents.document(0).tolist()
    prompt = torch.tensor([document[: int(t.documents.plens[0])]])
    out = dflash2.generate(toy_llama, saved, prompt, max_new_tokens=36)
    assert out.sequences[0].tolist() == document
    assert result.by_row == [1.0] * 7
    assert np.mean(out.acceptance_lengths[0][:-1]) > 7.5


def test_a_killed_run_goes_on_bit_for_bit(toy_llama, shard, tmp_path):
    whole = trainer(toy_llama, shard, tmp_path / "whole", ema=0.9)
    whole.run()
    killed = trainer(toy_llama, shard, tmp_path / "killed", ema=0.9)
    for _ in range(3):
        killed.step()
    killed.save()
    killed.step()  # lost
    trainer(toy_llama, shard, tmp_path / "killed", ema=0.9).run()
    a, b = (torch.load(tmp_path / n / "resume.pt", weights_only=True) for n in ("whole", "killed"))
    assert a["step"] == b["step"] == 6
    for x, y in zip(
        a["optimizer"]["masters"] + a["optimizer"]["average"],
        b["optimizer"]["masters"] + b["optimizer"]["average"],
        strict=True,
    ):
        assert torch.equal(x, y)


def test_a_paused_run_goes_on_and_weights_can_be_started_from(toy_llama, shard, tmp_path):
    t = trainer(toy_llama, shard, tmp_path / "a", pause_seconds=1e-6)
    t.run()
    assert t.step_count == 1
    t = trainer(toy_llama, shard, tmp_path / "a")
    t.run()
    assert t.step_count == 6
    later = trainer(toy_llama, shard, tmp_path / "b", init_from=str(tmp_path / "a"))
    for mine, theirs in zip(later.optimizer.masters, t.optimizer.masters, strict=True):
        assert torch.equal(mine, theirs.to(torch.bfloat16).float())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 1),
        ("target_layer_ids", [1, 2, 5]),
        ("rope_parameters", {"rope_theta": 5e4}),
        ("sliding_window", 23),
        ("is_causal", True),
        ("mask_token_id", 1),
        ("output_multiplier", 2.0),
    ],
)
def test_weights_of_another_configuration_are_no_start(toy_llama, shard, tmp_path, field, value):
    trainer(toy_llama, shard, tmp_path / "a").save()
    with pytest.raises(ConfigError, match=rf"another configuration than this run:(?s:.*)- {field}: .* there, .* here"):
        trainer(toy_llama, shard, tmp_path / "b", init_from=str(tmp_path / "a"), drafter=DRAFTER | {field: value})


def test_every_layout_that_loads_is_a_start(toy_llama, shard, tmp_path):
    """Prefixed names, no rope_type, a mask embedding: as `from_pretrained` reads them."""
    a = tmp_path / "a"
    t = trainer(toy_llama, shard, a)
    t.save()
    tensors = load_file(a / "model.safetensors")
    save_file({f"model.{name}": w for name, w in tensors.items()}, a / "model.safetensors")
    raw = json.loads((a / "config.json").read_text())
    del raw["rope_parameters"], raw["num_target_layers"]
    (a / "config.json").write_text(json.dumps(raw))
    torch.save({"embedding": torch.arange(32.0), "mask_token_id": 60}, a / "mask_embedding.pt")
    later = trainer(toy_llama, shard, tmp_path / "b", init_from=str(a))
    for mine, theirs in zip(later.optimizer.masters, t.optimizer.masters, strict=True):
        assert torch.equal(mine, theirs.to(torch.bfloat16).float())
    later.run()
    saved = dflash2.DFlash2Drafter.from_pretrained(tmp_path / "b")
    assert saved.config.num_target_layers == 6
    assert torch.equal(saved.mask_embedding, torch.arange(32.0, dtype=torch.bfloat16))
    resumed = trainer(toy_llama, shard, tmp_path / "b")  # where it started is of no interest any more
    assert torch.equal(resumed.drafter.mask_embedding, torch.arange(32.0))


@pytest.mark.parametrize(("kept", "worked"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float32")])
def test_the_average_is_saved_from_the_masters_in_the_dtype_of_the_config(toy_llama, shard, tmp_path, kept, worked):
    import copy

    model = copy.deepcopy(toy_llama).to(getattr(torch, worked))
    t = trainer(model, shard, tmp_path, dtype=worked, ema=0.9, drafter=DRAFTER | {"dtype": kept})
    for _ in range(2):
        t.step()
    working = [p.clone() for p in t.drafter.parameters()]
    t.save()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == kept
    saved = load_file(tmp_path / "model.safetensors")
    assert len(saved) == len(t.optimizer.average)
    for (name, p), before, average in zip(t.drafter.named_parameters(), working, t.optimizer.average, strict=True):
        assert torch.equal(p, before)
        assert average.dtype == torch.float32
        assert saved[name].dtype == getattr(torch, kept)
        assert torch.equal(saved[name], average.to(getattr(torch, kept)))


def test_shards_of_an_older_checkpoint_do_not_hide_the_new_one(toy_llama, shard, tmp_path):
    t = trainer(toy_llama, shard, tmp_path)
    t.save()
    old = load_file(tmp_path / "model.safetensors")
    save_file({name: torch.zeros_like(w) for name, w in old.items()}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(old, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    t.save()
    assert dflash2.DFlash2Drafter.from_pretrained(tmp_path).fc.weight.any()


def test_another_configuration_does_not_resume(toy_llama, shard, tmp_path):
    trainer(toy_llama, shard, tmp_path).save()
    with pytest.raises(CheckpointError, match=r"\['lr'\]"):
        trainer(toy_llama, shard, tmp_path, lr=1e-4)


def test_bf16_and_metrics(toy_llama, shard, tmp_path):
    import copy

    model = copy.deepcopy(toy_llama).to(torch.bfloat16)
    t = trainer(model, shard, tmp_path, dtype="bfloat16", val_permille=300, max_steps=3, selector_weight=0.5)
    assert len(t.validation)
    t.run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if "loss" in x] == [1, 2, 3]
    assert np.isfinite(lines[-1]["validation"]["rounds"])


def test_evaluations_by_steps_have_the_same_points_on_any_machine(toy_llama, shard, tmp_path):
    trainer(toy_llama, shard, tmp_path, val_permille=300, max_steps=6, eval_steps=2).run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if "validation" in x] == [2, 4, 6]


def test_settings_are_checked(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("target: t\nshards: [a.npz]\nout: o\nmax_steps: 5\n")
    c = load_config(file, ["lr=0.5", "drafter.block_size=4", "device=cpu"])
    assert (c.lr, c.drafter, c.device) == (0.5, {"block_size": 4}, "cpu")
    with pytest.raises(ConfigError, match="learning_rate"):
        load_config(file, ["learning_rate=1"])
    for name, text, message in (
        ("a.json", "{", "is no JSON"),
        ("a.yaml", "a: [", "is no YAML"),
        ("b.yaml", "- 1", "holds a list: expected settings by name"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(tmp_path / name)
    with pytest.raises(ConfigError, match="c.yaml cannot be read"):
        load_config(tmp_path / "c.yaml")
    assert load_config(file, ["lr=1e-4", "ema=.5", "shards=b.npz"]).lr == 1e-4
    with pytest.raises(ConfigError, match="would never end"):
        load_config(file, ["max_steps=0"])
    with pytest.raises(ConfigError, match="multiple of tile"):
        load_config(file, ["anchors_per_row=9"])


def test_help_and_the_settings_file_name_every_setting(tmp_path):
    shown, file = help_text(), tmp_path / "run.yaml"
    file.write_text(config_yaml())
    for f in dataclasses.fields(TrainConfig):
        assert re.search(rf"^{f.name} \(.*\): \w", shown, re.MULTILINE), f.name
        assert re.search(rf"^# \w.*\n(# .*\n)*{f.name}: ", file.read_text(), re.MULTILINE), f.name
    assert "lr_floor (0.1): learning rate at the end, as a share of the peak." in shown
    given = {"target": "smollm2-135m", "shards": ["tokens/*.npz"], "out": "run", "drafter": {"mask_token_id": 16}}
    assert load_config(file, ["max_steps=5"]) == TrainConfig(**given, max_steps=5)


def test_a_runs_own_settings_can_be_read_back(toy_llama, shard, tmp_path):
    t = trainer(toy_llama, shard, tmp_path, max_steps=1)
    t.run()
    assert load_config(tmp_path / "train.json") == t.config
    made = json.loads((tmp_path / "train.json").read_text())["provenance"]
    assert made["torch"] == torch.__version__
    assert made["device"].startswith("cpu (")


def test_targets_have_names(toy_target_folder, monkeypatch):
    monkeypatch.setenv("DFLASH2_EMBEDDED_TARGET", str(toy_target_folder))
    target = FrozenTarget.from_pretrained("smollm2-135m", (1,), dtype=torch.bfloat16, device="cpu")
    assert target.head.dtype == torch.bfloat16
    assert len(target.layers) == 6
    with pytest.raises(CheckpointError, match="no-such-target: no such folder"):
        FrozenTarget.from_pretrained("./no-such-target", (1,), dtype=torch.bfloat16, device="cpu")


def test_no_prompt_is_in_both_splits_and_documents_stay_whole():
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 50, 5) for _ in range(40)]
    docs = [np.concatenate((prompts[i % 40], rng.integers(0, 50, 7))) for i in range(120)]
    d = Documents(np.concatenate(docs), np.full(120, 12), np.full(120, 5), np.zeros(120))
    train, held_out = d.split(300)
    assert len(train) + len(held_out) == 120
    assert 0 < len(held_out) < 120
    heads = [{tuple(x.document(i)[:5].tolist()) for i in range(len(x))} for x in (train, held_out)]
    assert not heads[0] & heads[1]
    rows = assign(d.lens, 30)
    assert sorted(i for row in rows for i in row) == list(range(120))
    assert all(len(row) * 12 <= 30 for row in rows)
