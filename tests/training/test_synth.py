"""Shards: whole or not there, the same after an interruption, never mixed with those of another run."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from dflash2.cli import main
from dflash2.errors import ConfigError
from dflash2.training import synth as module
from dflash2.training.data import load_shards
from dflash2.training.self_prompts import open_turn, stop_ids, usable
from dflash2.training.synth import Answer, Request, SynthOptions, synth, write_shard


@pytest.fixture(scope="module")
def chat_folder(toy_target_folder, tmp_path_factory):
    """The random Llama with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "toy"
    shutil.copytree(toy_target_folder, folder)
    template = "{% for m in messages %}<s> {{ m.content }} </s>{% endfor %}{% if add_generation_prompt %} w9{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"w{i} w7"]}) + "\n" for i in range(3, 11)))
    return path


@pytest.fixture
def options(toy_target_folder, prompt_file, tmp_path):
    def make(**changes) -> SynthOptions:
        base = {
            "target": str(toy_target_folder), "prompts": (str(prompt_file),), "out": tmp_path / "out", "rows": 2,
            "shard": 3, "max_prompt": 8, "max_new_tokens": 5, "device": "cpu",
        }  # fmt: skip
        return SynthOptions(**base | changes)

    return make


def documents(paths) -> list[list[int]]:
    docs = load_shards([str(p) for p in paths])
    return [docs.document(i).tolist() for i in range(len(docs))]


def test_shards_read_back(tmp_path):
    answers = [Answer(Request([1, 5, 6], 0.0), [7, 2]), Answer(Request([1], 0.7), [9, 9, 9])]
    write_shard(tmp_path / "a.npz", answers, {"seed": 0})
    docs = load_shards([str(tmp_path / "*.npz")])
    assert docs.tokens.dtype == np.uint16
    assert [docs.document(i).tolist() for i in range(2)] == [[1, 5, 6, 7, 2], [1, 9, 9, 9]]
    assert docs.plens.tolist() == [3, 1]
    assert docs.temps.tolist() == pytest.approx([0, 0.7], abs=1e-3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.npz"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(path, **arrays):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.np, "savez_compressed", full)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path / "a.npz", [Answer(Request([1], 0.0), [7])], {})
    assert list(tmp_path.iterdir()) == []


def test_a_run_and_where_it_comes_from(options, capsys):
    paths = synth(options())
    assert [p.name for p in paths] == ["synth0000.npz", "synth0001.npz", "synth0002.npz"]
    assert sorted(d[:2] for d in documents(paths)) == [[i, 7] for i in range(3, 11)]
    made = json.loads(paths[2].with_suffix(".json").read_text())
    assert made["documents"] == 2
    assert made["complete"]
    assert made["shard"] == 2
    assert made["decoder"] == "LlamaDecoder"
    assert made["prompt_tokens"] == 4
    assert {"commit", "device", "torch", "dflash2", "date", "tokens_per_second", "prompts_sha256"} <= set(made)
    out = capsys.readouterr().out
    assert out.startswith("8 requests from 8 prompts; 3 of 3 shards to do\n")
    assert "tok/s" in out


def test_an_interrupted_run_goes_on_and_ends_the_same(options, tmp_path, monkeypatch, capsys):
    whole = documents(synth(options(out=tmp_path / "whole")))
    real, calls = module.write_shard, []

    def killed(path, *args):
        calls.append(path.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(path, *args)

    monkeypatch.setattr(module, "write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        synth(options())
    first = (tmp_path / "out" / "synth0000.npz").stat().st_mtime_ns
    paths = synth(options())
    assert calls == ["synth0000.npz", "synth0001.npz", "synth0001.npz", "synth0002.npz"]
    assert documents(paths) == whole
    assert paths[0].stat().st_mtime_ns == first
    synth(options())
    assert "0 of 3 shards to do" in capsys.readouterr().out
    assert len(calls) == 4


def test_what_the_time_cut_is_redone(options, monkeypatch):
    whole = synth(options(shard=8))[0]
    expected, facts = documents([whole]), whole.with_suffix(".json")
    made = json.loads(facts.read_text())
    write_shard(whole, [Answer(Request([1], 0.0), [2])], made | {"complete": False})
    assert documents(synth(options(shard=8))) == expected
    assert json.loads(facts.read_text())["complete"]
    whole.unlink()
    assert synth(options(shard=8, max_seconds=1e-9)) == []


def test_shards_of_another_run_are_refused(options):
    paths = synth(options())
    for changes, name in (({"seed": 1}, "seed"), ({"max_new_tokens": 6}, "max_new_tokens"), ({"count": 3}, "prompts_")):
        with pytest.raises(ConfigError, match=f"synth0000.npz is there already, from a run with another {name}"):
            synth(options(**changes))
    assert len(synth(options(seed=1, name="more"))) == 3
    paths[0].with_suffix(".json").unlink()
    with pytest.raises(ConfigError, match="from a run with another target, prompts"):
        synth(options())


def test_answers_must_fit_into_the_positions(options):
    with pytest.raises(
        ConfigError, match="a prompt of 2 tokens and an answer of up to 255 exceed the target's 256 pos"
    ):
        synth(options(max_new_tokens=255))


def test_other_architectures_are_announced(toy_target_folder, prompt_file, tmp_path, capsys):
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 61, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "eos_token_id": 2}
    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(toy_target_folder).save_pretrained(folder)
    out = tmp_path / "out"
    base = ["synth", "--target", str(folder), "--prompts", str(prompt_file), "--out", str(out), "--device", "cpu"]
    assert main([*base, "--max-new-tokens", "4"]) == 0
    assert "model_type='gpt2', which the fast decoder does not read" in capsys.readouterr().err
    assert len(documents([out / "synth0000.npz"])) == 8
    assert json.loads((out / "synth0000.json").read_text())["decoder"] == "GeneralDecoder"


def test_prompts_of_its_own(chat_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dflash2.training.self_prompts.LEAST_WORDS", 2)
    base = ["synth", "--target", str(chat_folder), "--prompts", "self", "--count", "6", "--device", "cpu"]
    base += ["--rows", "8", "--max-new-tokens", "5"]
    assert main([*base, "--out", str(tmp_path / "a")]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "a" / "synth-prompts.jsonl").read_text().splitlines()]
    assert [p["id"] for p in lines] == [f"self/{i}" for i in range(6)]
    texts = [p["turns"][0] for p in lines]
    assert len(set(texts)) == 6
    assert all(word.startswith("w") for text in texts for word in text.split())
    assert len(documents([tmp_path / "a" / "synth0000.npz"])) == 6
    assert json.loads((tmp_path / "a" / "synth-prompts.json").read_text())["prompts"] == 6
    # The same again elsewhere; here they are kept; with another seed they are others.
    main([*base, "--out", str(tmp_path / "b")])
    assert (tmp_path / "b" / "synth-prompts.jsonl").read_text() == (tmp_path / "a" / "synth-prompts.jsonl").read_text()
    assert main([*base, "--out", str(tmp_path / "a"), "--seed", "3"]) == 2
    assert "synth-prompts.jsonl is there already, from a run with another seed" in capsys.readouterr().err
    main([*base, "--out", str(tmp_path / "c"), "--seed", "3"])
    assert (tmp_path / "c" / "synth-prompts.jsonl").read_text() != (tmp_path / "a" / "synth-prompts.jsonl").read_text()


def test_open_turns(chat_folder, toy_target_folder, toy_llama):
    from transformers import AutoTokenizer

    chat, plain = (AutoTokenizer.from_pretrained(f) for f in (chat_folder, toy_target_folder))
    assert open_turn(chat) == [1]
    assert stop_ids(toy_llama, chat) == (2,)
    assert stop_ids(object(), plain) == (2,)
    with pytest.raises(ConfigError, match="no chat template"):
        open_turn(plain)
    chat.chat_template = "<s>"
    with pytest.raises(ConfigError, match="does not show the user's text"):
        open_turn(chat)


@pytest.mark.parametrize(
    ("text", "good"),
    [("Why is the sky blue?", True), ("Why?", False), ("go " * 40, False), ("a b c d " * 100, False), ("", False)],
)
def test_usable_prompts(text, good):
    assert usable(text) is good


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": ("self",)}, "'self' stands alone and needs a count"),
        ({"prompts": ("self", "builtin"), "count": 3}, "stands alone"),
        ({"rows": 0}, "rows=0: expected at least 1"),
        ({"max_seconds": -1}, "max_seconds=-1: expected at least 0"),
    ],
)
def test_options_that_make_no_sense(options, changes, message):
    with pytest.raises(ConfigError, match=message):
        options(**changes)


def test_shares_are_checked(capsys):
    with pytest.raises(SystemExit):
        main(["synth", "--prompts", "builtin", "--out", "x", "--temperatures", "0.6"])
    assert "'0.6' is not like 0:0.6,0.7:0.4" in capsys.readouterr().err
