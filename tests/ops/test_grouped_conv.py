"""grouped_conv against a loop written from the formula, and the kernel against the reference."""

import math

import pytest
import torch

from dflash2.ops.grouped_conv import grouped_conv
from dflash2.testing import assert_kernel_close

# leading dimensions, rows n, taps K, groups, group size G
SHAPES = [
    ((), 1, 1, 1, 1),
    ((1,), 1, 4, 1, 1),  # more taps than rows
    ((3,), 7, 2, 5, 13),  # primes
    ((2, 3), 5, 4, 3, 7),
    ((2,), 8, 2, 4, 16),
    ((1,), 3, 3, 1, 1031),  # two tiles of 512 channels and a tail of 7
    ((0,), 8, 2, 4, 16),  # an empty batch
    ((2,), 0, 2, 4, 16),  # an empty block
]


def inputs(shape, dtype=torch.float32, device="cpu"):
    lead, n, taps, groups, size = shape
    generator = torch.Generator().manual_seed(n * 1000 + groups)

    def normal(*dims):
        return torch.randn(*dims, generator=generator).to(device, dtype)

    hidden = groups * size
    return normal(*lead, n, hidden), normal(taps, hidden), normal(*lead, n, taps, groups)


def by_hand(x, base, delta):
    """One output row of one channel at a time, in Python floats."""
    (taps, hidden), (n, groups) = base.shape, (x.shape[-2], delta.shape[-1])
    blocks = math.prod(x.shape[:-2])
    xs = x.double().reshape(blocks, n, hidden).tolist()
    deltas = delta.double().reshape(blocks, n, taps, groups).tolist()
    bases = base.double().tolist()
    size = hidden // groups
    y = torch.zeros(blocks, n, hidden, dtype=torch.float64)
    for b in range(blocks):
        for i in range(n):
            for ch in range(hidden):
                y[b, i, ch] = sum(
                    (bases[o][ch] + deltas[b][i][o][ch // size]) * xs[b][i - o][ch] for o in range(taps) if i >= o
                )
    return y.reshape(x.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_formula(shape):
    x, base, delta = inputs(shape, torch.float64)
    torch.testing.assert_close(grouped_conv(x, base, delta), by_hand(x, base, delta), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reference_rounds_once(dtype):
    x, base, delta = inputs(SHAPES[2], dtype)
    exact = grouped_conv(x.double(), base.double(), delta.double())
    # fp32 sums of K terms may move a value across a rounding boundary, by one step and no more.
    step = torch.finfo(dtype).eps * exact.abs() + base.shape[0] * torch.finfo(torch.float32).eps * exact.abs().max()
    assert ((grouped_conv(x, base, delta).double() - exact).abs() <= step).all()


def test_starts_as_the_identity():
    x, base, delta = inputs(SHAPES[4])
    base.zero_()[0] = 1.0
    assert torch.equal(grouped_conv(x, base, torch.zeros_like(delta)), x)


def test_gradients():
    leaves = [t.requires_grad_() for t in inputs(((2,), 3, 4, 2, 2), torch.float64)]
    assert torch.autograd.gradcheck(grouped_conv, leaves)


def test_more_than_two_to_the_31_elements_on_meta():
    x = torch.empty(1 << 19, 8, 5120, dtype=torch.bfloat16, device="meta")
    delta = torch.empty(1 << 19, 8, 2, 320, dtype=torch.bfloat16, device="meta")
    y = grouped_conv(x, torch.empty(2, 5120, dtype=torch.bfloat16, device="meta"), delta)
    assert y.shape == x.shape
    assert y.numel() > 1 << 31


def poison_neighbours(x, delta):
    """NaN in every block but the middle one."""
    for other in (0, 2):
        x[other], delta[other] = float("nan"), float("nan")


def test_nan_of_another_block_stays_there():
    x, base, delta = inputs(((3,), 4, 4, 3, 5))
    clean = grouped_conv(x, base, delta)
    poison_neighbours(x, delta)
    assert torch.equal(grouped_conv(x, base, delta)[1], clean[1])


def test_unused_taps_of_the_first_rows_are_not_read():
    x, base, delta = inputs(((1,), 4, 4, 3, 5))
    clean = grouped_conv(x, base, delta)
    for i in range(4):
        delta[:, i, i + 1 :] = float("nan")
    assert torch.equal(grouped_conv(x, base, delta), clean)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape, dtype, kernel_device):
    x, base, delta = inputs(shape, dtype, kernel_device)
    actual = grouped_conv(x, base, delta, backend="triton")
    reference = grouped_conv(x, base, delta, backend="torch")
    exact = grouped_conv(x.double(), base.double(), delta.double(), backend="torch")
    assert_kernel_close(actual, reference, exact)


@pytest.mark.triton
def test_kernel_reads_strided_arguments(kernel_device):
    """One side of a two-sided projection, and rows that are a slice of wider ones."""
    x, base, _ = inputs(SHAPES[4], device=kernel_device)
    both = torch.randn(2, 8, 2, 2, 4, device=kernel_device)
    wide = torch.randn(2, 8, 3 * x.shape[-1], device=kernel_device)
    for rows in (x, wide[..., x.shape[-1] : 2 * x.shape[-1]], x.transpose(0, 1).contiguous().transpose(0, 1)):
        for side in (0, 1):
            delta = both[:, :, side]
            exact = grouped_conv(rows.double(), base.double(), delta.double(), backend="torch")
            actual = grouped_conv(rows, base, delta, backend="triton")
            assert_kernel_close(actual, grouped_conv(rows, base, delta, backend="torch"), exact)


@pytest.mark.triton
def test_kernel_reads_nothing_of_another_block(kernel_device):
    x, base, delta = inputs(((3,), 4, 4, 3, 5), device=kernel_device)
    clean = grouped_conv(x, base, delta, backend="triton")
    poison_neighbours(x, delta)
    for i in range(4):
        delta[1, i, i + 1 :] = float("nan")
    assert torch.equal(grouped_conv(x, base, delta, backend="triton")[1], clean[1])


@pytest.mark.triton
def test_kernel_row_does_not_depend_on_the_batch(kernel_device):
    x, base, delta = inputs(((5,), 4, 2, 3, 5), torch.bfloat16, kernel_device)
    together = grouped_conv(x, base, delta, backend="triton")
    assert torch.equal(grouped_conv(x[3:4], base, delta[3:4], backend="triton"), together[3:4])


@pytest.mark.gpu
def test_kernel_offsets_are_64_bit():
    blocks = (1 << 31) // (8 * 5120) + 1
    x = torch.ones(blocks, 8, 5120, dtype=torch.bfloat16, device="cuda")
    base = torch.ones(2, 5120, dtype=torch.bfloat16, device="cuda")
    delta = torch.zeros(blocks, 8, 2, 1, dtype=torch.bfloat16, device="cuda")
    y = grouped_conv(x, base, delta, backend="triton")
    assert (y[-1, 0] == 1).all()
    assert (y[-1, 1:] == 2).all()


@pytest.mark.gpu
def test_auto_is_the_kernel_on_a_gpu_without_gradients():
    arguments = inputs(SHAPES[2], torch.bfloat16, "cuda")
    assert torch.equal(grouped_conv(*arguments), grouped_conv(*arguments, backend="triton"))


def test_wrong_shapes_are_named():
    x, base, delta = inputs(SHAPES[4])
    with pytest.raises(ValueError, match=r"got x \[8, 64\].*expected x \[\.\.\., n, H\]"):
        grouped_conv(x[0], base, delta)
    with pytest.raises(ValueError, match="channels H must agree"):
        grouped_conv(x[..., 1:], base, delta)
    with pytest.raises(ValueError, match="channels H must agree"):
        grouped_conv(x, base[:1], delta)
    with pytest.raises(ValueError, match="divide the 64 channels"):
        grouped_conv(x, base, delta[..., :3])


def test_devices_must_agree():
    x, base, delta = inputs(SHAPES[4])
    with pytest.raises(ValueError, match="base on meta.*together"):
        grouped_conv(x, base.to("meta"), delta)
