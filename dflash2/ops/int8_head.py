"""An output head with int8 weights, and the C best tokens of each row without writing its logits.

    s[n] = max |hidden[n, :]| / 32639,    q[n, h] = round(hidden[n, h] / s[n])   a whole number of 16 bits
    logit[n, v] = (scale[v] * s[n]) * fp32(sum over h of weight[v, h] * q[n, h]) + bias[v]

The sum is exact, in whole numbers, so a logit is the same to the bit whatever the device, the tiles of a kernel and the
number of rows. What rounding the rows costs: each element is off by at most half of s, 2^-16 of the row's largest one
(bf16 itself is off by up to 2^-9 of every element). Tensor cores multiply the int8 halves of q = 256 high + low.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash2.ops.backend import Backend, check_devices, choose_backend
from dflash2.ops.int16_rows import LIMIT
from dflash2.ops.launch import launch_settings
from dflash2.ops.top_candidates import fused_backend, real_rows, shard_top

__all__ = ["int8_head", "int8_head_reference", "int8_head_top"]

#: Products of int8 summed at a time: below 2^24 fp32 is exact, in any order, and so are bf16 and TF32 products.
EXACT_INPUTS = 2**24 // (128 * 127)
#: Elements of the weight that the reference widens at a time: 4 MiB of fp32 stay in a cache.
CHUNK_ELEMENTS = 2**20


def int8_head(
    hidden: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    vocab_size: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Logits of every row.

    Args:
        hidden: floating ``[N, H]``. A row with NaN or infinity has NaN for all logits; a row whose largest value is
            below 3.9e-34 counts as zeros.
        weight: int8 ``[V', H]``, as of `quantize_rows`.
        scale: fp32 ``[V']``.
        bias: floating ``[V']``, or None.
        vocab_size: V <= V'; rows of the weight from there on are padding and are not read. None is V'.
        backend: ``"auto"`` (the kernel on a GPU), ``"torch"`` or ``"triton"``; all give the same bits.

    Returns:
        fp32 ``[N, V]``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend cannot run here.
    """
    vocab = _check(hidden, weight, scale, bias, vocab_size)
    tensors = [t for t in (hidden, scale, bias) if t is not None]
    if choose_backend(backend, *tensors) == "torch" or 0 in (hidden.shape[0], vocab):
        return int8_head_reference(hidden, weight, scale, bias, vocab)
    from dflash2.kernels import int8_head as kernel

    return kernel.int8_head(hidden, weight, scale, bias, vocab, _settings(kernel.DEFAULTS, hidden, vocab))


def int8_head_top(
    hidden: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    count: int,
    first_id: int = 0,
    vocab_size: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The C best tokens of every row; the kernel writes no logits.

    Args:
        hidden, weight, scale, bias, vocab_size, backend: as in `int8_head`. The kernel keeps up to 64 candidates;
            ``"auto"`` takes torch beyond that.
        count: C >= 1. May exceed V: places without a token hold id -1 and value -inf.
        first_id: added to the ids: the global id of row 0, where ``weight`` is one shard of a vocabulary; `merge_top`
            then gives what the whole would have given.

    Returns:
        ids int64 and values fp32, ``[N, C]``, ordered as by `top_candidates`: value, then lower id; NaN is -inf.

    Raises:
        ValueError: as in `int8_head`, or ``count`` is out of range.
    """
    vocab = _check(hidden, weight, scale, bias, vocab_size)
    tensors = [t for t in (hidden, scale, bias) if t is not None]
    if fused_backend(backend, count, *tensors) == "torch" or 0 in (hidden.shape[0], vocab):
        return shard_top(int8_head_reference(hidden, weight, scale, bias, vocab), count, first_id)
    from dflash2.kernels import int8_head as kernel

    settings = _settings(kernel.DEFAULTS, hidden, vocab)
    return kernel.int8_head_top(hidden, weight, scale, bias, vocab, count, first_id, settings)


def _whole_rows(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``hidden [N, H]``, floating, as whole numbers.

    Returns:
        fp32 ``[N, H]``, whole numbers within +-32639, and the scale fp32 ``[N]``, NaN for a row that is not finite.
    """
    rows = hidden.float()
    largest = rows.abs().amax(-1, keepdim=True) if rows.shape[-1] else rows.new_zeros(rows.shape[0], 1)
    # By a tensor: CUDA divides by a number as it multiplies by its rounded inverse.
    scale = torch.where(largest.isfinite(), largest / torch.full_like(largest, LIMIT), torch.nan)
    # A scale below the normal numbers is itself rounded: the quotients could pass the limit.
    usable = scale >= torch.finfo(torch.float32).tiny
    whole = torch.where(usable, rows, 0.0).div_(torch.where(usable, scale, 1.0)).round_()
    return whole, scale[:, 0]


def int8_head_reference(hidden: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, vocab: int) -> Tensor:
    """The definition, in torch: fp32 ``[N, vocab]``. Shapes as in `int8_head`, unchecked.

    Differentiable in ``hidden`` and ``bias`` as if rows were not rounded.
    """
    logits = _Product.apply(hidden, weight, scale, vocab)
    return logits if bias is None else logits + bias[:vocab].float()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, scale: Tensor, vocab: int) -> Tensor:
        ctx.save_for_backward(weight[:vocab], scale[:vocab])
        ctx.dtype = hidden.dtype
        return _logits(hidden, weight, scale, vocab)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        weight, scale = ctx.saved_tensors
        scaled, step = gradient * scale, _chunk_rows(weight)
        parts = zip(scaled.split(step, -1), weight.split(step), strict=True)
        total = torch.stack([g @ w.float() for g, w in parts]).sum(0)
        return total.to(ctx.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, scale: Tensor, vocab: int) -> Tensor:
    """Whole numbers up to 2^24 are exact in fp32, so the halves are multiplied in fp32 and added up in fp64."""
    whole, row_scale = _whole_rows(hidden)
    high = whole.add(128).div_(256).floor_()
    halves = torch.cat((high, whole - 256 * high)).T  # [H, 2N]
    step = _chunk_rows(weight)
    logits = hidden.new_empty(hidden.shape[0], vocab, dtype=torch.float32)
    for i in range(0, vocab, step):
        part = slice(i, min(i + step, vocab))
        total = _exact_product(weight[part].float(), halves)
        logits[:, part] = (scale[part, None] * row_scale * total).T
    return logits


def _chunk_rows(weight: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // max(1, weight.shape[1]))


def _exact_product(weight: Tensor, halves: Tensor) -> Tensor:
    """``[v, H] x [H, 2N] -> [v, N]``: exact sums, then one rounding to fp32."""
    total: Tensor | None = None
    for at in range(0, weight.shape[1], EXACT_INPUTS):
        inputs = slice(at, at + EXACT_INPUTS)
        high, low = (weight[:, inputs] @ halves[inputs]).chunk(2, -1)
        if weight.shape[1] <= EXACT_INPUTS:
            return high * 256 + low  # a product by 256 is exact: this sum is the one rounding
        part = high.double() * 256 + low
        total = part if total is None else total + part
    return weight.new_zeros(weight.shape[0], halves.shape[1] // 2) if total is None else total.float()


def _settings(defaults: dict[str, int], hidden: Tensor, vocab: int) -> dict[str, int]:
    rows, width = hidden.shape
    return launch_settings("int8_head", defaults, hidden.device, rows=rows, vocab=vocab, hidden=width)


def _check(hidden: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, vocab_size: int | None) -> int:
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, scale {list(scale.shape)}"
    shapes += "" if bias is None else f", bias {list(bias.shape)}"
    rows = weight.shape[:1]
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"int8_head got {shapes}; expected hidden [N, H] and weight [V', H].")
    if scale.shape != rows or (bias is not None and bias.shape != rows):
        raise ValueError(f"int8_head got {shapes}; expected scale [V'] and bias [V'] or None.")
    if weight.dtype != torch.int8 or scale.dtype != torch.float32 or not hidden.is_floating_point():
        raise ValueError(
            f"int8_head got hidden {hidden.dtype}, weight {weight.dtype}, scale {scale.dtype}; expected floating-point "
            "hidden, an int8 weight and an fp32 scale (a cast must leave the scale alone)."
        )
    check_devices("int8_head", hidden, weight, scale, bias)
    return real_rows(weight, vocab_size)
