"""What is written beside results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

import dflash2
from dflash2.provenance import _commit, provenance


def git(folder: Path, *args: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@t.example")
    return subprocess.run(["git", "-C", str(folder), *who, *args], capture_output=True, text=True, check=True).stdout


def test_versions_device_and_date():
    made = provenance("cpu")
    assert (made["torch"], made["dflash2"]) == (torch.__version__, dflash2.__version__)
    assert re.fullmatch(r"cpu \(.+, \d+ cores\)", made["device"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", str(made["date"]))
    assert "transformers" in made
    code = (
        "import sys; from dflash2.provenance import provenance; provenance('cpu'); print('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_commit_is_that_of_the_packages_own_checkout(tmp_path, monkeypatch):
    package, installed = tmp_path / "dflash2", tmp_path / ".venv" / "dflash2"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        assert _commit(folder) is None, "no checkout"
    git(tmp_path, "init", "-q")
    assert _commit(package) is None, "no commit"
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "x")
    assert _commit(package) == git(tmp_path, "rev-parse", "--short", "HEAD").strip()
    assert _commit(installed) is None, "an environment in a checkout of something else"
    monkeypatch.setenv("PATH", "")
    assert _commit(package) is None, "no git"
