"""`dflash2 trace` and `dflash2 eval` from the command line, and the three files that come out."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser

import pytest

from dflash2.cli import main
from dflash2.errors import ConfigError
from dflash2.evaluation.costs import read_costs
from dflash2.evaluation.svg import ticks

HERE = ["--device", "cpu", "--max-new-tokens", "12", "--limit", "6"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    lines = [{"turns": [f"w{i} w3 w{2 * i}"], "domain": "even" if i % 2 == 0 else "odd"} for i in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def traced(pair, prompts, tmp_path_factory) -> str:
    out = str(tmp_path_factory.mktemp("trace"))
    assert main(["trace", "--target", pair[0], "--drafter", pair[1], "--prompts", prompts, "--out", out, *HERE]) == 0
    return out


@pytest.fixture(scope="module")
def reported(pair, traced, tmp_path_factory):
    """Two runs of one drafter, with costs and a live check."""
    out = tmp_path_factory.mktemp("report")
    costs = out / "costs.json"
    costs.write_text(json.dumps({"round_ms": {str(k): 10 + k for k in range(8)}}))
    code = main([
        "eval", "--trace", traced, "--drafter", f"one={pair[1]}", "--drafter", f"<b>two={pair[1]}", "--out", str(out),
        "--costs", str(costs), "--live-check", "3", "--device", "cpu",
    ])  # fmt: skip
    assert code == 0
    return out


VOID = {"meta", "br"}


class Page(HTMLParser):
    """Balanced tags, and what the page refers to."""

    def __init__(self, text: str):
        super().__init__()
        self.open_, self.links, self.text = [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("src", "href", "action", "data", "poster", "srcset")]
        if tag not in VOID:
            self.open_.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open_.pop()

    def handle_endtag(self, tag):
        assert self.open_.pop() == tag

    def handle_data(self, data):
        self.text += data + " "


def test_the_page_is_whole_and_needs_nothing_else(reported):
    text = (reported / "report.html").read_text()
    page = Page(text)
    assert page.open_ == []
    assert page.links == []
    assert not re.search(r"https?:|url\(|@import|<script|<link|<img", text)
    assert "&lt;b&gt;two" in text
    assert "<b>two" not in text
    assert text.count("<svg") >= 6
    assert not re.search(r"\b(nan|inf)\b", text, re.I)


def test_every_number_is_in_all_three_files(reported):
    report = json.loads((reported / "report.json").read_text())
    with (reported / "report.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(report["rows"]) > 100
    text = Page((reported / "report.html").read_text()).text
    for row, line in zip(report["rows"], lines, strict=True):
        assert {k: str(v) for k, v in row.items()} == line
        assert row["low"] <= row["value"] + 1e-9
        assert row["value"] <= row["high"] + 1e-9
        assert f"{row['value']:.4f}" in text


def test_what_the_report_says(reported, traced):
    report = json.loads((reported / "report.json").read_text())
    assert list(report["runs"]) == ["one", "<b>two"]
    assert report["acceptance_length"]["one"] == report["acceptance_length"]["<b>two"]
    assert report["acceptance_length"]["one"]["words"] >= 1
    assert report["trace"]["decoding"]["temperature"] == 0
    assert "template_sha256" in report["trace"]
    assert report["trace"]["prompts"]["words"]["count"] == 6
    assert report["live_check"]["one"]["same_rounds"] == 3
    assert report["live_check"]["one"]["live_s"] > 0
    by = {(r["run"], r["group"], r["name"], r["drafts"], r["metric"], r["position"]): r for r in report["rows"]}
    speed, length = (by["one", "all", "T=0", 3, m, 0]["value"] for m in
                     ("tokens_per_s", "acceptance_length_over_rounds"))  # fmt: skip
    assert speed == pytest.approx(length / 0.013)
    assert by["one", "all", "T=0", 0, "tokens_per_s", 0]["value"] == pytest.approx(100)
    assert by["<b>two", "domain", "even", 7, "difference_to_first_run", 0]["value"] == 0
    rate, recall, choice = (by["one", "all", "T=0", 7, m, 1]["value"] for m in
                            ("conditional_acceptance", "recall", "selector_accuracy"))  # fmt: skip
    assert rate == pytest.approx(recall * choice)
    groups = {(r["group"], r["name"]) for r in report["rows"]}
    wanted = {("all", "T=0"), ("dataset", "words"), ("domain", "even"), ("domain", "odd"), ("context", "0-127")}
    assert groups == wanted


def test_one_step_traces_first(pair, prompts, tmp_path):
    out = tmp_path / "out"
    flags = ["--prompts", f"mine={prompts}", "--target", pair[0], "--drafter", pair[1], "--out", str(out)]
    more = ["--temperature", "0.7", "--widest-only", "--drafter-int8", "--draft-int8-head"]
    assert main(["eval", *flags, *more, *HERE]) == 0
    report = json.loads((out / "report.json").read_text())
    (run,) = report["runs"].values()
    assert (run["linears"], run["head"], run["dtype"]) == ("int8", "int8", "float32")
    assert {r["name"] for r in report["rows"] if r["group"] == "all"} == {"T=0.7"}
    assert {r["drafts"] for r in report["rows"]} == {7}
    assert (out / "trace" / "trace.json").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["eval", "--out", "x"], "give either --trace"),
        (["eval", "--out", "x", "--trace", "nowhere"], "is no trace"),
        (["eval", "--out", "x", "--trace", "a", "--drafter", "a/d", "--drafter", "b/d"], "two of them are called d"),
        (["eval", "--out", "x", "--trace", "a", "--num-draft-tokens", "3"], "Leave out --num-draft-tokens"),
        (["eval", "--out", "x", "--live", "--live-check", "3", "--prompts", "builtin"], "Leave out --live-check"),
        (["eval", "--out", "x", "--live"], "--live takes --prompts"),
        (["eval", "--out", "x", "--trace", "a", "--temperature", "1"], "Leave out --temperature"),
        (["trace", "--out", "x", "--shards", "a", "--max-new-tokens", "9"], "Leave out --max-new-tokens"),
        (["trace", "--out", "x", "--prompts", "p", "--max-new-tokens", "0"], "tokens 0: expected at least 1"),
        (["trace", "--out", "x", "--prompts", "p", "--temperature", "nan"], "temperature nan: expected at least 0"),
        (["trace", "--out", "x"], "give either --prompts"),
        (["trace", "--out", "x", "--prompts", "builtin", "--layers", "1", "--drafter", "d"], "--layers or --drafter"),
    ],
    ids=lambda x: " ".join(x[3:])[:40] if isinstance(x, list) else "",
)
def test_wrong_arguments(flags, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(flags) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_costs_from_files(tmp_path):
    path = tmp_path / "costs.json"
    runs = [{"runs": {"0": {"round_ms": a}, "1": {"round_ms": 2 * a}, "auto": {"round_ms": 0}}} for a in (5, 7, 30)]
    path.write_text(json.dumps({"prompts": runs}))
    assert read_costs(path, 1) == {0: 0.007, 1: 0.014}
    with pytest.raises(ConfigError, match=r"says nothing of rounds with \[2, 3\]"):
        read_costs(path, 3)
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"cannot be read.*or the word measure"):
        read_costs(path, 1)


def test_costs_are_measured(pair, traced, tmp_path):
    flags = ["--trace", traced, "--drafter", pair[1], "--out", str(tmp_path), "--costs", "measure", "--device", "cpu"]
    assert main(["eval", *flags, "--widest-only"]) == 0
    costs = json.loads((tmp_path / "report.json").read_text())["costs"]
    assert costs["source"] == "measured here, one prompt at a time"
    assert all(ms > 0 for c in costs["round_ms"].values() for ms in c.values())


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 3.37), (0, 23.4), (2.2, 2.2), (0, 0), (1, 8)])
def test_ticks_are_round_and_enclose(low, high):
    marks = ticks(low, high)
    assert marks[0] <= low + 1e-9
    assert marks[-1] >= high - 1e-9
    assert 2 <= len(marks) <= 10
