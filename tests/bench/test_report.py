"""The table and the plot come from a result file, and the README's table is the one of the file that ships."""

import json
import re
from pathlib import Path

import pytest
from test_cases import REQUIRED

from dflash2.bench.cases import CASES
from dflash2.bench.report import BEGIN, END, PEERS, ROWS, into_readme, load, main, plot, table
from dflash2.bench.shapes import SHAPES
from dflash2.bench.traffic import round_bytes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "dflash2/bench/results").glob("nvidia-*.json"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def row(case, median=1250.0, **more):
    values = {"p20_us": 1240.0, "p80_us": 1262.5, "bytes": 5_010_000_000, "floor_us": 1136.0, "over_floor": 1.1,
              "share_of_read": 0.909, "peers": {}}  # fmt: skip
    return {"case": case, "median_us": median, **values, **more}


@pytest.fixture
def report():
    peers = {"dflash_eager": 51_000.0, "dflash_cuda_graph": None}
    context = [row(f"context.27b.{n}", 1250.0 + i) for i, n in enumerate(("2k", "16k", "64k", "256k"))]
    return {
        "ceilings": {"read_bytes_per_s": 4.41e12, "copy_bytes_per_s": 4.27e12},
        "provenance": {"device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc1234"},
        "cases": [row("propose.27b.c1.int8head", peers=peers), *context],
    }


@pytest.fixture
def file(report, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(report))
    return path


def test_table_says_what_was_measured(report):
    lines = table(report).splitlines()
    assert lines[0].startswith("NVIDIA H200, torch 2.11.0, triton 3.6.0, commit abc1234.")
    assert "read 4.41 TB/s, copy 4.27 TB/s" in lines[0]
    (found,) = [line for line in lines if ROWS["propose.27b.c1.int8head"] in line]
    assert "| 1,250 (1,240-1,262) | 5,010 | 1.10 | 91% | published modules 51,000 (40.8x) |" in found
    assert len({line.count("|") for line in lines[2:]}) == 1
    assert len(lines) == 4 + 3, "three of the cases have a row"


def test_arithmetic_is_shown_as_such(report):
    """7.5e11 operations in 1.5 ms are 500e12 a second; a share of the read bandwidth would say nothing."""
    report["cases"].append(row("append.27b.2048", 1500.0, operations=750_000_000_000))
    assert "| 5,010 |  | 500 TFLOP/s |  |" in table(report).splitlines()[-1]


def test_every_row_of_the_readme_is_a_case():
    assert set(ROWS) <= set(CASES)
    assert {name.partition("_")[0] for name in PEERS} == {"cublas", "torch", "dflash", "reference"}


def test_it_goes_between_the_markers(report, tmp_path, file):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold \\1\n{END}\nafter\n")
    assert main([str(file), "--readme", str(readme)]) == 0
    assert readme.read_text() == f"before\n{BEGIN}\n{table(report)}\n{END}\nafter\n"
    assert into_readme(readme.read_text(), report) == readme.read_text()


def test_a_file_without_markers_is_refused(file, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("nothing here")
    assert main([str(file), "--readme", str(readme)]) == 2
    assert "no <!-- gpu-speed -->" in capsys.readouterr().err
    assert readme.read_text() == "nothing here"


def test_printed_by_itself(file, report, capsys):
    assert main([str(file)]) == 0
    assert capsys.readouterr().out.strip() == table(report)


def test_plot(report, tmp_path):
    pytest.importorskip("matplotlib")
    plot(report, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_plot_names_what_to_install(report, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'dflash2\[notebooks\]'"):
        plot(report, tmp_path / "speed.png")


@pytest.mark.parametrize(
    ("text", "message"), [("{}", "ceilings"), ("no json", "cannot be read"), ('{"cases": [{}]}', "median_us")]
)
def test_other_files_are_refused(text, message, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_readme_shows_the_file_that_ships():
    if not RESULTS:
        between = re.search(f"{BEGIN}(.*?){END}", README, re.S)
        assert between, "the README has no place for the table"
        assert not between[1].strip(), "numbers without a result file"
        pytest.skip("no GPU result is there yet")
    (file,) = RESULTS
    assert into_readme(README, load(file)) == README, f"run python -m dflash2.bench.report {file} --readme README.md"


def test_bytes_that_the_readme_names():
    c, text = SHAPES["27b"], README.replace("\n", " ")
    for int8, words in (
        (True, "for Qwen3.8-27B's drafter in 16 bits with an int8 head"),
        (False, "with a 16-bit head"),
    ):
        moved = round_bytes(c, 1, 4096, c.block_size, c.block_size // 2, int8_head=int8)
        assert f"{moved / 1e9:.1f} GB {words}" in text


@pytest.mark.parametrize("file", RESULTS, ids=lambda path: path.name)
def test_results_that_ship_are_whole(file):
    report = load(file)
    assert set(report["ceilings"]) == {"read_bytes_per_s", "copy_bytes_per_s"}
    origin = report["provenance"]
    assert origin["commit"]
    assert not origin["failed"]
    assert not origin["quick"]
    assert "passed" in origin["tests"]
    names = {c["case"] for c in report["cases"]}
    assert set(REQUIRED) <= names <= set(CASES)
