"""Triton kernel of `dflash2.ops.gumbel_sample`: a program for each row, one pass over its logits."""

import torch
import triton
import triton.language as tl

_TILE = 4096
_WARPS = 8
_LARGEST_BELOW_1 = tl.constexpr(1 - 2.0**-24)


@triton.jit
def _mix(x):
    """The finaliser of SplitMix64 on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(key, token):
    bits = (_mix(key + token.to(tl.uint64) * 0x9E3779B97F4A7C15) >> 32).to(tl.uint32)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _LARGEST_BELOW_1)
    series = u * (1 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return -tl.log(tl.where(u < 0.0078125, series, -tl.log(1 - u)))


@triton.jit
def _gumbel_sample_kernel(
    logits_ptr, temperatures_ptr, seeds_ptr, positions_ptr, out_ptr, vocab, row_stride, TILE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    seed = tl.load(seeds_ptr + row).to(tl.uint64)
    key = _mix(seed + _mix(tl.load(positions_ptr + row).to(tl.uint64)))
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_token = lane
    for start in range(0, vocab, TILE):
        token = start + lane
        logit = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        score = tl.where(logit == logit, logit, float("-inf"))
        if temperature > 0:
            score += temperature * _gumbel(key, token)
        better = score > best
        best = tl.where(better, score, best)
        best_token = tl.where(better, token, best_token)
    first = tl.min(tl.where(best == tl.max(best, 0), best_token, 0x7FFFFFFF), 0)
    tl.store(out_ptr + row, first.to(tl.int64))


def gumbel_sample(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Launch; shapes as in `dflash2.ops.gumbel_sample`, checked there."""
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if out.numel() == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    with torch.cuda.device_of(logits):
        _gumbel_sample_kernel[(out.shape[0],)](
            logits, temperatures.contiguous(), seeds.contiguous(), positions.contiguous(), out, logits.shape[1],
            logits.stride(0), TILE=min(_TILE, triton.next_power_of_2(logits.shape[1])), num_warps=_WARPS,
        )  # fmt: skip
    return out
