"""Every notebook runs from top to bottom, and is kept with outputs that people can read where code is hosted."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dflash2

nbformat = pytest.importorskip("nbformat", reason="pip install 'dflash2[notebooks]'")

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="session")
def made_beforehand():
    """What says something when it is made for the first time: the target, and the list of fonts for plots."""
    for module in ("nbclient", "ipykernel", "ipywidgets", "matplotlib.font_manager"):
        pytest.importorskip(module, reason="pip install 'dflash2[notebooks]'")
    dflash2.embedded_target()


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def images(notebook) -> list[bytes]:
    found = [o.data["image/png"] for o in outputs(notebook) if "image/png" in o.get("data", {})]
    return [base64.b64decode(image) for image in found]


def complaints(notebook) -> list[str]:
    """Errors, and all that was written to standard error: warnings, progress bars."""
    bad = [o for o in outputs(notebook) if o.output_type == "error" or o.get("name") == "stderr"]
    return [o.get("text") or o.get("evalue", "") for o in bad]


@pytest.mark.slow
@pytest.mark.usefixtures("made_beforehand")
@by_name
def test_notebook_runs(path, tmp_path):
    """Cells assert what the text around them claims."""
    command = [sys.executable, FOLDER / "execute.py", path, "--to", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kept, made = read(path), read(tmp_path / path.name)
    assert complaints(made) == []
    assert [len(c.outputs) for c in code_cells(made)] == [len(c.outputs) for c in code_cells(kept)]
    assert len(images(made)) == len(images(kept))


def test_there_are_the_four():
    assert [path.stem for path in NOTEBOOKS] == [
        "01_quickstart",
        "02_positions_and_windows",
        "03_int8_head",
        "04_train_and_measure",
    ]


@by_name
def test_outputs_are_kept(path):
    notebook = read(path)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "not run from top to bottom: python notebooks/execute.py"
    assert complaints(notebook) == []
    assert images(notebook), "no plot"


@by_name
def test_outputs_are_small(path):
    assert path.stat().st_size < 400_000
    assert max(map(len, images(read(path)))) < 60_000


@by_name
def test_outputs_name_no_place_of_the_machine_that_made_them(path):
    text = path.read_text(encoding="utf-8")
    places = [r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|mnt|var|work|Users)/", re.escape(str(Path.home())), r"[A-Z]:\\\\"]
    for place in places:
        assert not re.search(place, text), place
    assert read(path).metadata.language_info == {"name": "python"}


@by_name
def test_links_between_notebooks_and_docs(path):
    for cell in read(path).cells:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", cell.source if cell.cell_type == "markdown" else ""):
            assert (FOLDER / link).exists(), link


def test_the_first_one_names_two_models_and_nothing_else_does():
    """A reader changes these two names."""
    first, *rest = code_cells(read(FOLDER / "01_quickstart.ipynb"))
    assert re.findall(r"^(\w+) = ", first.source, re.MULTILINE) == ["TARGET", "DRAFTER"]
    assert not any("smollm2" in cell.source for cell in rest)
