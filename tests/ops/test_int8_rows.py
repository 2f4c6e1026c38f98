"""quantize_rows against the formula in Python floats, and its bound on damaged, tiny and 16-bit rows."""

import math

import pytest
import torch

from dflash2.ops.int8_rows import quantize_rows


def rows(out=23, width=7, dtype=torch.float32):
    return torch.randn(out, width, generator=torch.Generator().manual_seed(out)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunk", [1, 5, 8192])
def test_is_the_formula(dtype, chunk):
    weight = rows(dtype=dtype)
    integers, scale = quantize_rows(weight, chunk_rows=chunk)
    assert (integers.dtype, scale.dtype) == (torch.int8, torch.float32)
    for row, found, step in zip(weight.double().tolist(), integers.tolist(), scale.tolist(), strict=True):
        assert step == pytest.approx(max(map(abs, row)) / 127, rel=1e-6)
        # A quotient within rounding of a half may go either way.
        assert all(abs(x / step - q) <= 0.5 + 1e-4 for x, q in zip(row, found, strict=True))
        assert max(map(abs, found)) == 127


def test_zero_tiny_and_damaged_rows():
    weight = torch.zeros(5, 3)
    weight[1, 0], weight[2, 1], weight[3, 2], weight[4] = 1e-44, math.nan, -math.inf, torch.tensor([1e38, -3e38, 0])
    integers, scale = quantize_rows(weight)
    assert integers[0].tolist() == [0, 0, 0]
    assert scale[0] == 0
    assert scale.isfinite().tolist() == [True, True, False, False, True]
    assert integers[4].tolist() == [42, -127, 0]
    assert int(integers.abs().max()) <= 127


def test_the_source_is_not_changed_and_needs_no_gradient():
    weight = rows().requires_grad_()
    before = weight.detach().clone()
    integers, scale = quantize_rows(weight)
    assert torch.equal(weight.detach(), before)
    assert not scale.requires_grad
    assert torch.equal(quantize_rows(before)[0], integers)


def test_empty_and_wrong_weights():
    assert quantize_rows(torch.empty(0, 4))[0].shape == (0, 4)
    assert quantize_rows(torch.empty(4, 0))[1].tolist() == [0.0] * 4
    with pytest.raises(ValueError, match=r"got \[3\].*\[out, in\]"):
        quantize_rows(torch.ones(3))
    with pytest.raises(ValueError, match=r"int8; expected floating"):
        quantize_rows(torch.ones(3, 3, dtype=torch.int8))
