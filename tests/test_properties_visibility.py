"""P5: what a query sees is the predicate of the method, per query, per layer, at every edge of the window."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from oracle import block_visible, check_row, context_visible, layer_rules
from tiny import FULL, SLIDING, Toy, tiny_config

import dflash2.ops.window_attention as attention
from dflash2 import DFlash2Drafter

B = 8
V1, V2 = "DFlashDraftModel", "DFlash2DraftModel"


def masks_of(toy: Toy, kv, seq: int, start: int, k: int):
    """The proposal, and the mask ``[k+1, S + k+1]`` that each layer's attention was given."""
    caught, real = [], attention.masked_attention
    attention.masked_attention = lambda *args: (caught.append(args[-1][0]), real(*args))[1]
    try:
        result = toy.hidden(lambda: toy.drafter.propose(kv, [seq], [3], [start], k))
    finally:
        attention.masked_attention = real
    return *result, caught


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("layers", [(SLIDING,), (FULL,), (SLIDING, FULL), (SLIDING, SLIDING, FULL)])
@pytest.mark.parametrize("window", [1, 4, B - 1, B, B + 1])
def test_every_query_sees_what_the_predicate_says(window, layers, is_causal):
    """Rows B50, B51, B54, B55, B60: W=1 sees itself alone; the left edge moves with the query, not with the block."""
    config = tiny_config(layer_types=layers, sliding_window=window, is_causal=is_causal, block_size=B)
    toy = Toy(config, seed=window)
    for start in sorted({0, 1, window - 1, window, window + 1, window + B - 1, 3 * window + 5}):
        kv = toy.drafter.new_kv(1, 64, 4)
        seq = kv.open()
        toy.append(kv, seq, 0, start)
        prop, hidden, masks = masks_of(toy, kv, seq, start, B - 1)
        draft = toy.oracle.draft(toy.context(0, start), 3, start, B - 1)
        torch.testing.assert_close(hidden[0].double(), draft.hidden, atol=1e-4, rtol=1e-4)
        check_row(prop, 0, toy.oracle, draft, 3)
        assert len(masks) == len(layers)
        for mask, (w, causal) in zip(masks, layer_rules(config), strict=True):
            gathered = mask.shape[1] - B
            keys = [*range(start - gathered, start), *range(start, start + B)]
            for i in range(B):
                expected = {p for p in range(start) if context_visible(start + i, p, start, w)}
                expected |= {start + j for j in range(B) if block_visible(start + i, start + j, w, causal)}
                assert {p for p, seen in zip(keys, mask[i].tolist(), strict=True) if seen} == expected


@pytest.mark.parametrize("is_causal", [None, False])
@pytest.mark.parametrize("extra", [-1, 0, 1, 7])
def test_the_production_window(is_causal, extra):
    """Rows B50, B51 at W=2048: starts W-1, W, W+1, W+7."""
    config = tiny_config(layer_types=(SLIDING,), sliding_window=2048, is_causal=is_causal, block_size=B)
    toy, start = Toy(config), 2048 + extra
    kv = toy.drafter.new_kv(1, 4096)
    seq = kv.open()
    toy.append(kv, seq, 0, start)
    assert kv.ring_pages == 130
    prop, hidden, (mask,) = masks_of(toy, kv, seq, start, B - 1)
    draft = toy.oracle.draft(toy.context(0, start), 3, start, B - 1)
    torch.testing.assert_close(hidden[0].double(), draft.hidden, atol=1e-4, rtol=1e-4)
    check_row(prop, 0, toy.oracle, draft, 3)
    assert mask[:, :-B].sum(1).tolist() == [len(seen) for seen in draft.seen[0]]
    assert len(draft.seen[0][0]) == min(start, 2047)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_fewer_drafts_than_trained_is_a_narrower_block(k):
    """A block of k+1 rows: each of them sees k others, and the convolution ends with it."""
    toy = Toy(tiny_config(block_size=B, layer_types=(SLIDING, FULL), conv_kernel_size=3))
    kv = toy.drafter.new_kv(1, 64)
    seq = kv.open()
    toy.append(kv, seq, 0, 20)
    prop, hidden, _ = masks_of(toy, kv, seq, 20, k)
    draft = toy.oracle.draft(toy.context(0, 20), 3, 20, k)
    torch.testing.assert_close(hidden[0].double(), draft.hidden, atol=1e-4, rtol=1e-4)
    check_row(prop, 0, toy.oracle, draft, 3)


def test_no_drafts_is_legal():
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(1, 64)
    seq = kv.open()
    toy.append(kv, seq, 0, 5)
    prop = toy.drafter.propose(kv, [seq], [3], [5], 0)
    assert prop.tokens.shape == (1, 0)
    assert prop.valid.tolist() == [True]


def test_undeclared_causality_follows_the_layer():
    """Row B54: the four combinations."""
    for is_causal, expected in ((None, (True, False)), (False, (False, False)), (True, (True, True))):
        assert tiny_config(layer_types=(SLIDING, FULL), is_causal=is_causal).causal == expected


def test_the_window_is_the_checkpoints():
    """Row B64: nothing at run time takes another window; who wants one writes another config."""
    config = tiny_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.sliding_window = 4
    for call in (DFlash2Drafter.__init__, DFlash2Drafter.new_kv, DFlash2Drafter.append, DFlash2Drafter.propose):
        assert not any("window" in name for name in inspect.signature(call).parameters)
