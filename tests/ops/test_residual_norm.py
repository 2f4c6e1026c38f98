"""The end of a sublayer with the norm after it, the convolution before it, and rotated heads."""

import pytest
import torch

from dflash2.ops.block_conv import block_conv, block_conv_reference
from dflash2.ops.int16_rows import int16_rows
from dflash2.ops.residual_norm import residual_norm, residual_norm_reference
from dflash2.ops.rotary_heads import rotary_heads, rotary_heads_reference
from dflash2.testing import assert_kernel_close

TRITON = [
    pytest.param("cpu", marks=pytest.mark.triton),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.triton]),
]
# blocks, rows n, taps K, groups, group size, parts S
SHAPES = [(1, 1, 1, 1, 1, 1), (3, 5, 2, 3, 7, 2), (2, 8, 2, 4, 16, 4), (1, 3, 4, 2, 50, 1), (0, 8, 2, 4, 16, 2)]
EPS = 1e-6


def normal(*shape, device, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def by_hand(h, a, bias, base, delta, weight, n):
    """Row by row, in fp64."""
    a = a.double().sum(0) + (0 if bias is None else bias.double())
    out = h.double().clone()
    group = None if delta is None else h.shape[1] // delta.shape[-1]
    for i in range(h.shape[0]):
        if base is None:
            out[i] += a[i]
            continue
        for o in range(min(base.shape[0], i % n + 1)):
            out[i] += (base[o].double() + delta[i, o].double().repeat_interleave(group)) * a[i - o]
    norm = out / (out.square().mean(-1, keepdim=True) + EPS).sqrt()
    return out, weight.double() * norm


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_residual_norm(shape, bias, conv, device):
    blocks, n, taps, groups, size, parts = shape
    rows, hidden = blocks * n, groups * size
    h, weight = normal(rows, hidden, device=device), normal(hidden, device=device)
    a = normal(parts, rows, hidden, device=device)
    b = normal(hidden, device=device) if bias else None
    base, delta = (
        (normal(taps, hidden, device=device), normal(rows, taps, groups, device=device)) if conv else (None,) * 2
    )
    expected = by_hand(h, a, b, base, delta, weight, n)
    for found in (
        residual_norm(h, a, b, base, delta, weight, EPS, n, backend="triton"),
        residual_norm_reference(h, a, b, base, delta, weight, EPS, n),
    ):
        for x, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(x.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_last_norm_drops_row_0_and_finds_what_is_not_finite(bad, device):
    blocks, n, hidden = 3, 4, 32
    h, a = normal(blocks * n, hidden, device=device), normal(2, blocks * n, hidden, device=device)
    weight, finite = torch.ones(hidden, device=device), torch.tensor([True, True, False], device=device)
    if bad is not None:
        h[n * 1, 5] = bad  # row 0 of block 1
    out, x = residual_norm(h, a, None, None, None, weight, EPS, n, finite, backend="triton")
    assert out is h
    assert x.shape == (blocks * (n - 1), hidden)
    assert finite.tolist() == [True, bad is None, False]
    _, expected = by_hand(h, a, None, None, None, weight, n)
    torch.testing.assert_close(
        x.double(), expected.unflatten(0, (blocks, n))[:, 1:].flatten(0, 1), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter truncates to bfloat16
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_conv(shape, dtype, device):
    blocks, n, taps, groups, size, parts = shape
    rows, hidden = blocks * n, groups * size
    x, base = normal(rows, hidden, device=device, dtype=dtype), normal(taps, hidden, device=device, dtype=dtype)
    delta = normal(parts, rows, 2 * taps * groups, device=device)
    y, after = block_conv(x, base, delta, n, backend="triton")
    ref_y, ref_after = block_conv_reference(x, base, delta, n)
    # Both add the parts in fp32, in their order, and round once: the coefficients are the same bits.
    assert torch.equal(after, ref_after)
    sides = delta.sum(0).to(dtype).double().unflatten(-1, (2, taps, groups))
    exact = torch.zeros(rows, hidden, dtype=torch.float64, device=device)
    for i in range(rows):
        for o in range(min(taps, i % n + 1)):
            exact[i] += (base[o].double() + sides[i, 0, o].repeat_interleave(size)) * x[i - o].double()
    assert_kernel_close(y, ref_y, exact)


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("hidden", [128, 384, 1152])  # one tile and several, with and without a tail
def test_rows_as_integers_are_those_of_the_definition(hidden, device):
    x, base = normal(6, hidden, device=device), normal(2, hidden, device=device)
    delta = normal(1, 6, 4 * hidden // 64, device=device)
    rows, _ = block_conv(x, base, delta, 3, int16=True, backend="triton")
    y, _ = block_conv(x, base, delta, 3, backend="triton")
    largest = y.unflatten(1, (-1, 128)).abs().amax(-1)
    torch.testing.assert_close(rows.scale, largest / 32639, rtol=1e-6, atol=0)
    step = rows.scale.repeat_interleave(128, 1)
    assert ((rows.float() - y).abs() <= 0.51 * step).all()
    # The integers of the kernel and of torch may differ by one where a value lies in the middle of two.
    assert ((rows.float() - int16_rows(y).float()).abs() <= 1.01 * step).all()


@pytest.mark.parametrize("device", TRITON)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 4, 2, 16, 2), (1, 1, 1, 2, 1), (3, 3, 1, 80, 3), (0, 2, 2, 8, 1)], ids=str)
def test_rotary_heads(shape, bias, device):
    rows, nq, nkv, hd, parts = shape
    width = (nq + 2 * nkv) * hd
    qkv = normal(parts, rows, width, device=device)
    q_norm, k_norm = normal(hd, device=device), normal(hd, device=device) + 1
    biases = tuple(normal(n * hd, device=device) for n in (nq, nkv, nkv)) if bias else None
    angle = torch.arange(rows * hd // 2, device=device).view(rows, hd // 2) * 0.7
    found = rotary_heads(qkv, biases, q_norm, k_norm, EPS, angle.cos(), angle.sin(), (nq, nkv), backend="triton")
    reference = rotary_heads_reference(qkv, biases, q_norm, k_norm, EPS, angle.cos(), angle.sin(), (nq, nkv))
    total = qkv.double().sum(0) + (torch.cat(biases).double() if bias else 0)
    turn = torch.polar(torch.ones_like(angle, dtype=torch.float64), angle.double())[:, None]
    for part, other, weight, n in zip(found, reference, (q_norm, k_norm, None), (nq, nkv, nkv), strict=True):
        x, total = total[:, : n * hd].reshape(rows, n, hd), total[:, n * hd :]
        if weight is not None:
            x = weight.double() * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
            turned = torch.complex(*x.chunk(2, -1)) * turn
            x = torch.cat((turned.real, turned.imag), -1)
        torch.testing.assert_close(part.double(), x, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(other.double(), x, rtol=2e-5, atol=2e-5)
