"""int8_linear against sums written from the formula, in whole numbers where they are exact."""

import pytest
import torch

from dflash2.ops import int8_linear as op
from dflash2.ops.int8_linear import int8_linear
from dflash2.testing import assert_kernel_close

# rows, K, O
SHAPES = [(1, 1, 1), (1, 7, 3), (3, 13, 5), (8, 64, 48), (17, 96, 31), (0, 8, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(rows, k, out, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(1000 * k + out)
    weight = torch.randint(-127, 128, (out, k), generator=g).to(torch.int8)
    x, scale, bias = (
        torch.randn(rows, k, generator=g),
        0.01 * torch.rand(out, generator=g),
        torch.randn(out, generator=g),
    )
    return x.to(device, dtype), weight.to(device), scale.to(device), bias.to(device, dtype)


def by_hand(x, weight, scale, bias):
    """One element at a time, in Python floats."""
    weights, scales, biases = weight.tolist(), scale.double().tolist(), bias.double().tolist()
    rows = [
        [s * sum(map(float.__mul__, xs, map(float, ws))) + b for ws, s, b in zip(weights, scales, biases, strict=True)]
        for xs in x.double().tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(x.shape[0], weight.shape[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_formula(shape):
    x, weight, scale, bias = inputs(*shape, torch.float64)
    torch.testing.assert_close(
        int8_linear(x, weight, scale, bias), by_hand(x, weight, scale, bias), rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_numbers_are_exact(dtype):
    """Sums of up to 2^24 are exact in fp32; what comes out of 16 bits is that sum, rounded once."""
    x, weight, _, _ = inputs(5, 300, 7)
    x = (4 * x).round().clamp(-8, 8)
    exact = (x.to(torch.int64) @ weight.to(torch.int64).T).double() * 2**-4
    y = int8_linear(x.to(dtype), weight, torch.full((7,), 2.0**-4))
    assert torch.equal(y, exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_rounds_once(shape, dtype):
    x, weight, scale, bias = inputs(*shape, dtype)
    in_fp32 = (x.float() @ weight.float().T) * scale + bias.float()
    exact = by_hand(x, weight, scale, bias)
    assert_kernel_close(int8_linear(x, weight, scale, bias), in_fp32.to(dtype), exact)


def test_unscaled_sums_may_pass_the_range_of_fp16():
    x, weight = torch.full((1, 4096), 16.0, dtype=torch.float16), torch.full((2, 4096), 127, dtype=torch.int8)
    y = int8_linear(x, weight, torch.tensor([1e-4, 0.0]))
    assert y.tolist() == [[torch.tensor(127 * 4096 * 16 * 1e-4).half().item(), 0.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "out"), [(8, 4), (64, 48), (576, 192)])
def test_a_row_does_not_depend_on_its_company(k, out, dtype):
    x, weight, scale, bias = inputs(200, k, out, dtype)
    whole = int8_linear(x, weight, scale, bias)
    for step in (1, 7, 16, 33, 64):
        assert torch.equal(torch.cat([int8_linear(part, weight, scale, bias) for part in x.split(step)]), whole), step


def test_pieces_of_the_weight(monkeypatch):
    x, weight, scale, bias = inputs(3, 13, 50, torch.float64)
    monkeypatch.setattr(op, "CHUNK_ELEMENTS", 100)
    torch.testing.assert_close(
        int8_linear(x, weight, scale, bias), by_hand(x, weight, scale, bias), rtol=1e-13, atol=1e-13
    )


def test_leading_dimensions_and_gradient():
    x, weight, scale, _ = inputs(6, 7, 5, torch.float64)
    y = int8_linear(x.view(2, 3, 7), weight, scale)
    assert torch.equal(y, int8_linear(x, weight, scale).view(2, 3, 5))
    assert int8_linear(x[0], weight, scale).shape == (5,)
    assert torch.autograd.gradcheck(lambda x: int8_linear(x, weight, scale), x.requires_grad_(True))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": torch.ones(2, 8)}, r"x \[2, 8\], weight \[3, 7\], scale \[3\]; expected x \[..., K\]"),
        ({"scale": torch.ones(7)}, r"scale \[7\]; expected"),
        ({"weight": torch.ones(3, dtype=torch.int8)}, r"weight \[3\]"),
        ({"bias": torch.ones(2)}, r"bias \[2\]; expected"),
        ({"weight": torch.ones(0, 7, dtype=torch.int8), "scale": torch.ones(0)}, "O and K >= 1"),
        ({"weight": torch.ones(3, 7)}, "weight torch.float32"),
        ({"scale": torch.ones(3).bfloat16()}, "scale torch.bfloat16"),
        ({"x": torch.ones(2, 7, dtype=torch.int64)}, "x torch.int64"),
        ({"x": torch.ones(2, 7, device="meta")}, r"\['cpu', 'meta'\]; move them together"),
    ],
    ids=str,
)
def test_what_does_not_fit(change, match):
    given = {"x": torch.ones(2, 7), "weight": torch.ones(3, 7, dtype=torch.int8), "scale": torch.ones(3), "bias": None}
    with pytest.raises(ValueError, match=match):
        int8_linear(**given | change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (8, 5120, 4096), (64, 17408, 5120), (33, 576, 1536)], ids=str)
def test_on_the_gpu(shape, dtype):
    x, weight, scale, bias = inputs(*shape, dtype, "cuda")
    exact = (x.double() @ weight.double().T) * scale.double() + bias.double()
    in_fp32 = (x.float() @ weight.float().T) * scale + bias.float()
    assert_kernel_close(int8_linear(x, weight, scale, bias), in_fp32.to(dtype), exact)
