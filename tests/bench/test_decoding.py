"""`dflash2.bench.generate` on a tiny pair: what it runs, what it compares, what it writes."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
import torch
from test_generate import drafter, reference, target

from dflash2.bench import generate as bench

LENGTH = 6
ROOT = Path(__file__).parents[2]


class Tokenizer:
    """As many tokens as each text is long, those of `reference`."""

    chat_template = None

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        from test_generate import prompt

        return {"input_ids": [prompt(0, len(text)).tolist() for text in texts]}


def test_report(tmp_path):
    out, lines = tmp_path / "result.json", []
    prompts = [("code", "x" * LENGTH), ("chat", "y" * LENGTH), ("code", "z" * (LENGTH + 1))]
    report = bench.run(target(), Tokenizer(), drafter(), prompts, 20, 3, 2, out, lines.append)
    assert json.loads(out.read_text()) == report
    assert [(p["kind"], p["prompt"]) for p in report["prompts"]] == prompts
    for p in report["prompts"]:
        assert p["tokens"] == 20
        assert len(p["plain_s"]) == 3
        assert list(p["runs"]) == ["auto", *map(str, range(8))]
        for width, found in p["runs"].items():
            assert len(found["seconds"]) == (3 if width == "auto" else 2)
            ratios = [a / b for a, b in zip(p["plain_s"], found["seconds"], strict=False)]
            assert found["ratio"] == round(statistics.median(ratios), 3), "a ratio is of one repetition"
            assert found["difference"] is None
            assert found["round_ms"] > 0
        assert p["runs"]["0"]["widths"] == {"0": 19}
        assert p["runs"]["0"]["acceptance_length"] == 1.0
        assert max(map(int, p["runs"]["4"]["widths"])) == 4
    ratios = [p["runs"]["5"]["ratio"] for p in report["prompts"] if p["kind"] == "code"]
    assert report["summary"]["code"]["5"]["lowest"] == min(ratios)
    assert report["summary"]["code"]["5"]["median"] == round(statistics.median(ratios), 3)
    assert set(report["summary"]) == {"code", "chat"}
    assert report["settings"]["threads"] == torch.get_num_threads()
    assert report["provenance"]["device"].startswith("cpu")
    assert sum(line.startswith("[") for line in lines) == 3


def test_an_output_that_differs_is_reported(monkeypatch):
    right = list(reference("llama", 0, LENGTH)[:8])
    monkeypatch.setattr(bench, "plain_greedy", lambda *a: [*right[:5], right[5] + 1, *right[6:]])
    ids = torch.tensor([*Tokenizer()(["x" * LENGTH])["input_ids"]])
    found = bench.measure_prompt(target(), drafter(), ids, [["auto"], ["auto", 2]], 8)
    assert {d["index"] for d in (r["difference"] for r in found["runs"].values())} == {5}


def test_prompts_of_files_and_of_the_module(tmp_path):
    file = tmp_path / "math.jsonl"
    file.write_text('{"turns": ["a"], "domain": "sums"}\n{"turns": ["b", "c"]}\n{"turns": ["d"]}\n')
    assert bench._prompts([file], None) == [("sums", "a"), ("math", "b"), ("math", "d")]
    assert bench._prompts([file], 1) == [("sums", "a")]
    assert [kind for kind, _ in bench._prompts(None, 1)] == ["code", "math", "chat"]
    assert len(bench._prompts(None, None)) == 12


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--out", "/no/such/folder/x.json"], "there is no such folder"),
        (["--prompts", "/no/such/file"], "/no/such/file cannot be read"),
        (["--drafter", "/no/such/drafter"], "no such folder"),
    ],
)
def test_errors(argv, words, capsys):
    assert bench.main(argv) == 2
    assert words in capsys.readouterr().err


def test_no_repetition_is_refused():
    with pytest.raises(ValueError, match="repeats=0"):
        bench.run(target(), Tokenizer(), drafter(), repeats=0)


def test_what_the_readme_says():
    """Each kind's median and lowest ratio are those of the packaged result file, and every output was the target's."""
    report = json.loads((ROOT / "dflash2/bench/results/generate-cpu.json").read_text())
    assert report["provenance"]["commit"]
    assert bench.summarise(report["prompts"]) == report["summary"]
    assert not any(found["difference"] for p in report["prompts"] for found in p["runs"].values())
    readme = re.search(r"<!-- cpu-speed -->(.*?)<!-- /cpu-speed -->", (ROOT / "README.md").read_text(), re.S)[1]
    for kind, widths in report["summary"].items():
        cells = [f"{widths[w]['median']:.2f}x ({widths[w]['lowest']:.2f})" for w in ("auto", "3", "7")]
        assert f"| {kind} | {' | '.join(cells)} |" in readme
    paying = [p["runs"]["auto"]["ratio"] for p in report["prompts"] if p["kind"] in ("code", "math")]
    assert statistics.median(paying) >= 1.15
