import pytest
import torch

from dflash2.ops.row_linear import row_linear


def cancelling(n: int, k: int, out: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums in which almost everything cancels: another order of summation gives other bits."""
    g = torch.Generator().manual_seed(k * 1000 + out)
    u, v = torch.randn(n, k // 2, generator=g), torch.randn(out, k // 2, generator=g)
    order = torch.randperm(k, generator=g)
    rest = 0.001 * torch.randn(out, k // 2, generator=g)
    return torch.cat((u, u), 1)[:, order].to(dtype), torch.cat((v, rest - v), 1)[:, order].to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("k", "out"), [(8, 4), (16, 2), (16, 8), (16, 16), (24, 8), (64, 4), (24, 12), (96, 16), (576, 192), (2880, 576)]
)
def test_a_row_does_not_depend_on_its_company(k, out, dtype):
    x, weight = cancelling(530, k, out, dtype)
    bias = torch.linspace(-1, 1, out).to(dtype)
    whole = row_linear(x, weight, bias)
    assert whole.shape == (530, out)
    for step in (1, 7, 16, 33, 48, 64, 200):
        parts = torch.cat([row_linear(part, weight, bias) for part in x.split(step)])
        assert torch.equal(parts, whole), step
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, bias))


def test_no_rows():
    assert row_linear(torch.empty(0, 8), torch.ones(3, 8)).shape == (0, 3)
