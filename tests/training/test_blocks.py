"""Masks, context and gradients of the blocks, against loops that do not call the code under test."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dflash2.config import DFlash2Config
from dflash2.drafter import DFlash2Drafter
from dflash2.training.anchors import make_blocks, sample_anchors
from dflash2.training.attention import visible
from dflash2.training.data import Documents, assign, pack
from dflash2.training.loss import block_targets, draft_states

SLIDING, FULL = "sliding_attention", "full_attention"


def config(window=6, layer_types=(SLIDING, FULL), is_causal=None, block=4, **kw) -> DFlash2Config:
    if SLIDING not in layer_types:
        window = None
    v2 = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 3}
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    return DFlash2Config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=len(layer_types), vocab_size=31, mask_token_id=30,
        target_layer_ids=(0, 1), block_size=block, rope_parameters={"rope_theta": 1e4}, layer_types=layer_types,
        sliding_window=window, is_causal=is_causal, **(shape | v2 | kw),
    )  # fmt: skip


def documents(seed=0, count=9) -> Documents:
    rng = np.random.default_rng(seed)
    lens, plens = rng.integers(5, 25, count), rng.integers(1, 4, count)
    return Documents(rng.integers(0, 30, lens.sum()), lens.astype(np.int64), plens.astype(np.int64), np.zeros(count))


def packed_blocks(c, seed=0, anchors=24, tile=4, row_tokens=32):
    docs = documents(seed)
    rows = pack(docs, assign(docs.lens, row_tokens), row_tokens)
    chosen = sample_anchors(rows, anchors - 3, np.random.default_rng(seed))
    return rows, make_blocks(rows, chosen, anchors, tile, c.retention)


def table(dtype=torch.float64, seed=0) -> torch.Tensor:
    return torch.randn(31, 16, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def drafter(c, tied, seed=0) -> DFlash2Drafter:
    """Random weights in the dtype of ``tied``, which is embedding and head."""
    torch.manual_seed(seed)
    made = DFlash2Drafter(c, dtype=tied.dtype)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return made.bind_target(tied, tied)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
def test_masks_against_a_loop(window, causal):
    c = config(window, (FULL if window is None else SLIDING,), causal)
    rows, blocks = packed_blocks(c)
    got = visible(blocks, 4, window=window, causal=causal)
    document, position = rows.document.reshape(-1).tolist(), rows.positions.reshape(-1).tolist()
    for t in range(len(blocks.slab_first)):
        anchors = blocks.anchors[t * 4 : t * 4 + 4].tolist()
        seen_context = set()
        for j, a in enumerate(anchors):
            for i in range(4):
                row = got[t, j * 4 + i]
                keys = {int(blocks.slab_first[t]) + k for k in range(blocks.slab_length) if row[k]}
                q = position[a] + i
                expected = {
                    k
                    for k in range(len(document))
                    if document[k] == document[a]
                    and position[k] < position[a]
                    and (window is None or q - position[k] < window)
                }
                assert keys == expected
                seen_context |= keys
                own = {divmod(k, 4) for k in range(16) if row[blocks.slab_length + k]}
                assert own == {
                    (j, x) for x in range(4) if (x <= i or not causal) and (window is None or abs(x - i) < window)
                }


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("layer_types", [(SLIDING, SLIDING), (FULL, FULL), (SLIDING, FULL)])
def test_forward_equals_inference_on_each_document_alone(layer_types, is_causal):
    c = config(5, layer_types, is_causal)
    rows, blocks = packed_blocks(c, seed=1)
    embedding = table()
    net = drafter(c, embedding)
    taps = torch.randn(rows.tokens.size, 32, dtype=torch.float64)
    got = draft_states(net, blocks, taps)
    for n, anchor in enumerate(blocks.anchors.tolist()):
        d = int(blocks.document[anchor])
        first, start = int(rows.first[d]), anchor - int(rows.first[d])
        keys, values = net.context_rows(taps[first:anchor], torch.arange(start))

        def attend(layer, q, k, v, keys=keys, values=values, start=start):
            return dense_attention(c, layer, q, torch.cat((keys[layer], k)), torch.cat((values[layer], v)), start)

        ids = torch.tensor([int(blocks.tokens[anchor])] + [c.mask_token_id] * 3)
        alone = net(embedding[ids], start + torch.arange(4), attend)
        torch.testing.assert_close(got[n], alone, rtol=1e-5, atol=1e-7)


def dense_attention(c, layer, q, keys, values, start):
    """One block, key by key: the rule of the method written out."""
    window, causal = c.windows[layer], c.causal[layer]
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        at = start + i
        seen = [
            k
            for k in range(keys.shape[0])
            if (k < start or not causal or k <= at) and (window is None or (at - k < window and k - at < window))
        ]
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // keys.shape[1])
            p = F.softmax(keys[seen, g] @ q[i, h] / q.shape[-1] ** 0.5, dim=-1)
            out[i, h] = p @ values[seen, g]
    return out


def test_no_gradient_reaches_taps_at_or_after_an_anchor_or_of_other_documents():
    c = config(7)
    rows, blocks = packed_blocks(c, seed=2, anchors=40)
    net = drafter(c, table())
    taps = torch.randn(rows.tokens.size, 32, dtype=torch.float64, requires_grad=True)
    z = draft_states(net, blocks, taps)
    for n in range(0, len(blocks.anchors), 3):
        (grad,) = torch.autograd.grad(z[n].square().sum(), taps, retain_graph=True)
        anchor = int(blocks.anchors[n])
        first = int(rows.first[blocks.document[anchor]])
        touched = grad.abs().sum(-1).nonzero().flatten().tolist()
        assert all(first <= k < anchor for k in touched)
        assert len(touched) == anchor - first


def test_blocks_do_not_see_each_other():
    c = config(7)
    rows, blocks = packed_blocks(c, seed=2)
    net = drafter(c, table())
    taps = torch.randn(rows.tokens.size, 32, dtype=torch.float64)
    one = blocks.anchors[10:11].numpy()
    alone = draft_states(net, make_blocks(rows, one, 4, 4, c.retention), taps)[0]
    torch.testing.assert_close(draft_states(net, blocks, taps)[10], alone, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_mask_embedding_takes_the_place_of_the_tables_row(scale):
    c = config(7, input_embedding_scale=scale)
    rows, blocks = packed_blocks(c, seed=2)
    taps, row = torch.randn(rows.tokens.size, 32, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    with_row, other = table(), table()
    other[c.mask_token_id] = row
    net = drafter(c, with_row)
    net.mask_embedding = row
    expected = draft_states(drafter(c, other), blocks, taps)
    torch.testing.assert_close(draft_states(net, blocks, taps), expected, rtol=1e-9, atol=1e-11)


def test_targets_stop_at_the_end_of_the_document_and_decay():
    c = config()
    rows, blocks = packed_blocks(c, seed=3)
    states = torch.arange(rows.tokens.size, dtype=torch.float64).unsqueeze(-1)
    t = block_targets(blocks, states, 4, gamma=2.0)
    flat = rows.tokens.reshape(-1)
    for n, a in enumerate(blocks.anchors.tolist()):
        end = int(rows.end[blocks.document[a]])
        for i in range(1, 4):
            inside = a + i < end and bool(blocks.valid[n])
            assert float(t.weight[n, i - 1]) == pytest.approx(np.exp(-(i - 1) / 2) if inside else 0.0)
            if inside:
                assert int(t.token[n, i - 1]) == flat[a + i]
                assert int(t.predecessor[n, i - 1]) == flat[a + i - 1]
                assert float(t.teacher[n, i - 1]) == a + i - 1
    assert not blocks.valid[-3:].any()


def test_anchors_are_answer_tokens_with_a_successor():
    docs = documents(4)
    rows = pack(docs, assign(docs.lens, 32), 32)
    expected = []
    for d in range(len(rows.first)):
        expected += [k for k in range(rows.first[d], rows.end[d]) if rows.answer[d] <= k < rows.end[d] - 1]
    assert sorted(rows.eligible().tolist()) == sorted(expected)
    assert sample_anchors(rows, 10**6, np.random.default_rng(0)).tolist() == sorted(expected)
