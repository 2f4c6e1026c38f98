"""A head in parts, each asked by a thread of its own as a rank would, against the whole one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash2.lm_head import DenseLMHead, Int8LMHead, LMHead
from dflash2.sharded_head import ShardedLMHead

H = 16


def ranks(vocab: int, rows: int, weight: Tensor, kind: Callable[[Tensor], LMHead]) -> list[ShardedLMHead]:
    """Heads over ``rows`` tokens each; what a shard has beyond the vocabulary is zeros, as engines pad it."""
    count = -(-vocab // rows)
    parts, barrier = [torch.empty(0)] * count, Barrier(count, timeout=20)

    def gather_on(rank: int) -> Callable[[Tensor], Tensor]:
        def gather(t: Tensor) -> Tensor:
            parts[rank] = t
            barrier.wait()
            of_all = torch.stack(parts)
            barrier.wait()
            return of_all

        return gather

    padded = torch.zeros(count * rows, H)
    padded[:vocab] = weight
    shards = [kind(s) if bool(s.any()) else None for s in padded.split(rows)]
    return [ShardedLMHead(s, r * rows, rows, gather_on(r)) for r, s in enumerate(shards)]


def on_all(heads: list[ShardedLMHead], call: Callable[[ShardedLMHead], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(heads)) as pool:
        return list(pool.map(call, heads))


def int8(weight: Tensor) -> Int8LMHead:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return Int8LMHead.from_linear(linear)


@pytest.mark.parametrize("kind", [DenseLMHead, int8], ids=["dense", "int8"])
@pytest.mark.parametrize("vocab", [23, 37, 48])
@pytest.mark.parametrize("rows", [8, 24, 64])
def test_any_shards_give_what_the_whole_gives(kind, vocab, rows):
    """Small integers: sums are exact and ties abound. With 24 and 64 rows shards are cut short, or there is but one."""
    g = torch.Generator().manual_seed(vocab)
    weight = torch.randint(-2, 3, (vocab, H), generator=g).float()
    hidden = torch.randint(-2, 3, (5, H), generator=g).float()
    whole = kind(weight)
    for real in (vocab, vocab - 3):  # the last rows may be the engine's own padding
        for count in (1, 4, 12):
            ids, values = whole.top(hidden, real, count)
            for got_ids, got in on_all(ranks(vocab, rows, weight, kind), lambda h: h.top(hidden, real, count)):  # noqa: B023
                assert torch.equal(got_ids, ids)
                assert torch.equal(got, values)
        for got in on_all(ranks(vocab, rows, weight, kind), lambda h: h.logits(hidden, real)):  # noqa: B023
            assert torch.equal(got, whole.logits(hidden, real).float())


def test_padding_does_not_win_where_all_logits_are_negative():
    weight = -torch.ones(9, H)
    for ids, values in on_all(ranks(9, 8, weight, DenseLMHead), lambda h: h.top(torch.ones(1, H), 9, 9)):
        assert ids.tolist() == [list(range(9))]
        assert values.tolist() == [[-16.0] * 9]


def test_ids_beyond_what_floats_can_count():
    far = 2**24 + 1
    head = ShardedLMHead(DenseLMHead(torch.ones(2, H)), far, 2, lambda t: t[None])
    assert head.top(torch.ones(1, H), far + 2, 2)[0].tolist() == [[far, far + 1]]
