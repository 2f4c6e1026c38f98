"""Shards of a vocabulary give what the whole gives: against a stable sort in Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2.ops.top_candidates import fused_backend, merge_top, shard_top

VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan])


def brute_force(row, count):
    clean = [-math.inf if math.isnan(v) else v for v in row]
    ids = sorted(range(len(row)), key=lambda i: (-clean[i], i))[:count]
    missing = count - len(ids)
    return ids + [-1] * missing, [clean[i] for i in ids] + [-math.inf] * missing


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(VALUES, max_size=6), min_size=1, max_size=4), st.data())
def test_merged_shards_are_the_whole(parts, data):
    whole = [v for part in parts for v in part]
    kept = data.draw(st.integers(1, 8))
    count = data.draw(st.integers(1, kept))
    starts = [sum(map(len, parts[:i])) for i in range(len(parts))]
    order = data.draw(st.permutations(range(len(parts))))
    shards = [shard_top(torch.tensor([parts[i]]), kept, starts[i]) for i in order]
    for (ids, values), i in zip(shards, order, strict=True):
        local, expected = brute_force(parts[i], kept)
        assert ids.tolist() == [[starts[i] + t if t >= 0 else -1 for t in local]]
        assert values.tolist() == [expected]
    ids, values = merge_top(*(torch.stack(t) for t in zip(*shards, strict=True)), count)
    assert (ids.dtype, values.dtype) == (torch.int64, torch.float32)
    assert (ids[0].tolist(), values[0].tolist()) == brute_force(whole, count)


def test_leading_dimensions():
    logits = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0))
    shards = [shard_top(logits[..., a:b], 4, a) for a, b in ((7, 20), (0, 7))]
    ids, values = merge_top(*(torch.stack(t) for t in zip(*shards, strict=True)), 4)
    best = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, best.indices[..., :4])
    assert torch.equal(values, best.values[..., :4])


@pytest.mark.parametrize("count", [0, 5])
def test_more_than_the_shards_kept_is_refused(count):
    with pytest.raises(ValueError, match=rf"count={count}; expected.*ask each shard"):
        merge_top(torch.zeros(2, 3, 4, dtype=torch.int64), torch.zeros(2, 3, 4), count)
    with pytest.raises(ValueError, match=r"ids \[2, 3, 4\], values \[2, 3, 3\]"):
        merge_top(torch.zeros(2, 3, 4, dtype=torch.int64), torch.zeros(2, 3, 3), 2)


def test_kernels_keep_a_limited_number():
    assert fused_backend("auto", 1000, torch.zeros(1)) == "torch"
    with pytest.raises(ValueError, match="count=65 and the kernel keeps at most 64"):
        fused_backend("triton", 65, torch.zeros(1))
    with pytest.raises(ValueError, match="'cuda'; expected"):
        fused_backend("cuda", 65, torch.zeros(1))
