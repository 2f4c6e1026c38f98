"""The README is run: its Python blocks, its make targets, its table of results."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from dflash2.checkpoint_files import packaged_checkpoints

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
SHELL = "\n".join(re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S))
CHECKPOINT = "smollm2-135m-dflash2"
#: Goes on with what the block before it made.
ADAPTER = next(i for i, source in enumerate(BLOCKS) if "custom_generate=" in source)


def block(i: int):
    heavy = "embedded_target" in BLOCKS[i]
    return pytest.param(i, marks=[pytest.mark.slow] if heavy else [], id=f"block{i}")


def run(i: int, names: dict):
    exec(compile(BLOCKS[i], f"README.md, Python block {i}", "exec"), names)


@pytest.mark.parametrize("i", [block(i) for i in range(len(BLOCKS)) if i != ADAPTER])
def test_python_blocks_run(i, capsys):
    for name in set(re.findall(r'"([\w.-]+-dflash2)"', BLOCKS[i])):
        if name not in packaged_checkpoints():
            pytest.skip(f"the drafter {name} is not trained yet")
    names = {"__name__": "readme"}
    run(i, names)
    if i + 1 == ADAPTER:
        run(ADAPTER, names)
        plain = names["target"].generate(**names["prompt"], max_new_tokens=32, do_sample=False, repetition_penalty=1.1)
        assert torch.equal(names["ids"], plain)


def test_there_are_blocks():
    assert len(BLOCKS) >= 2
    assert README.index("make demo") < README.index("pip install"), "the two commands come first"
    assert len(README[: README.index("make demo")].splitlines()) < 20


def test_make_targets_exist():
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", README))
    assert {"demo", "test"} <= named
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    assert named <= targets, named - targets


def test_make_targets_expand():
    done = subprocess.run(["make", "-n", "demo", "test"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", [s for s in SHELL.splitlines() if re.match(r"(dflash2|.*&& dflash2) ", s)])
def test_commands_parse(line):
    """Every `dflash2 ...` line of the README is one that the parser takes."""
    import shlex

    from dflash2 import cli

    words = [w for w in shlex.split(line.split("#")[0]) if w != "--help"]
    cli._parser().parse_args(words[words.index("dflash2") + 1 :])


@pytest.mark.parametrize("path", re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
def test_links_exist(path):
    folder = ROOT / path if (ROOT / path).is_dir() else (ROOT / path).parent
    if CHECKPOINT in path and CHECKPOINT not in packaged_checkpoints():
        pytest.skip(f"the drafter {CHECKPOINT} is not trained yet")
    assert folder.exists()
    assert (ROOT / path).exists()


def test_modules_it_names_exist():
    for module in re.findall(r"python -m ([\w.]+)", README):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module


def numbers(value) -> list[float]:
    if isinstance(value, dict):
        return [n for v in value.values() for n in numbers(v)]
    if isinstance(value, list):
        return [n for v in value for n in numbers(v)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_results_are_those_of_eval_json():
    """Each number of the table, rounded as it is printed, is in the eval.json of a packaged checkpoint."""
    table = re.search(r"<!-- results -->(.*?)<!-- /results -->", README, re.S)
    if table is None:
        pytest.skip("no table of results is drawn yet")
    rows = [r for r in table[1].splitlines() if r.startswith("|") and not set(r) <= set("|-: ")]
    cells = [c.strip() for r in rows[1:] for c in r.strip("|").split("|")[1:]]
    printed = [c for c in (re.sub(r"[*`,%]", "", c).strip() for c in cells) if re.fullmatch(r"\d+(\.\d+)?", c)]
    assert printed, "a table without numbers"
    files = [json.loads(p.read_text()) for p in (ROOT / "checkpoints").glob("*/eval.json")]
    known = [n for f in files for n in numbers(f)]
    for cell in printed:
        digits = len(cell.partition(".")[2])
        assert any(f"{n:.{digits}f}" == cell or f"{100 * n:.{digits}f}" == cell for n in known), cell
    for file in files:
        for name, value in file["acceptance_length"].items():
            assert f"{value:.2f}" in table[1], f"{name} is missing from the table"


def test_speeds_are_those_of_the_result_file():
    """Median and range of the ratios, as the README prints them."""
    report = json.loads((ROOT / "dflash2/bench/results/demo-cpu.json").read_text())
    assert report["provenance"]["commit"]
    for a in report["answers"]:
        ratios = sorted(p / d for p, d in zip(a["plain_s"], a["drafted_s"], strict=True))
        assert f"{a['name']} {a['ratio']:.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})" in README.replace("\n", " ")
        assert a["difference"] is None
