"""Ranges of keys against loops over every (query, key) pair, and flex attention against masked attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_blocks import FULL, SLIDING, config, documents, packed_blocks
from torch.nn import functional as F

from dflash2.training.anchors import draw_blocks
from dflash2.training.attention import TiledAttention
from dflash2.training.data import Documents, assign, pack
from dflash2.training.loss import supervision
from dflash2.training.spans import SpanAttention, block_spans, document_spans, span_mask
from dflash2.training.target import FrozenTarget, document_mask

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")


def seen(spans, keys) -> torch.Tensor:
    key = torch.arange(keys)
    return sum(((key >= low[:, None]) & (key < high[:, None])).int() for low, high in spans)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
def test_what_block_rows_see(window, causal):
    c = config(window, (FULL if window is None else SLIDING,), causal)
    rows, blocks = packed_blocks(c)
    document, position = rows.document.reshape(-1).tolist(), rows.positions.reshape(-1).tolist()
    size = len(document)
    got = seen(block_spans(blocks, 4, window=window, causal=causal), size + 4 * len(blocks.anchors))
    for n, a in enumerate(blocks.anchors.tolist()):
        for i in range(4):
            q = position[a] + i
            context = {
                k
                for k in range(size)
                if document[k] == document[a]
                and position[k] < position[a]
                and (window is None or q - position[k] < window)
            }
            own = {x for x in range(4) if (x <= i or not causal) and (window is None or abs(x - i) < window)}
            expected = context | {size + 4 * n + x for x in own}
            assert set(got[4 * n + i].nonzero().flatten().tolist()) == expected
            assert got[4 * n + i].max() == 1


@pytest.mark.parametrize("window", [None, 1, 4])
def test_what_tokens_see(window):
    rows, _ = packed_blocks(config())
    document = torch.from_numpy(rows.document)
    dense = document_mask(document, window)
    flat = seen([document_spans(document.flatten(), window)], document.numel()).bool()
    width = document.shape[1]
    for r in range(len(document)):
        part = slice(r * width, (r + 1) * width)
        assert torch.equal(flat[part, part], dense[r, 0])
    assert flat.sum() == dense.sum()


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (130, 700), (512, 1000), (300, 128)])
def test_tiles_that_are_needed_are_those_that_hold_a_seen_key(queries, keys):
    g = torch.Generator().manual_seed(queries)
    low = torch.randint(0, keys, (queries,), generator=g).int()
    high = (low + torch.randint(-5, 200, (queries,), generator=g)).clamp(max=keys).int()
    after = (torch.maximum(low, high) + 7).clamp(max=keys)
    spans = [(low, high), (after, (after + 3).clamp(max=keys))]
    dense = seen(spans, keys)
    mask = span_mask(spans, keys)
    assert mask.shape == (1, 1, queries, keys)
    padded = F.pad(dense, (0, -keys % 128, 0, -queries % 128)).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    needed = padded.sum((1, 3)) > 0
    for i, row in enumerate(needed):
        count = int(mask.kv_num_blocks[0, 0, i])
        assert mask.kv_indices[0, 0, i, :count].tolist() == row.nonzero().flatten().tolist()
    at = torch.meshgrid(torch.arange(queries), torch.arange(keys), indexing="ij")
    assert torch.equal(mask.mask_mod(*torch.zeros(2, 1, 1), *at), dense > 0)


def rows_of(c, blocks, dtype=torch.float32, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    block, kv = (len(blocks.anchors), c.block_size), (c.num_key_value_heads, c.head_dim)
    context = (c.num_hidden_layers, len(blocks.tokens), *kv)
    shapes = [context, context, (*block, c.num_attention_heads, c.head_dim), (*block, *kv), (*block, *kv)]
    return [torch.randn(s, generator=g).to(device, dtype) for s in shapes]


@pytest.mark.parametrize("is_causal", [None, True, False])
def test_flex_attention_equals_tiled_attention(is_causal):
    c = config(5, (SLIDING, FULL), is_causal)
    _, blocks = packed_blocks(c, seed=1)
    keys, values, q, k, v = rows_of(c, blocks)
    spans, tiles = SpanAttention(c, blocks, keys, values), TiledAttention(c, blocks, keys, values)
    assert len(spans.masks) == 2
    for layer in range(2):
        torch.testing.assert_close(spans(layer, q, k, v), tiles(layer, q, k, v), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:::torch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_on_a_gpu_are_those_of_tiled_attention(dtype):
    """Against fp64: flex attention errs at most eight times as much as SDPA in the same dtype, and a rounding step.

    It takes exponentials to base 2, so it rounds scores once more: on an H200 3.2e-5 beside 5.7e-6 in fp32.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    c = config(40, (SLIDING, FULL), False, head_dim=16, num_attention_heads=6, num_key_value_heads=2, block=8)
    _, blocks = packed_blocks(c, seed=1, anchors=320, tile=16, row_tokens=256)
    blocks = blocks.to("cuda")

    def run(kind, dtype):
        inputs = [x.double().to(torch.bfloat16).to(dtype).requires_grad_() for x in rows_of(c, blocks, device="cuda")]
        attend, outs = kind(c, blocks, *inputs[:2]), []
        for layer in range(2):
            outs.append(attend(layer, *inputs[2:]))
        pull = [torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(o) for o in outs]
        return [*outs, *torch.autograd.grad(outs, inputs, pull)]

    exact, ours, theirs = run(TiledAttention, torch.float64), run(SpanAttention, dtype), run(TiledAttention, dtype)
    for truth, mine, other in zip(exact, ours, theirs, strict=True):
        step = torch.finfo(dtype).eps * truth.abs().max()
        assert (mine - truth).abs().max() <= 8 * ((other - truth).abs().max() + step)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma"])
def test_a_target_by_ranges_equals_the_target_by_masks(kind, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **kw: f)
    torch.manual_seed(0)
    small = {
        "vocab_size": 61, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2,
    }  # fmt: skip
    model = toy(kind, small)
    rows, _ = packed_blocks(config())
    inputs = [torch.from_numpy(x) for x in (rows.tokens, rows.positions, rows.document)]
    masked = FrozenTarget(model, (1, 3))(*inputs)
    ranged = FrozenTarget(model, (1, 3))
    ranged.speed_up(inputs[0].numel() + 5)
    for part in (slice(None), slice(0, 2)):
        inside = slice(0, inputs[0][part].numel())
        for mine, theirs in zip(ranged(*(x[part] for x in inputs)), masked, strict=True):
            real = (inputs[2].flatten() >= 0)[inside]
            torch.testing.assert_close(mine[real], theirs[inside][real], rtol=1e-4, atol=1e-5)


def toy(kind, small):
    import transformers

    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**small, sliding_window=5))
    types = ["sliding_attention", "full_attention"] * 2
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**small, sliding_window=5, layer_types=types))


def test_rows_draw_the_same_anchors_whatever_rows_are_beside_them():
    docs = documents(4)
    rows = assign(docs.lens, 32)
    together, alone = pack(docs, rows, 32), [pack(docs, [row], 32) for row in rows]
    rngs = [[np.random.default_rng((1, r)) for r in range(len(rows))] for _ in range(2)]
    blocks = draw_blocks(together, 8, rngs[0], 4, 6)
    eligible = set(together.eligible().tolist())
    for r, (anchors, valid) in enumerate(zip(blocks.anchors.view(-1, 8), blocks.valid.view(-1, 8), strict=True)):
        single = draw_blocks(alone[r], 8, [rngs[1][r]], 4, 6)
        assert torch.equal(single.anchors + 32 * r, anchors)
        assert torch.equal(single.valid, valid)
        chosen = anchors[valid].tolist()
        assert len(set(chosen)) == len(chosen) == min(8, sum(e // 32 == r for e in eligible))
        assert set(chosen) <= eligible


def test_a_row_without_answers_has_blocks_that_count_nowhere():
    docs = Documents(np.arange(12), np.array([6, 6]), np.array([6, 2]), np.zeros(2))
    blocks = draw_blocks(pack(docs, [[0], [1]], 8), 4, [np.random.default_rng(r) for r in range(2)], 2, None)
    assert blocks.valid.tolist() == [False] * 4 + [True] * 3 + [False]
    assert not supervision(blocks, 4, 2.0)[:4].any()
    assert supervision(blocks, 4, 2.0)[4:7, 0].all()
