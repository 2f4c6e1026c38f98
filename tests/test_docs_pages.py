"""docs/: pages run as they read, commands are ones the parser takes, links lead somewhere, the reference is current."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from dflash2 import DFlash2Drafter, cli
from dflash2.testing import cpu_as_device

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
KERNELS = (ROOT / "docs/kernels.md").read_text(encoding="utf-8").replace("\n", " ")
RESULTS = ROOT / "dflash2/bench/results"
#: A block, and the comment on the line before it, if there is one.
BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(python|sh|bash)\n(.*?)^```", re.M | re.S)
#: These need files; tests/evaluation/test_docs.py makes them and runs the page.
RUN_ELSEWHERE = {"measuring.md"}


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """(comment, source) of each."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(comment, source) for comment, language, source in found if language in languages]


def commands() -> list[str]:
    """Every line that calls `dflash2`, continued lines joined."""
    texts = [source.replace("\\\n", " ") for page in PAGES for _, source in blocks(page, "sh", "bash")]
    lines = {line.strip() for text in texts for line in text.splitlines()}
    return sorted(line for line in lines if re.match(r"dflash2 |.*-m dflash2 ", line))


def with_python(page: Path) -> bool:
    return page.name not in RUN_ELSEWHERE and bool(blocks(page, "python"))


@pytest.mark.parametrize("page", [p for p in PAGES if with_python(p)], ids=lambda p: p.name)
def test_python_runs_from_top_to_bottom(page, monkeypatch, tmp_path):
    """One session for each page. Blocks marked ``as on a GPU`` take CPU tensors for a device's, and capture nothing."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"__name__": "page"}
    for i, (comment, source) in enumerate(blocks(page, "python")):
        call = compile(source, f"{page.name}, Python block {i}", "exec")
        if comment.startswith("not run: "):
            continue
        if comment.startswith("as on a GPU") and not torch.cuda.is_available():
            with monkeypatch.context() as m, cpu_as_device():
                m.setattr(DFlash2Drafter, "capture", lambda *_args, **_kw: None)
                exec(call, names)
        else:
            exec(call, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_block_is_left_out_for_a_reason(page):
    for comment, _ in blocks(page, "python"):
        assert re.fullmatch(r"|(not run|as on a GPU): \w.*", comment), comment


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line):
    words = [w for w in shlex.split(line, comments=True) if w != "--help"]
    cli._parser().parse_args(words[words.index("dflash2") + 1 :])


def module_commands() -> list[str]:
    texts = [p.read_text(encoding="utf-8") for p in (*PAGES, ROOT / "README.md")]
    return sorted({line for text in texts for line in re.findall(r"^python -m (dflash2\.[^#\n]*)", text, re.M)})


@pytest.mark.parametrize("line", module_commands())
def test_modules_know_the_options(line, capsys):
    module, *words = shlex.split(line)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main(["--help"])
    known = capsys.readouterr().out
    assert ended.value.code == 0
    for option in (w for w in words if w.startswith("--")):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", known), option


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_identity_is_that_of_the_result_file():
    report = json.loads((RESULTS / "identity-transformers.json").read_text())
    answers, same, drafts = (sum(s[k] for s in report["summary"]) for k in ("answers", "same", "ended_by_a_draft"))
    text = (ROOT / "docs/transformers.md").read_text(encoding="utf-8").replace("\n", " ")
    words = f"{report['prompts']} prompts, {answers} answers, {same} of them the same, {drafts} ended inside a block"
    assert words in text, words


def test_distances_from_the_floor_are_those_of_the_result_file():
    cases = json.loads((RESULTS / "nvidia-h200.json").read_text())["cases"]
    over = {c["case"].removeprefix("propose.27b."): f"{c['over_floor']:.2f}" for c in cases}
    assert f"{over['c1.int8head']} times it, {over['c1.int8all']} with everything in int8" in KERNELS
    batches = [over[f"c{n}.int8head"] for n in (2, 8, 32)]
    assert "({} for 2 sequences, {} for 8, {} for 32)".format(*batches) in KERNELS


def test_times_are_those_of_the_result_file():
    report = json.loads((RESULTS / "nvidia-h200.json").read_text())
    shown = {
        "head.int8.topk.rows7": "int8 head and its 16 best, 7 rows",
        "head.bf16.topk.rows7": "bf16 head and its 16 best, 7 rows",
        "propose_only.27b.c1.int8head": "`propose`, bf16 drafter, int8 head",
        "propose.27b.c1.int8head": "round, bf16 drafter, int8 head",
        "propose.27b.c1.int8all": "round, all int8",
    }
    cases = {c["case"]: c for c in report["cases"]}
    for case, words in shown.items():
        assert f"| {words} | {cases[case]['median_us']:,.0f} | {cases[case]['over_floor']:.2f} |" in KERNELS
    assert f"{report['ceilings']['read_bytes_per_s'] / 1e12:.2f} TB/s" in KERNELS


def test_what_an_int8_head_changes_is_that_of_the_report():
    r = json.loads((RESULTS / "head-report-smollm2.json").read_text())
    assert f"{r['tokens']:,} tokens: another next token at {r['flips']} of them" in KERNELS
    assert f"({r['flips_within_rounding']} within one bf16 rounding step of the runner-up)" in KERNELS
    assert f"mean KL divergence {r['kl_mean']:.4f} nats" in KERNELS


def test_what_int8_costs_is_what_was_measured():
    file = json.loads((RESULTS / "acceptance-int8.json").read_text())
    for name, words in (("gsm8k", "{} becomes {} on GSM8K"), ("mt_bench", "{} becomes {} on MT-Bench"),
                        ("humaneval", "{} stays {} on HumanEval")):  # fmt: skip
        assert words.format(*(f"{file[k]['acceptance_length'][name]:.2f}" for k in ("dense", "int8"))) in KERNELS
    assert all(p["count"] == 20 for p in file["prompts"].values())


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_docstrings_say():
    script = load_script("api_reference")
    assert script.FILE.read_text(encoding="utf-8") == script.reference(), "run: python scripts/api_reference.py"


def test_the_picture_is_what_its_script_draws():
    script = load_script("draw_concepts")
    assert script.FILE.read_text(encoding="utf-8") == script.picture(), "run: python scripts/draw_concepts.py"
