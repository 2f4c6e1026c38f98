"""The C best tokens of a row, in an order that does not depend on the backend or on shards of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.ops.backend import choose_backend

__all__ = ["fused_backend", "merge_top", "real_rows", "shard_top", "top_candidates"]

#: Candidates that the fused kernels keep per row at most.
MAX_KERNEL_COUNT = 64


def top_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Highest values first, lower id first among equals.

    Args:
        logits: floating ``[..., V]``; NaN counts as -inf.
        count: C, 1 <= C <= V.

    Returns:
        ids int64 ``[..., C]`` and values fp32 ``[..., C]``.
    """
    values = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    cut = values.topk(count, dim=-1).values[..., -1:]
    # Which of several equals `topk` takes is not documented. What lies above the cut is in; of what equals it, the
    # lowest ids fill up. Ranks are distinct where that matters.
    size = values.shape[-1]
    rank = torch.arange(size, 0, -1, device=values.device, dtype=torch.int32).where(values == cut, 0)
    rank = rank.masked_fill(values > cut, size + 1)
    ids = rank.topk(count, dim=-1).indices.sort(dim=-1).values
    best, order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), best


def shard_top(logits: Tensor, count: int, first_id: int = 0) -> tuple[Tensor, Tensor]:
    """`top_candidates` of one shard of the vocabulary, under global ids.

    Args:
        logits: floating ``[..., V]``, V >= 0: the shard's own.
        count: C >= 1, may exceed V.
        first_id: global id of the shard's first column.

    Returns:
        ids int64 and values fp32, ``[..., C]``; past the V-th place id -1 and value -inf.
    """
    ids, values = top_candidates(logits, min(count, logits.shape[-1]))
    missing = (0, count - ids.shape[-1])
    return F.pad(ids + first_id, missing, value=-1), F.pad(values, missing, value=-torch.inf)


def real_rows(weight: Tensor, vocab_size: int | None) -> int:
    """How many rows of a head's ``weight [V', H]`` are tokens: ``vocab_size``, or all of them if it is None.

    Raises:
        ValueError: the weight has not that many.
    """
    vocab = weight.shape[0] if vocab_size is None else vocab_size
    if not 0 <= vocab <= weight.shape[0]:
        raise ValueError(f"vocab_size={vocab}: the weight has {weight.shape[0]} rows.")
    return vocab


def fused_backend(backend: str, count: int, *tensors: Tensor) -> str:
    """`choose_backend` for an operation whose kernel selects ``count`` candidates by itself; ``"auto"`` takes torch
    beyond what it keeps.

    Raises:
        ValueError: as `choose_backend`; or ``count`` is below 1, or too large for the kernel that was asked for.
    """
    if count < 1:
        raise ValueError(f"count={count}: at least one candidate.")
    if count > MAX_KERNEL_COUNT and backend == "triton":
        raise ValueError(
            f"backend='triton' cannot run here: count={count} and the kernel keeps at most {MAX_KERNEL_COUNT}; use "
            "backend='auto' or 'torch'."
        )
    return choose_backend("torch" if count > MAX_KERNEL_COUNT and backend == "auto" else backend, *tensors)


def merge_top(ids: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best of the whole vocabulary from the best of its shards: what one shard of everything would have given.

    Args:
        ids: int64 ``[S, ..., C]``, from S disjoint shards in any order; -1 stands for no candidate.
        values: fp32 ``[S, ..., C]``, no NaN.
        count: how many to keep, 1 <= count <= C.

    Returns:
        ids ``[..., count]`` and values ``[..., count]``, ordered as by `top_candidates`; -1 and -inf at the end if all
        shards together hold fewer.

    Raises:
        ValueError: shapes do not fit, or each shard kept fewer than ``count``.
    """
    if ids.shape != values.shape or ids.dim() < 2 or not 1 <= count <= ids.shape[-1]:
        raise ValueError(
            f"merge_top got ids {list(ids.shape)}, values {list(values.shape)}, count={count}; expected two "
            "[S, ..., C] with 1 <= count <= C: ask each shard for at least as many as are merged."
        )
    ids, values = ids.movedim(0, -2).flatten(-2), values.movedim(0, -2).flatten(-2)
    # No candidate sorts as the highest id: behind a real one of -inf. Two stable sorts: by id, then by value.
    order = ids.where(ids >= 0, torch.iinfo(torch.int64).max).argsort(dim=-1, stable=True)
    values, by_value = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order.gather(-1, by_value[..., :count])), values[..., :count]
