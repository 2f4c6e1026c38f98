"""row_linear: the same bits for a row in any company, from the reference and from the kernel."""

import pytest
import torch

from dflash2.ops.launch import override
from dflash2.ops.row_linear import row_linear
from dflash2.testing import assert_kernel_close

SPLITS = (1, 7, 16, 17, 64, 127, 128, 129, 300)
#: N, K, O: one and primes, tails of every tile, several spans of the inputs.
SHAPES = [(1, 1, 1), (7, 13, 5), (0, 32, 16), (17, 40, 70), (19, 1100, 7), (33, 1536, 130)]


def cancelling(
    n: int, k: int, out: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums in which almost everything cancels: another order of summation gives other bits. And a bias."""
    g = torch.Generator(device).manual_seed(k * 1000 + out)
    u, v, rest = (torch.randn(m, k // 2, generator=g, device=device) for m in (n, out, out))
    order = torch.randperm(k, generator=g, device=device)
    rest *= 0.001
    x, weight = torch.cat((u, u), 1)[:, order], torch.cat((v, rest - v), 1)[:, order]
    return x.to(device, dtype), weight.to(device, dtype), torch.linspace(-1, 1, out).to(device, dtype)


def problem(n: int, k: int, out: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(n + k)
    made = (torch.randn(n, k, generator=g), torch.randn(out, k, generator=g) / k**0.5, torch.randn(out, generator=g))
    return tuple(t.to(device, dtype) for t in made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("k", "out"), [(8, 4), (16, 2), (16, 8), (16, 16), (24, 8), (64, 4), (24, 12), (96, 16), (576, 192), (2880, 576)]
)
def test_a_row_does_not_depend_on_its_company(k, out, dtype):
    x, weight, bias = cancelling(530, k, out, dtype)
    whole = row_linear(x, weight, bias)
    assert whole.shape == (530, out)
    for step in (1, 7, 16, 33, 48, 64, 200):
        parts = torch.cat([row_linear(part, weight, bias) for part in x.split(step)])
        assert torch.equal(parts, whole), step
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, bias))


def test_no_rows():
    assert row_linear(torch.empty(0, 8), torch.ones(3, 8)).shape == (0, 3)


def test_gradients():
    leaves = [t.requires_grad_() for t in problem(3, 5, 4, torch.float64, "cpu")]
    assert torch.autograd.gradcheck(row_linear, leaves)


# -- the kernel --------------------------------------------------------------------------------------------------------


def hold_to_the_definition(n, k, out, dtype, device):
    x, weight, bias = problem(n, k, out, dtype, device)
    for b in (None, bias):
        actual = row_linear(x, weight, b, backend="triton")
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
        assert_kernel_close(actual, row_linear(x, weight, b, backend="torch"), exact, terms=x.shape[1])


def hold_to_the_same_bits(x, weight, bias):
    whole = row_linear(x, weight, bias, backend="triton")
    for n in SPLITS:
        for first in {0, len(x) - n} if n < 64 else {0}:
            part = row_linear(x[first : first + n], weight, bias, backend="triton")
            assert torch.equal(part, whole[first : first + n]), (n, first)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter multiplies no bfloat16 matrices
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape, dtype, kernel_device):
    hold_to_the_definition(*shape, dtype, kernel_device)


@pytest.mark.triton
@pytest.mark.parametrize("gather", [0, 1])
def test_kernel_sums_its_spans_in_one_order(gather, kernel_device):
    """Across programs and inside one program: three spans, whose sums almost cancel."""
    x, weight, bias = cancelling(20, 1536, 24, torch.float32, kernel_device)
    settings = {"BLOCK_O": 64, "BLOCK_R": 16, "BLOCK_K": 32, "GATHER": gather, "num_warps": 4, "num_stages": 2}
    with override("row_linear", settings):
        actual = row_linear(x, weight, bias, backend="triton")
    assert torch.equal(actual, row_linear(x, weight, bias, backend="triton"))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_rows_do_not_depend_on_their_company(dtype, kernel_device):
    hold_to_the_same_bits(*cancelling(301, 1100, 24, dtype, kernel_device))


@pytest.mark.triton
def test_kernel_reads_rows_of_wider_memory(kernel_device):
    x, weight, _ = problem(9, 40, 24, torch.float32, kernel_device)
    wide = torch.full((9, 100), float("nan"), device=kernel_device)
    wide[:, 3:43] = x
    expected = row_linear(x, weight, backend="triton")
    assert torch.equal(row_linear(wide[:, 3:43], weight, backend="triton"), expected)
    assert torch.equal(row_linear(x.T.contiguous().T, weight, backend="triton"), expected)


@pytest.mark.triton
def test_kernel_keeps_a_nan_in_its_row(kernel_device):
    x, weight, bias = problem(20, 40, 24, torch.float32, kernel_device)
    clean = row_linear(x, weight, bias, backend="triton")
    x[5] = float("nan")
    found = row_linear(x, weight, bias, backend="triton")
    assert bool(found[5].isnan().all())
    others = torch.arange(20) != 5
    assert torch.equal(found[others], clean[others])


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (300, 2560, 512), (2080, 1280, 1024)], ids=str)
def test_kernel_on_the_gpu(shape, dtype):
    hold_to_the_definition(*shape, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("k", "out"), [(2560, 512), (25600, 5120), (33280, 6656), (5120, 10240), (2880, 576)])
def test_kernel_rows_do_not_depend_on_their_company_on_the_gpu(k, out, dtype):
    """Width 512, and fc and the context projections of the 27B and 30B drafters, in every tile shape there is."""
    hold_to_the_same_bits(*cancelling(2080, k, out, dtype, "cuda"))


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_settings_do_not_change_bits(dtype):
    """So a tuned GPU may change tiles with the number of rows."""
    from dflash2.kernels.row_linear import CANDIDATES

    x, weight, bias = cancelling(300, 5120, 512, dtype, "cuda")
    expected = row_linear(x, weight, bias, backend="triton")
    for settings in CANDIDATES:
        with override("row_linear", settings):
            assert torch.equal(row_linear(x, weight, bias, backend="triton"), expected), settings


@pytest.mark.gpu
def test_auto_is_the_kernel_on_a_gpu_without_gradients():
    arguments = problem(7, 64, 16, torch.bfloat16, "cuda")
    assert torch.equal(row_linear(*arguments), row_linear(*arguments, backend="triton"))


def test_wrong_arguments_are_named():
    x, weight, bias = problem(2, 8, 3, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"got x \[2, 7\], weight \[3, 8\], bias None; expected x \[N, K\]"):
        row_linear(x[:, 1:], weight)
    with pytest.raises(ValueError, match="one bias for each row of the weight"):
        row_linear(x, weight, bias[1:])
    with pytest.raises(ValueError, match="expected one dtype and one device"):
        row_linear(x, weight.half())
    with pytest.raises(ValueError, match="expected one dtype and one device"):
        row_linear(x, weight.to("meta"))
