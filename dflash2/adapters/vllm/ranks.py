"""Tensor parallelism: every rank drafts by itself, alike; only the target's vocabulary is split over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash2.lm_head import as_lm_head
from dflash2.sharded_head import ShardedLMHead

__all__ = ["agreement", "is_first_rank", "sharded_head", "whole_table"]


def _group() -> Any:
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()


def is_first_rank() -> bool:
    """Whether this process speaks for its group."""
    return bool(_group().rank_in_group == 0)


def _gather(t: Tensor) -> Tensor:
    group = _group()
    bits = t.contiguous().view(torch.float32) if t.dtype == torch.int32 else t.contiguous()  # on CPUs it moves floats
    gathered: Tensor = group.all_gather(bits, dim=0)
    return gathered.view(t.dtype).unflatten(0, (group.world_size, t.shape[0]))


def _rows(layer: Any) -> int | None:
    """Tokens that a rank's part of a ``VocabParallelEmbedding`` has room for; None where it is not split.

    They come first in it. Behind them are tokens that LoRA adapters add, which nobody drafts.
    """
    if getattr(layer, "tp_size", 1) == 1:
        return None
    rows: int = layer.shard_indices.num_org_elements_padded
    return rows


def whole_table(layer: Any, weight: Tensor) -> Tensor:
    """The embedding of all tokens, on every rank: a copy where it is split, so that no draft waits for a look-up.

    Args:
        layer: of the target.
        weight: its rows here.
    """
    rows = _rows(layer)
    return weight if rows is None else _gather(weight[:rows]).flatten(0, 1)[: layer.org_vocab_size]


def sharded_head(layer: Any, head: Any) -> Any:
    """``head`` as it is, or with those of the other ranks where it is one part of the vocabulary.

    Args:
        layer: of the target.
        head: what `as_lm_head` takes, of the rows here.
    """
    rows = _rows(layer)
    if rows is None:
        return head
    at = layer.shard_indices
    return ShardedLMHead(
        as_lm_head(head) if at.num_org_elements else None, _group().rank_in_group * rows, rows, _gather
    )


def agreement() -> Callable[[list[bool]], list[bool]] | None:
    """What is true on all ranks of what is true on this one, or None for a single rank. Waits for the others' hosts.

    The target's vocabulary is asked by all ranks together: a request that one of them has lost is nobody's.
    """
    group = _group()
    if group.world_size == 1:
        return None

    def agree(here: list[bool]) -> list[bool]:
        votes = torch.tensor(here, dtype=torch.int32)
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        return [bool(v) for v in votes.tolist()]

    return agree
