from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from test_blocks import config, network, packed_blocks

import dflash2
from dflash2.errors import CheckpointError, ConfigError
from dflash2.model import DraftNetwork
from dflash2.training.anchors import make_blocks
from dflash2.training.config import TrainConfig, load_config
from dflash2.training.data import Documents, Plan, assign, pack
from dflash2.training.decode import LlamaDecoder
from dflash2.training.loss import HeadSettings, block_loss, block_targets, draft_states
from dflash2.training.replay import greedy_walk, replay
from dflash2.training.synth import Request, answer, write_shard
from dflash2.training.target import FrozenTarget
from dflash2.training.train import Trainer

DRAFTER = {"mask_token_id": 60, "num_hidden_layers": 2, "sliding_window": 24, "conv_group_size": 8, "selector_rank": 4}
DRAFTER |= {"selector_top_k": 4, "block_size": 4, "target_layer_ids": [1, 2, 4]}


@pytest.fixture(scope="module")
def shard(toy_llama, tmp_path_factory):
    rng = np.random.default_rng(0)
    asked = [Request(rng.integers(3, 60, rng.integers(4, 9)).tolist(), 0.0) for _ in range(24)]
    decoder = LlamaDecoder(toy_llama, rows=24, max_tokens=48, max_new_tokens=36, eos=(2,), graphs=False)
    path = tmp_path_factory.mktemp("shards") / "a.npz"
    write_shard(path, list(answer(decoder, asked)), {})
    return path


def settings(shard, out, **kw) -> TrainConfig:
    base = {
        "target": "toy", "shards": [str(shard)], "out": str(out), "drafter": dict(DRAFTER), "device": "cpu",
        "dtype": "float32", "row_tokens": 96, "rows_per_step": 2, "anchors_per_step": 64, "tile": 8, "max_steps": 6,
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


def test_drafts_equal_those_of_the_inference_drafter():
    c = config(6)
    rows, blocks = packed_blocks(c, seed=5)
    net = network(c).float()
    embedding, taps = torch.randn(31, 16), torch.randn(rows.tokens.size, 32)
    s = HeadSettings.of(c, hard_weight=0.5, chunk=10)
    with torch.no_grad():
        z = draft_states(net, embedding, blocks, taps)
        path, _ = greedy_walk(net, z, embedding, blocks.tokens[blocks.anchors], s)
    drafter = dflash2.DFlash2Drafter(c)
    drafter.load_state_dict(net.state_dict())
    drafter.bind_target(embedding, embedding)
    for n, anchor in enumerate(blocks.anchors.tolist()):
        first = int(rows.first[blocks.document[anchor]])
        start = anchor - first
        kv = drafter.new_kv(1, 64)
        seq = kv.open()
        drafter.append(kv, [seq], taps[first:anchor], [0], [start])
        proposal = drafter.propose(kv, [seq], blocks.tokens[anchor : anchor + 1], [start])
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
    net = DraftNetwork(c)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    plan = Plan(docs, 128, 4, 0)
    s = HeadSettings.of(c, hard_weight=1.0, chunk=2048)
    for step in range(250):
        rows = pack(docs, plan[step], 128)
        blocks = make_blocks(rows, rows.eligible()[:320], 320, 8, c.retention)
        taps, states = target(*map(torch.from_numpy, (rows.tokens, rows.positions, rows.document)))
        z = draft_states(net, target.embedding, blocks, taps)
        targets = block_targets(blocks, states, c.block_size, 4.0)
        loss = block_loss(net, z, target.head, targets, settings=s, selector_weight=0.1, use_argmax=False)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    result = replay(net, target, docs, settings=s, row_tokens=128, rows_per_step=4, blocks_per_step=320, tile=8)
    assert result.by_row == [1.0] * 3


def test_one_document_is_overfitted_and_generation_agrees(toy_llama, shard, tmp_path):
    """B204, B205: what replay promises is what generating delivers."""
    t = trainer(toy_llama, shard, tmp_path, rows_per_step=1, row_tokens=48, max_steps=250, lr=5e-3, log_seconds=1e9)
    t.documents = t.documents.select(np.argmax(t.documents.lens)[None])
    t.plan, t.validation = Plan(t.documents, 48, 1, 0), t.documents
    result = t.run()
    assert result.rounds > 3.5
    drafter = dflash2.DFlash2Drafter.from_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    document = t.documents.document(0).tolist()
    prompt = torch.tensor([document[: int(t.documents.plens[0])]])
    out = dflash2.generate(toy_llama, drafter, prompt, max_new_tokens=36)
    assert out.sequences[0].tolist() == document
    assert np.mean(out.acceptance_lengths[0]) == pytest.approx(result.rounds, abs=0.35)  # bf16 weights on disk


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
    with pytest.raises(CheckpointError, match="this run's shape"):
        trainer(
            toy_llama, shard, tmp_path / "c", init_from=str(tmp_path / "a"), drafter=DRAFTER | {"num_hidden_layers": 1}
        )


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


def test_settings_are_checked(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("target: t\nshards: [a.npz]\nout: o\nmax_steps: 5\n")
    c = load_config(file, ["lr=0.5", "drafter.block_size=4", "device=cpu"])
    assert (c.lr, c.drafter, c.device) == (0.5, {"block_size": 4}, "cpu")
    with pytest.raises(ConfigError, match="learning_rate"):
        load_config(file, ["learning_rate=1"])
    with pytest.raises(ConfigError, match="would never end"):
        load_config(file, ["max_steps=0"])
    with pytest.raises(ConfigError, match="multiple of tile"):
        load_config(file, ["anchors_per_step=9"])


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
