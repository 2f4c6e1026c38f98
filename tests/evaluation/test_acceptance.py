"""P14: what is counted in an evaluation, held against counting by hand."""

from __future__ import annotations

import json

import pytest

from dflash2.cli import main
from dflash2.errors import ConfigError
from dflash2.evaluation.acceptance import summarise
from dflash2.evaluation.definition import MIN_PROMPTS
from dflash2.prompts import read_prompts


def test_length_counts_the_bonus_and_is_the_mean_over_prompts():
    m = summarise([[1, 3], [8], []], [10, 10, 10], 7, 1.0)
    assert m.acceptance_length == (2 + 8) / 2, "a prompt without a round says nothing"
    assert m.acceptance_length_micro == 12 / 3
    assert (m.rounds, m.tokens, m.prompts) == (3, 12, 2)


def test_rates_by_row_are_conditional():
    m = summarise([[1, 3, 4, 8]], [10], 7, 0.0)
    # Draft 1 was checked in all 4 rounds and stood in 3; draft 2 in those 3, all; draft 3 in 3, standing in 2; ...
    assert m.accepted_by_row == [0.75, 1.0, 0.6667, 0.5, 1.0, 1.0, 1.0]


def test_length_follows_from_the_rates():
    rounds = [1, 2, 2, 3, 5, 8, 8, 1]
    m = summarise([rounds], [10], 7, 0.0)
    reached, expected = 1.0, 1.0
    for rate in m.accepted_by_row:
        reached *= rate
        expected += reached
    assert expected == pytest.approx(sum(rounds) / len(rounds), abs=1e-3)


def test_rounds_are_sorted_by_the_context_they_drafted_from():
    many = MIN_PROMPTS
    # 120 prompt tokens: rounds start at 120, 124 and 128; the last is in the second range.
    m = summarise([[4, 4, 6]] * many, [120] * many, 7, 0.0)
    assert m.by_context == {
        "0-127": {"acceptance_length": 4.0, "rounds": 2 * many, "prompts": many},
        "128-255": {"acceptance_length": 6.0, "rounds": many, "prompts": many},
    }
    assert sum(int(b["rounds"]) for b in m.by_context.values()) == m.rounds


def test_ranges_of_few_prompts_are_left_out():
    few = MIN_PROMPTS - 1
    m = summarise([[2]] * few + [[2]] * MIN_PROMPTS, [1000] * few + [20] * MIN_PROMPTS, 7, 0.0)
    assert list(m.by_context) == ["0-127"]


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", "not json\n", '{"turns": []}\n'])
def test_prompt_files_that_are_none(tmp_path, text):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"p\.jsonl"):
        read_prompts([path])


def test_prompt_file(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"id": i, "turns": [str(i)]}) + "\n" for i in range(3)) + "\n")
    assert [p["turns"] for p in read_prompts([path, path])] == [["0"], ["1"], ["2"]] * 2


@pytest.mark.parametrize(
    ("flags", "linears", "head"),
    [
        ([], "float32", "float32"),
        (["--drafter-int8"], "int8", "float32"),
        (["--draft-int8-head"], "float32", "int8"),
        (["--drafter-int8", "--draft-int8-head", "--dtype", "bfloat16"], "int8", "int8"),
    ],
    ids=str,
)
def test_the_report_says_what_was_measured(flags, linears, head, pair, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"turns": [f"w{i} w3 w{2 * i}"]}) + "\n" for i in range(7)))
    code = main([
        "eval", "--live", "--target", pair[0], "--drafter", pair[1], "--prompts", f"words={prompts}", "--out", str(out),
        "--max-new-tokens", "20", "--limit", "6", "--device", "cpu", *flags,
    ])  # fmt: skip
    assert code == 0
    report = json.loads((out / "live.json").read_text())
    settings, details = report["settings"], report["details"]["words"]
    assert (settings["drafter_linears"], settings["draft_head"]) == (linears, head)
    assert settings["dtype"] == settings["target_head"] == ("bfloat16" if "--dtype" in flags else "float32")
    assert "template_sha256" in settings
    assert report["prompts"]["words"]["count"] == details["prompts"] == 6
    assert report["acceptance_length"]["words"] == details["acceptance_length"] >= 1
    assert list(details["by_context"]) == ["0-127"]
    assert details["by_context"]["0-127"]["rounds"] == details["rounds"]
    assert report["target"] == "target"
