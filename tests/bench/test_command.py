"""`dflash2 bench` and `dflash2 tune` where there is no GPU, and what stops a benchmark."""

import subprocess

import pytest
import torch

from dflash2 import cli
from dflash2.bench import checks, run

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@WITHOUT_GPU
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_without_a_gpu_it_says_so(command, capsys):
    assert cli.main([command]) == 2
    error = capsys.readouterr().err
    assert "no CUDA GPU is visible" in error
    assert "dflash2 demo" in error


def test_cases_can_be_listed_anywhere(capsys):
    assert cli.main(["bench", "--list", "--cases", "context.*"]) == 0
    assert capsys.readouterr().out.split() == [f"context.27b.{n}" for n in ("2k", "16k", "64k", "256k")]


def test_unknown_cases_are_named(capsys):
    assert cli.main(["bench", "--list", "--cases", "heads.*"]) == 2
    assert "heads.*: no such case" in capsys.readouterr().err


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(run, "the_gpu", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")


def test_red_tests_stop_it(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "check_operations", lambda device: (False, "test_head failed"))
    monkeypatch.setattr(run, "measure", lambda *a, **k: pytest.fail("it measured"))
    said = []
    assert not run.run_bench(out=tmp_path / "r.json", say=said.append)
    assert "test_head failed" in "\n".join(said)
    assert "nothing is measured" in said[-1]
    assert not (tmp_path / "r.json").exists()


def test_leaving_the_tests_out_is_written_down(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "check_operations", lambda device: pytest.fail("it tested"))
    seen = {}
    monkeypatch.setattr(run, "measure", lambda cases, timer, out, facts, **k: seen.update(facts) or True)
    assert run.run_bench(out=tmp_path / "r.json", skip_tests=True, say=lambda line: None)
    assert seen == {"tests": "skipped (--skip-tests)", "quick": False}


def test_a_result_that_cannot_be_written_is_refused_before_measuring(gpu, tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        run.run_bench(out=tmp_path / "missing" / "r.json", say=lambda line: None)


@pytest.mark.parametrize(("code", "green"), [(0, True), (1, False)])
def test_the_tests_of_a_checkout_are_run(code, green, monkeypatch):
    asked = []

    def fake(command, **kw):
        asked.append(command)
        return subprocess.CompletedProcess(
            command, code, "E   wrong bits\n===== 3 passed, 1 failed in 2.00s =====\n", ""
        )

    monkeypatch.setattr(checks.subprocess, "run", fake)
    found, said = checks.check_operations(torch.device("cuda"))
    assert found is green
    assert "3 passed" in said
    assert ("wrong bits" in said) is not green
    assert asked[0][2:6] == ["pytest", str(checks.tests_folder()), "-m", "gpu"]
