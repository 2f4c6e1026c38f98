"""Traces on disk: what goes in comes out, interrupted ones go on, and what does not belong is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from test_generate import drafter, target
from test_replay import STOP, VOCAB, guesser, questions, trace

from dflash2.errors import CheckpointError, ConfigError
from dflash2.evaluation import record
from dflash2.evaluation.evaluate import replay_trace, rows
from dflash2.evaluation.record import Document, Question, record_answers, record_documents
from dflash2.evaluation.sources import load_sets, trace_shards
from dflash2.evaluation.trace import Trace, choose_layers
from dflash2.target import tapped


def documents(made: Trace) -> list[tuple[list[int], int, dict]]:
    found = []
    for s in made.shards():
        for a, n, p, about in zip(s.starts, s.lengths, s.prompt_lengths, s.about, strict=True):
            found.append((s.tokens[a : a + n].tolist(), int(p), about))
    return found


def test_taps_and_states_are_the_targets(tmp_path):
    model = target("llama", VOCAB)
    made = trace(tmp_path, temperature=0.8)
    tables = made.tables()
    assert torch.equal(tables.embedding, model.get_input_embeddings().weight)
    assert torch.equal(tables.head.weight, model.get_output_embeddings().weight)
    for shard in made.shards():
        assert shard.states is not None
        for start, length in zip(shard.starts.tolist(), shard.lengths.tolist(), strict=True):
            part = slice(start, start + length)
            with tapped(model, made.layer_ids) as taps:
                logits = model(input_ids=shard.tokens[None, part]).logits[0]
            whole = torch.cat([taps[i][0] for i in made.layer_ids], -1)
            torch.testing.assert_close(shard.taps[part], whole, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(tables.head.logits(shard.states[part], VOCAB), logits, rtol=1e-4, atol=1e-4)


def test_greedy_traces_keep_no_states_and_tied_tables_are_stored_once(tmp_path):
    made = trace(tmp_path / "a")
    assert all(s.states is None for s in made.shards())
    tied = record_answers(target("llama"), "tied", questions(), tmp_path / "b", layer_ids=[1], max_new_tokens=4)
    sizes = [(tmp_path / f / "tables.safetensors").stat().st_size for f in ("a", "b")]
    assert sizes[0] > 2 * VOCAB * 32 * 4
    assert 50 * 32 * 4 < sizes[1] < 2 * 50 * 32 * 4
    assert tied.tables().head.weight is not None


def test_prompts_and_where_they_are_from(tmp_path):
    made = trace(tmp_path)
    asked = {q.id: q.tokens for q in questions()}
    for tokens, prompt, about in documents(made):
        assert about == {"dataset": "set", "domain": "domain", "id": about["id"]}
        assert tokens[:prompt] == asked.pop(about["id"])
        answer = tokens[prompt:]
        assert (STOP in answer) == (answer[-1] == STOP)
        assert len(answer) == 24 or answer[-1] == STOP
    assert not asked
    assert made.about["decoding"] == {"temperature": 0.0, "seed": None, "stops": [STOP]}
    assert made.origin["torch"] == torch.__version__


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_interrupted_trace_goes_on(temperature, tmp_path, monkeypatch):
    whole = documents(trace(tmp_path / "whole", temperature=temperature))
    calls, real = [], record.answer

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(record, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trace(tmp_path / "cut", temperature=temperature)
    with pytest.raises(CheckpointError, match=r"unfinished trace, 1 of 2 shards.*goes on where it ended"):
        Trace(tmp_path / "cut")
    assert documents(trace(tmp_path / "cut", temperature=temperature)) == whole
    assert len(calls) == 3, "the finished shard is not made again"


@pytest.mark.parametrize(
    ("change", "named"),
    [({"temperature": 1.0}, "decoding"), ({"layer_ids": (0, 1)}, "layer_ids"), ({"tokens": 5}, "max_new_tokens")],
)
def test_another_trace_is_not_mixed_in(change, named, tmp_path):
    trace(tmp_path)
    with pytest.raises(ConfigError, match=rf"another trace: .*{named}.* different"):
        trace(tmp_path, **change)


def test_damaged_and_foreign_files(tmp_path):
    trace(tmp_path / "a")
    trace(tmp_path / "b", tokens=5)
    shard = tmp_path / "a" / "00001.safetensors"
    bytes_ = shard.read_bytes()
    shard.write_bytes(bytes_[: len(bytes_) // 2])
    with pytest.raises(CheckpointError, match="00001.safetensors cannot be read, it is truncated"):
        list(Trace(tmp_path / "a").shards())
    shard.write_bytes((tmp_path / "b" / "00001.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="is not of this trace"):
        list(Trace(tmp_path / "a").shards())
    shard.write_text("no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Trace(tmp_path / "a").found()
    with pytest.raises(CheckpointError, match=r"is no trace.*dflash2 trace"):
        Trace(tmp_path)
    (tmp_path / "b" / "trace.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read as a trace"):
        Trace(tmp_path / "b")
    (tmp_path / "b" / "trace.json").write_text(json.dumps({"about": {"format": 99}}))
    with pytest.raises(CheckpointError, match="of format 99"):
        Trace(tmp_path / "b")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 50, "mask_token_id": 3}, "vocab_size: drafter 50, target 8"),
        ({"hidden_size": 16}, "hidden_size: drafter 16, target 32"),
        ({"target_layer_ids": (0, 3)}, r"layers \[3\] were not recorded, only \[0, 1, 2\]"),
        ({"num_target_layers": 7}, "num_target_layers: drafter 7, target 4"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_a_drafter_that_does_not_fit(changes, reason, tmp_path):
    made = trace(tmp_path)
    few = {"vocab_size": VOCAB, "mask_token_id": 7, "selector_top_k": 4}
    with pytest.raises(ConfigError, match=reason):
        replay_trace(made, drafter(**few | changes))


def test_layers_are_chosen_in_the_drafters_order():
    taps = torch.arange(24.0).view(2, 12)
    assert choose_layers(taps, [0, 1, 2], 3) is taps
    assert choose_layers(taps, [2, 0], 3).tolist() == [[8, 9, 10, 11, 0, 1, 2, 3], [20, 21, 22, 23, 12, 13, 14, 15]]


def test_documents_that_another_target_wrote(tmp_path):
    noise = [Document(q, torch.randint(0, VOCAB, (20,)).tolist(), 0.0) for q in questions()]
    with pytest.raises(ConfigError, match="another target wrote them"):
        record_documents(target("llama", VOCAB), "toy", noise, tmp_path, layer_ids=[0])


def test_probabilities_of_softcapped_targets_are_refused(tmp_path):
    asked = [Question([4, 5, 6])]
    with pytest.raises(ConfigError, match="changes its logits after the head.*Trace greedily"):
        record_answers(target("gemma2"), "gemma2", asked, tmp_path, layer_ids=[0], max_new_tokens=4, temperature=1.0)


@pytest.mark.parametrize(("layers", "said"), [([4], "has layers 0 to 3"), ([], "Name some"), ([-1], "layers")])
def test_layers_that_are_none(layers, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        record_answers(target("llama", VOCAB), "toy", questions(), tmp_path, layer_ids=layers, max_new_tokens=4)


def test_token_shards_are_recorded_with_their_temperatures(tmp_path):
    """What was decoded before, as `dflash2 synth` writes it; replay takes the same rounds."""
    made = trace(tmp_path / "one")
    found = documents(made)
    np.savez(
        tmp_path / "gen.npz", tokens=np.concatenate([t for t, _, _ in found]), lens=[len(t) for t, _, _ in found],
        plens=[p for _, p, _ in found], temps=np.zeros(len(found)),
    )  # fmt: skip
    (tmp_path / "gen.json").write_text(json.dumps({"max_new_tokens": 24}))
    again = trace_shards(target("llama", VOCAB), "toy", [str(tmp_path / "gen.npz")], tmp_path / "two", [0, 2], 0, 2)
    assert again.max_new_tokens == 24
    tables = again.tables()
    d = guesser().bind_target(tables.embedding, tables.head)
    one, two = (replay_trace(m, d) for m in (made, again))
    assert sorted(one.lengths) == sorted(two.lengths)
    assert {a["dataset"] for a in two.about} == {"gen"}


def test_temperatures_are_never_averaged_together(tmp_path):
    model, asked = target("llama", VOCAB), questions() * 2
    heat = [0.0, 1.0] * 5
    answers = [
        record.answer(model, [q.tokens], 12, t, [], torch.Generator().manual_seed(i))[0]
        for i, (q, t) in enumerate(zip(asked, heat, strict=True))
    ]
    written = [Document(q, a, t) for q, a, t in zip(asked, answers, heat, strict=True)]
    made = record_documents(model, "toy", written, tmp_path, layer_ids=[0, 2])
    tables = made.tables()
    replayed = replay_trace(made, guesser().bind_target(tables.embedding, tables.head))
    table = rows({"a": replayed})
    names = {(r.group, r.name) for r in table}
    expected = {("all", f"T={t}") for t in (0, 1)} | {("context", f"0-127 T={t}") for t in (0, 1)}
    assert names == expected | {
        (g, f"{n} T={t}") for g, n in (("dataset", "set"), ("domain", "domain")) for t in (0, 1)
    }
    assert {r.prompts for r in table if r.metric == "acceptance_length"} == {5}
    assert [bool(r) for r in replayed.lengths] == [a["temperature"] == 0 for a in replayed.about]


def test_prompt_sets_have_names(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["a"]}\n{"turns": ["b"], "domain": "code"}\n')
    sets, about = load_sets([str(path), f"other={path}"], 1)
    assert {k: len(v) for k, v in sets.items()} == {"p": 1, "other": 1}
    assert about["p"] == about["other"]
    assert about["p"]["source"] == "p.jsonl"
    with pytest.raises(ConfigError, match="two sets are called p"):
        load_sets([str(path), f"p={path}"])
