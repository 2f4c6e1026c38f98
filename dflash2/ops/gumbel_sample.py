"""Draw one token per row from softmax(logits / T), or take the best one where T is 0; noise is a function of numbers.

    token = argmax over v of logits[v] + T g(v),   g(v) = -log(E(v)), E exponential with mean 1

is a draw from the softmax (the Gumbel-max trick). E(v) is computed from the row's seed, its position and v alone, so a
row's token depends on no other row, no order of draws and no state: an interrupted run is repeated exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash2.ops.backend import Backend, check_devices, choose_backend

__all__ = ["exponential_noise", "gumbel_sample", "gumbel_sample_reference"]

_LOW_63_BITS = 2**63 - 1
_LARGEST_BELOW_1 = 1 - 2.0**-24


def gumbel_sample(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """One token per row.

    Args:
        logits: floating ``[R, V]``, contiguous along V. NaN counts as -inf.
        temperatures: fp32 ``[R]``, >= 0. Not checked: they are on the device.
        seeds: int64 ``[R]``.
        positions: int64 ``[R]``: two draws of a seed are independent if they differ.
        backend: ``"auto"`` (the kernel on a GPU), ``"torch"`` or ``"triton"``.

    Returns:
        int64 ``[R]``; of equal scores the lowest id.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend cannot run here.
    """
    rows = (logits.shape[0],)
    if logits.dim() != 2 or logits.shape[1] == 0 or not rows == temperatures.shape == seeds.shape == positions.shape:
        raise ValueError(
            f"gumbel_sample got logits {list(logits.shape)}, temperatures {list(temperatures.shape)}, seeds "
            f"{list(seeds.shape)}, positions {list(positions.shape)}; expected [R, V] with V >= 1, and three of [R]."
        )
    if temperatures.dtype != torch.float32 or seeds.dtype != torch.int64 or positions.dtype != torch.int64:
        raise ValueError(
            f"gumbel_sample got temperatures {temperatures.dtype}, seeds {seeds.dtype}, positions {positions.dtype}; "
            "expected float32, int64, int64."
        )
    check_devices("gumbel_sample", logits, temperatures, seeds, positions)
    if choose_backend(backend, logits) == "torch":
        return gumbel_sample_reference(logits, temperatures, seeds, positions)
    from dflash2.kernels import gumbel_sample as kernel

    return kernel.gumbel_sample(logits, temperatures, seeds, positions)


def gumbel_sample_reference(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The definition, in torch: fp32 inside."""
    gumbel = -exponential_noise(seeds, positions, logits.shape[1]).log()
    scores = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return (scores + temperatures[:, None] * gumbel).argmax(-1)


def exponential_noise(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Exponential numbers with mean 1 for ids 0 to count - 1, fp32 ``[R, count]``; finite and above 0.

    -log(1 - u) for u of 32 bits of SplitMix64 (Steele, Lea, Flood 2014), which is a hash of a counter. A small u, to
    which 1 - u is deaf, goes into the series.
    """
    key = _mix(seeds + _mix(positions))
    ids = torch.arange(count, device=seeds.device) * _signed(0x9E3779B97F4A7C15)
    bits = (_mix(key[:, None] + ids) >> 32) & 0xFFFFFFFF
    u = ((bits.float() + 0.5) * 2.0**-32).clamp(max=_LARGEST_BELOW_1)
    return torch.where(u < 2.0**-7, u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25))), -(1 - u).log())


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64 with wrap-around."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & (_LOW_63_BITS >> (shift - 1)))) * _signed(factor)
    return x ^ ((x >> 31) & (_LOW_63_BITS >> 30))
