"""`dflash2.bench.identity` on a tiny pair: what counts as the same, what is written, which ends are a draft's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from dflash2.bench import identity
from dflash2.loading import load_pair

RESULT = Path(__file__).parents[2] / "dflash2/bench/results/identity-transformers.json"


@pytest.fixture
def prompts(tmp_path) -> list[str]:
    for name, words in (("a", ["w1 w2", "w3", "w4 w5 w6"]), ("b", ["w7 w8"])):
        lines = [json.dumps({"id": i, "turns": [text]}) for i, text in enumerate(words)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return [str(tmp_path / f"{name}.jsonl") for name in "ab"]


def test_prompts_are_taken_in_turn(prompts):
    assert [name for name, _ in identity.choose(prompts, 0)] == ["a:0", "b:0", "a:1", "a:2"]
    assert [name for name, _ in identity.choose(prompts, 2)] == ["a:0", "b:0"]


def test_report(pair, prompts, tmp_path, capsys):
    target, drafter = pair
    out = tmp_path / "identity.json"
    argv = ["--target", target, "--drafter", drafter, "--device", "cpu", "--prompts", *prompts, "--out", str(out)]
    assert identity.main([*argv, "--batch-sizes", "1", "3", "--max-new-tokens", "12"]) == 0
    report = json.loads(out.read_text())
    assert report["prompts"] == 4
    assert report["sources"] == {"a": 3, "b": 1}
    assert report["differences"] == []
    assert [(s["setting"], s["batch_size"]) for s in report["summary"]] == [
        (name, size) for name in identity.SETTINGS for size in (1, 3)
    ]
    for s in report["summary"]:
        assert s["answers"] == s["same"] == 4
        assert s["ended_by_a_draft"] <= s["ended"] <= 4
    assert report["provenance"]["device"].startswith("cpu")
    assert capsys.readouterr().out.startswith("1 of 2 parts, ")


def test_a_difference_is_found_with_its_gap(pair, monkeypatch):
    target, tokenizer, drafter = load_pair(*pair, "cpu", "float32")
    checker = identity.Checker(target, tokenizer, drafter, 6, ["penalty"], [1])
    real = transformers.LlamaForCausalLM.generate

    def wrong(model, *args, **how):
        out = real(model, *args, **how)
        if "custom_generate" in how:
            out[0, -3] = (out[0, -3] + 1) % 50
        return out

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", wrong)
    (record,) = checker.check([("a", [5, 6, 7])])
    assert record["difference"]["index"] == record["tokens"] - 3
    assert record["difference"]["logit_gap"] > identity.NEAR_TIE
    assert not identity.near_tie(record["difference"])
    assert identity.near_tie({"logit_gap": -5e-5})
    assert not identity.near_tie({"logit_gap": None}), "one has ended and the other has not"


@pytest.mark.parametrize(
    ("start", "drafts", "answer", "expected"),
    [
        (11, [8, 9, 2], [7, 8, 9, 2], True),  # anchor 7 at position 11: all three stood
        (11, [8, 9, 4], [7, 8, 9, 2], False),  # the last was the target's own
        (11, [8, 9], [7, 8, 9, 2], False),  # the bonus behind a whole block
        (12, [9, 2, 5], [7, 8, 9, 2], True),  # drafts behind the end do not count
        (14, [2, 2], [7, 8, 9, 2], False),
    ],
)
def test_ends_that_a_draft_made(start, drafts, answer, expected):
    assert identity.stood(start, torch.tensor(drafts), 11, answer) is expected


def test_cut():
    assert identity.cut([5, 2, 0, 0], [2]) == [5, 2]
    assert identity.cut([5, 6], [2]) == [5, 6]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--out", "/no/such/folder/x.json"], "there is no such folder"),
        (["--prompts", "/no/such/file.jsonl"], "/no/such/file.jsonl"),
    ],
)
def test_errors(argv, words, capsys):
    assert identity.main(argv) == 2
    assert words in capsys.readouterr().err


def test_the_packaged_result():
    """Every answer is the same or parts at a near-tie, in both batch sizes, with and without a penalty."""
    report = json.loads(RESULT.read_text())
    assert report["provenance"]["commit"]
    assert sum(report["sources"].values()) == report["prompts"] >= 64
    assert {s["batch_size"] for s in report["summary"]} == {1, 8}
    assert {s["setting"].partition(",")[0] for s in report["summary"]} == {"greedy", "penalty"}
    for s in report["summary"]:
        assert s["same"] + s["near_ties"] == s["answers"] == report["prompts"]
    assert any(s["ended_by_a_draft"] for s in report["summary"])
    assert all(identity.near_tie(r["difference"]) for r in report["differences"])
