"""The C best tokens of each row of a 16- or 32-bit head, without writing its logits.

    logit[n, v] = sum over h of weight[v, h] * hidden[n, h] + bias[v]

Products of the operands as they are, summed in fp32. The logits are not rounded to 16 bits before they are compared, as
those of a linear module are: fewer ties, and the order is that of the exact products more often.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.ops.backend import Backend, check_devices
from dflash2.ops.launch import launch_settings
from dflash2.ops.top_candidates import fused_backend, real_rows, shard_top

__all__ = ["dense_topk", "dense_topk_reference"]

#: Elements of the weight that the reference widens at a time: 4 MiB of fp32 stay in a cache.
CHUNK_ELEMENTS = 2**20


def dense_topk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    count: int,
    first_id: int = 0,
    vocab_size: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The C best tokens of every row; the kernel writes no logits, and a row's bits do not depend on the other rows.

    Args:
        hidden: floating ``[N, H]``.
        weight: ``[V', H]`` in the dtype of ``hidden``.
        bias: floating ``[V']``, or None.
        count: C >= 1. May exceed V: places without a token hold id -1 and value -inf.
        first_id: added to the ids: the global id of row 0, where ``weight`` is one shard of a vocabulary; `merge_top`
            then gives what the whole would have given.
        vocab_size: V <= V'; rows of the weight from there on are padding and are not read. None is V'.
        backend: ``"auto"`` (the kernel on a GPU, up to 64 candidates), ``"torch"`` or ``"triton"``.

    Returns:
        ids int64 and values fp32, ``[N, C]``, ordered as by `top_candidates`: value, then lower id; NaN is -inf.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, ``count`` is out of range, or the backend cannot run here.
    """
    vocab = _check(hidden, weight, bias, vocab_size)
    tensors = [t for t in (hidden, weight, bias) if t is not None]
    if fused_backend(backend, count, *tensors) == "torch" or 0 in (hidden.shape[0], vocab):
        return shard_top(dense_topk_reference(hidden, weight, bias, vocab), count, first_id)
    from dflash2.kernels import dense_topk as kernel

    rows, width = hidden.shape
    settings = launch_settings("dense_topk", kernel.DEFAULTS, hidden.device, rows=rows, vocab=vocab, hidden=width)
    return kernel.dense_topk(hidden, weight, bias, vocab, count, first_id, settings)


def dense_topk_reference(hidden: Tensor, weight: Tensor, bias: Tensor | None, vocab: int) -> Tensor:
    """The definition of the logits, in torch: fp32 (fp64 for fp64 inputs) ``[N, vocab]``; differentiable; unchecked."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    rows, bias = hidden.to(dtype), None if bias is None else bias[:vocab].to(dtype)
    if weight.dtype == dtype:
        return F.linear(rows, weight[:vocab], bias)
    step = max(1, CHUNK_ELEMENTS // max(1, weight.shape[1]))
    logits = torch.cat([rows @ part.to(dtype).T for part in weight[:vocab].split(step)], -1)
    return logits if bias is None else logits + bias


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, vocab_size: int | None) -> int:
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}"
    shapes += "" if bias is None else f", bias {list(bias.shape)}"
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"dense_topk got {shapes}; expected hidden [N, H] and weight [V', H].")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"dense_topk got {shapes}; expected bias [V'] or None.")
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"dense_topk got hidden {hidden.dtype} and weight {weight.dtype}; expected one floating-point dtype. Cast "
            "the rows, which are fewer."
        )
    check_devices("dense_topk", hidden, weight, bias)
    return real_rows(weight, vocab_size)
