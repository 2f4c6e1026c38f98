"""Linear maps of few rows: the kernels against the definition in fp64."""

import pytest
import torch

from dflash2.ops.block_linear import block_linear, block_linear_reference, gated_linear, gated_linear_reference
from dflash2.ops.int8_rows import quantize_rows
from dflash2.ops.int16_rows import int16_rows
from dflash2.ops.launch import override
from dflash2.testing import assert_kernel_close

TRITON = [
    pytest.param("cpu", marks=pytest.mark.triton),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.triton]),
]
# rows N, columns K, output widths
SHAPES = [
    (1, 1, (1,)),
    (7, 37, (13,)),
    (8, 64, (48, 16, 16)),
    (16, 300, (33, 17)),  # a tail of columns, tiles that end inside a weight
    (17, 128, (40,)),
    (70, 96, (24,)),  # several tiles of rows
    (0, 64, (32,)),
]
LARGE = [(8, 5120, (4096, 1024, 1024)), (56, 4096, (5120,)), (8, 17408, (5120,)), (200, 5120, (1280,))]


def problem(shape, dtype, int8, device):
    rows, inner, outs = shape
    generator = torch.Generator().manual_seed(rows + inner)
    x = torch.randn(rows, inner, generator=generator).to(device, dtype)
    weights = [torch.randn(o, inner, generator=generator).to(device, dtype) / inner**0.5 for o in outs]
    if not int8:
        return x, weights, [None] * len(outs)
    pairs = [quantize_rows(w) for w in weights]
    return x, [w for w, _ in pairs], [s for _, s in pairs]


def doubled(x, weights, scales):
    return x.double(), [w.double() for w in weights], [None if s is None else s.double() for s in scales]


def exactly(x, weights, scales):
    x, weights, scales = doubled(x, weights, scales)
    return torch.cat([x @ w.T * (1.0 if s is None else s) for w, s in zip(weights, scales, strict=True)], -1)


def tolerance(x, weights, scales, exact):
    """fp32 sums in another order: sqrt(K) roundings. With int8 weights rows are 16-bit integers: half a step each."""
    order = 4 * x.shape[1] ** 0.5 * torch.finfo(torch.float32).eps * exact.abs().max()
    if scales[0] is None:
        return order
    total = torch.cat([w.double().abs().sum(1) * s for w, s in zip(weights, scales, strict=True)])
    return order + x.double().abs().amax(1, keepdim=True) / 32639 * 0.501 * total


def hold_to_the_definition(shape, dtype, int8, device):
    x, weights, scales = problem(shape, dtype, int8, device)
    y = block_linear(x, weights, scales, backend="triton")
    assert y.shape[1:] == (shape[0], sum(shape[2]))
    exact = exactly(x, weights, scales)
    if exact.numel():
        assert ((y.double().sum(0) - exact).abs() <= tolerance(x, weights, scales, exact)).all()


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("int8", [False, True], ids=["dense", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_the_definition(shape, dtype, int8, device):
    hold_to_the_definition(shape, dtype, int8, device)


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True], ids=["dense", "int8"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_kernel_at_the_sizes_of_a_27b_drafter(shape, int8):
    hold_to_the_definition(shape, torch.bfloat16, int8, "cuda")


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("weights_first", [0, 1])
@pytest.mark.parametrize("split", [1, 3, 8])
def test_settings_change_the_speed_only(split, weights_first, device):
    x, weights, scales = problem((5, 200, (70, 20)), torch.float32, False, device)
    settings = {"BLOCK_O": 64, "BLOCK_K": 64, "SPLIT": split, "WEIGHTS_FIRST": weights_first}
    with override("block_linear", settings):
        y = block_linear(x, weights, scales, backend="triton")
    torch.testing.assert_close(y.sum(0), block_linear_reference(x, weights, scales)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("stages", [2, 5])
@pytest.mark.parametrize("split", [1, 3, 8])
@pytest.mark.parametrize("int8", [False, True], ids=["dense", "int8"])
def test_weights_that_are_asked_for_early_give_the_same_bits(int8, split, stages, device):
    x, weights, scales = problem((5, 512, (70, 20)), torch.float16, int8, device)
    ways = []
    for early in (0, 1):
        settings = {"BLOCK_O": 64, "BLOCK_K": 64, "SPLIT": split, "EARLY": early, "num_stages": stages}
        with override("block_linear", settings):
            ways.append(block_linear(x, weights, scales, settled=True, backend="triton"))
    assert torch.equal(*ways)
    gate, up = weights[0], weights[0].flip(0).contiguous()
    rows = [x, int16_rows(x)] if int8 else [x]
    for x in rows:
        ways = []
        for early in (0, 1):
            with override("gated_linear", {"BLOCK_K": 128, "EARLY": early, "num_stages": stages}):
                ways.append(gated_linear(x, gate, up, [scales[0]] * 2, settled=True, backend="triton"))
        assert torch.equal(*ways)


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("int8", [False, True], ids=["dense", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 5, 3), (8, 96, 40), (17, 300, 33), (70, 64, 16), (0, 64, 32)], ids=str)
def test_gated(shape, dtype, int8, device):
    rows, inner, out = shape
    x, (gate, up), scales = problem((rows, inner, (out, out)), dtype, int8, device)
    x64, (gate64, up64), scales64 = doubled(x, (gate, up), scales)
    if int8:  # within what the rounding of the rows can do to either factor
        y, half = gated_linear(x, gate, up, scales, backend="triton").double(), torch.finfo(x.dtype).eps
        for w, s in ((gate64, scales64[0]), (up64, scales64[1])):
            assert w.shape == (out, inner)
            assert s.shape == (out,)
        g, u = (x64 @ w.T * s for w, s in ((gate64, scales64[0]), (up64, scales64[1])))
        e_g, e_u = (
            (tolerance(x, [w], [s], e) for w, s, e in ((gate, scales[0], g), (up, scales[1], u))) if rows else (0, 0)
        )
        bound = 1.1 * e_g * u.abs() + (g.abs() + e_g) * e_u + 2 * half * (g * u).abs() + half
        assert ((y - g * torch.sigmoid(g) * u).abs() <= bound).all()
        return
    g, u = (x64 @ w.T * (1.0 if s is None else s) for w, s in zip((gate64, up64), scales64, strict=True))
    assert_kernel_close(
        gated_linear(x, gate, up, scales, backend="triton"),
        gated_linear_reference(x, gate, up, scales),
        g * torch.sigmoid(g) * u,
    )


@pytest.mark.parametrize("device", TRITON)
def test_rows_as_integers(device):
    """Planes and scales made beforehand: the product of exactly the rows that they stand for."""
    x, weights, scales = problem((5, 384, (40, 24)), torch.float32, True, device)
    rows = int16_rows(x)
    exact = exactly(rows.float(), weights, scales)
    order = 4 * 384**0.5 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert ((block_linear(rows, weights, scales, backend="triton").double().sum(0) - exact).abs() <= order).all()
    gate, up = weights[0][:24], weights[1]
    pair = (scales[0][:24], scales[1])
    found = gated_linear(rows, gate, up, pair, backend="triton")
    torch.testing.assert_close(found, gated_linear_reference(rows, gate, up, pair), rtol=1e-5, atol=1e-5)


def test_misfits_are_named():
    x, w = torch.ones(2, 4), torch.ones(3, 5)
    with pytest.raises(ValueError, match="must have 4 columns"):
        block_linear(x, [w], [None])
    with pytest.raises(ValueError, match="int8 with fp32 scales"):
        block_linear(x, [torch.ones(3, 4, dtype=torch.int8)], [None])
    with pytest.raises(ValueError, match="one to three weights"):
        block_linear(x, [], [])
