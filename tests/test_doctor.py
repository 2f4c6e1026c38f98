"""What the doctor says, and that it says it when something is broken."""

import json

import pytest
import torch

import dflash2.doctor as doctor
from dflash2.cli import main


def test_a_healthy_machine(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for part in ("versions", "device", "kernels", "adapter transformers", "drafter", "self-test"):
        assert part in out
    assert f"torch {torch.__version__}" in out
    assert "the same" in out


def test_json(capsys):
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert {f["part"] for f in found["findings"]} >= {"versions", "device", "kernels", "target", "self-test"}


def test_a_drafter_that_changes_the_output_is_broken(monkeypatch, capsys):
    """The one thing that must never be: caught by the self-test, and in the exit code."""
    real = doctor.dflash2.generate

    def wrong(*args, num_draft_tokens, **kw):
        out = real(*args, num_draft_tokens=num_draft_tokens, **kw)
        if num_draft_tokens:
            out.sequences[0, -1] += 1
        return out

    monkeypatch.setattr(doctor.dflash2, "generate", wrong)
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "DIFFERENT tokens" in capsys.readouterr().out


def test_an_error_in_the_self_test_is_told(monkeypatch):
    def broken(*args, **kw):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(doctor.dflash2, "generate", broken)
    finding = doctor.self_test(torch.device("cpu"))
    assert finding.ok is False
    assert "no kernel image" in finding.text


def test_the_self_test_leaves_the_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    doctor.self_test(torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)


def test_a_drafter_that_does_not_load(monkeypatch):
    monkeypatch.setattr(doctor, "DEFAULT_DRAFTER", "no-such-drafter")
    assert doctor._drafter().ok is False


def test_a_wrong_target_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH2_EMBEDDED_TARGET", str(tmp_path / "nothing"))
    finding = doctor._target()
    assert finding.ok is False
    assert "is not there" in finding.text


def test_a_target_that_is_not_made_yet(monkeypatch, tmp_path):
    monkeypatch.delenv("DFLASH2_EMBEDDED_TARGET", raising=False)
    monkeypatch.setenv("DFLASH2_CACHE", str(tmp_path))
    assert doctor._target().ok is None


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "ADAPTERS", {"vllm": (("no-such-distribution",), "dflash2.adapters.base")})
    (finding,) = doctor._adapters()
    assert finding.ok is None
    assert "pip install 'dflash2[vllm]'" in finding.text


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    assert main(["doctor"]) == 0
    assert "Triton kernels run" in capsys.readouterr().out
