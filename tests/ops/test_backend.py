"""A kernel asked for by name runs or raises; it is never replaced in silence."""

import pytest
import torch

from dflash2.ops import backend
from dflash2.ops.backend import choose_backend


@pytest.fixture
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_auto_on_the_cpu_is_the_reference(interpreted):
    assert choose_backend("auto", torch.zeros(1)) == "torch"


def test_torch_takes_anything():
    assert choose_backend("torch", torch.zeros(1, dtype=torch.float64, requires_grad=True)) == "torch"


def test_triton_in_the_interpreter(interpreted):
    assert choose_backend("triton", torch.zeros(1)) == "triton"


def test_unknown_name():
    with pytest.raises(ValueError, match="backend is 'cuda'; expected 'auto', 'torch' or 'triton'"):
        choose_backend("cuda", torch.zeros(1))


def test_triton_on_the_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="on cpu and kernels need CUDA .* use backend='auto'"):
        choose_backend("triton", torch.zeros(1))


def test_triton_with_a_gradient(interpreted):
    leaf = torch.zeros(1, requires_grad=True)
    with pytest.raises(ValueError, match="gradient is needed"):
        choose_backend("triton", torch.zeros(1), leaf)
    with torch.no_grad():
        assert choose_backend("triton", leaf) == "triton"


def test_triton_with_another_dtype(interpreted):
    with pytest.raises(ValueError, match="torch.float64 and kernels take"):
        choose_backend("triton", torch.zeros(1, dtype=torch.float64))


def test_triton_not_installed(interpreted, monkeypatch):
    monkeypatch.setattr(backend, "_has_triton", lambda: False)
    with pytest.raises(ValueError, match="triton is not installed"):
        choose_backend("triton", torch.zeros(1))
