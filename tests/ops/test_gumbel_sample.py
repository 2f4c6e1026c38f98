"""gumbel_sample: draws follow the softmax, greedy rows are argmax, noise depends on seed, position and id alone."""

import math

import pytest
import torch

from dflash2.ops.gumbel_sample import exponential_noise, gumbel_sample

MASK = 2**64 - 1


def split_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def exact_noise(seed: int, position: int, token: int) -> float:
    key = split_mix((seed + split_mix(position & MASK)) & MASK)
    bits = split_mix((key + token * 0x9E3779B97F4A7C15) & MASK) >> 32
    return -math.log1p(-min((bits + 0.5) * 2.0**-32, 1 - 2.0**-24))


def draws(rows, logits, temperature, backend="auto", device="cpu", first=0):
    positions = torch.arange(first, first + rows, device=device)
    heat = torch.full((rows,), temperature, device=device)
    wide = logits.to(device).expand(rows, -1).contiguous()
    return gumbel_sample(wide, heat, torch.full_like(positions, 7), positions, backend=backend)


def test_noise_is_what_the_formula_says():
    seeds, positions = torch.tensor([0, -3, 2**62, 9]), torch.tensor([0, 5, 2**40, 8191])
    got = exponential_noise(seeds, positions, 97)
    exact = [[exact_noise(s, p, v) for v in range(97)] for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)]
    # One rounding of u, and twice the error of a log near 1.
    torch.testing.assert_close(got.double(), torch.tensor(exact, dtype=torch.float64), rtol=2e-5, atol=0)


def test_noise_is_exponential():
    noise = exponential_noise(torch.arange(300), torch.arange(300) * 3, 1000).flatten().double()
    assert noise.min() > 0
    assert noise.isfinite().all()
    for moment in (1, 2, 3):
        deviation = math.sqrt((math.factorial(2 * moment) - math.factorial(moment) ** 2) / len(noise))
        assert abs(float(noise.pow(moment).mean()) - math.factorial(moment)) < 5 * deviation
    pairs = noise[:-1] * noise[1:]  # neighbours are independent
    assert abs(float(pairs.mean()) - 1) < 5 * math.sqrt(3 / len(pairs))


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.triton)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(backend, temperature, kernel_device):
    device, rows = ("cpu", 4000) if backend == "torch" else (kernel_device, 600)
    logits = torch.randn(23, generator=torch.Generator().manual_seed(3)) * 1.5
    seen = torch.bincount(draws(rows, logits, temperature, backend, device).cpu(), minlength=23)
    expected = (logits / temperature).softmax(-1) * rows
    big = expected > 5
    assert float(((seen - expected).square() / expected)[big].sum()) < 2.5 * int(big.sum())


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (3, 4099), (2, 9001)], ids=str)
def test_kernel(shape, dtype, kernel_device):
    generator = torch.Generator().manual_seed(shape[1])
    # Apart by more than a log is off by, so that both find the same best; greedy rows have ties.
    logits = torch.randn(shape, generator=generator).to(kernel_device, dtype)
    logits[0] = logits[0].round()
    heat = torch.tensor([0.0, 1.0, 0.3, 2.0, 0.0][: shape[0]], device=kernel_device)
    seeds = torch.randint(-(2**62), 2**62, (shape[0],), generator=generator).to(kernel_device)
    positions = torch.arange(shape[0], device=kernel_device) + 1000
    args = (logits, heat, seeds, positions)
    expected = gumbel_sample(*args, backend="torch")
    assert torch.equal(gumbel_sample(*args, backend="triton"), expected)
    assert expected[0] == logits[0].float().argmax()
    wide = torch.zeros(shape[0], shape[1] + 3, dtype=dtype, device=kernel_device)
    wide[:, : shape[1]] = logits
    assert torch.equal(gumbel_sample(wide[:, : shape[1]], *args[1:], backend="triton"), expected)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.triton)])
def test_edges(backend, kernel_device):
    inf, nan = math.inf, math.nan
    device = "cpu" if backend == "torch" else kernel_device
    logits = torch.tensor([[nan, 1.0, 1.0], [-inf, -inf, 0.0], [-inf, inf, 5.0]], device=device)
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    for heat in (0.0, 1.0):
        got = gumbel_sample(logits, torch.full((3,), heat, device=device), zeros, zeros, backend=backend).tolist()
        assert got[0] in ((1,) if heat == 0 else (1, 2))
        assert got[1:] == [2, 1]
    assert gumbel_sample(logits[:0], torch.ones(0, device=device), zeros[:0], zeros[:0], backend=backend).tolist() == []


def test_a_row_does_not_depend_on_the_others():
    logits = torch.randn(50)
    together = draws(20, logits, 1.0)
    assert together[13:15].tolist() == draws(2, logits, 1.0, first=13).tolist()
    assert len(set(together.tolist())) > 5


def test_what_does_not_fit_is_named():
    logits, heat, zeros = torch.zeros(2, 5), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"temperatures \[1\].*expected \[R, V\]"):
        gumbel_sample(logits, heat[:1], zeros, zeros)
    with pytest.raises(ValueError, match="seeds torch.int32.*expected float32, int64, int64"):
        gumbel_sample(logits, heat, zeros.int(), zeros)
    with pytest.raises(ValueError, match="V >= 1"):
        gumbel_sample(logits[:, :0], heat, zeros, zeros)


@pytest.mark.gpu
def test_a_whole_vocabulary():
    torch.manual_seed(0)
    logits = torch.randn(512, 49152, dtype=torch.bfloat16, device="cuda") * 3
    heat = torch.tensor([0.0, 0.7, 1.0, 1.5], device="cuda").repeat(128)
    positions = torch.arange(512, device="cuda")
    expected = gumbel_sample(logits, heat, positions * 0, positions, backend="torch")
    got = gumbel_sample(logits, heat, positions * 0, positions, backend="triton")
    assert torch.equal(got[::4], expected[::4])
    assert (got == expected).float().mean() > 0.99  # logs of two libraries differ in the last bit: near ties
