"""The published `dflash` 0.1.0 modules and ours, on the same random fp32 weights, say the same.

Its generation loop wants CUDA, so its modules are called as that loop calls them: context taps and block in one call,
the cache cropped back to the anchor's position afterwards.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FULL, SLIDING, Toy, tiny_config

from dflash2 import DFlash2Drafter

transformers = pytest.importorskip("transformers")
published = pytest.importorskip(
    "dflash.model", reason="the published package is not installed: pip install --no-deps dflash==0.1.0"
)

W, B = 8, 4
LAYERS = {"full": (FULL, FULL), "sliding": (SLIDING, SLIDING), "mixed": (SLIDING, FULL, SLIDING)}
LENGTHS = {"none of the window": 1, "shorter": W - 3, "W-1": W - 1, "W": W, "W+1": W + 1, "longer": 3 * W + 5}
V1, V2 = "DFlashDraftModel", "DFlash2DraftModel"


def their_model(toy: Toy):
    config = transformers.Qwen3Config(**toy.config.to_dict())
    config._attn_implementation = "sdpa"
    model = getattr(published, toy.config.architecture)(config).eval()
    weights = {
        f"{name}.weight" if "codebook" in name else name: t.clone() for name, t in toy.drafter.state_dict().items()
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert not missing
    return model


class Head(torch.nn.Module):
    def __init__(self, toy: Toy):
        super().__init__()
        self.weight = toy.head[: toy.config.vocab_size]

    def forward(self, hidden):
        return hidden @ self.weight.T


@torch.no_grad()
def their_draft(model, toy: Toy, chunks: list[tuple[int, int]], anchor: int, k: int, temperature: float):
    """(hidden of rows 1..k, tokens, candidates, q or logits), after feeding the chunks one by one."""
    cache = published._make_cache(model.config)
    ids = torch.tensor([[anchor] + [toy.config.mask_token_id] * k])
    noise = torch.nn.functional.embedding(ids, toy.embed) * toy.config.input_embedding_scale
    for first, end in chunks:
        hidden = model(
            target_hidden=toy.taps(first, end)[None],
            noise_embedding=noise,
            position_ids=torch.arange(first, end + k + 1)[None],
            past_key_values=cache,
            use_cache=True,
        )
        published._crop_to(cache, end)
    hidden, head = hidden[:, 1:], Head(toy)
    if toy.config.architecture == V2:
        return hidden[0], *model.propose(hidden, ids[:, 0], head, temperature)
    logits = model.compute_logits(hidden, head)
    return hidden[0], logits.argmax(-1), None, logits


def split(n: int, appends: str) -> list[tuple[int, int]]:
    if appends == "one append":
        return [(0, n)]
    cuts = sorted({0, 1, *range(0, n, 3), n})
    return list(pairwise(cuts))


def assert_hidden_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((ours - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())


@pytest.mark.parametrize("appends", ["one append", "many"])
@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("architecture", [V2, V1])
def test_drafts_equal_the_published_ones(architecture, layers, is_causal, appends):
    config = tiny_config(
        architecture=architecture, layer_types=LAYERS[layers], is_causal=is_causal, sliding_window=W, block_size=B,
        output_multiplier=0.6, final_logit_softcapping=5.0, input_embedding_scale=1.5, attention_bias=True,
    )  # fmt: skip
    toy = Toy(config, seed=3)
    model, anchor, k = their_model(toy), 11, B - 1
    for n in LENGTHS.values():
        chunks = split(n, appends)
        kv = toy.drafter.new_kv(1, 64, page_size=4)
        seq = kv.open()
        for first, end in chunks:
            toy.append(kv, seq, first, end)
        prop, ours = toy.hidden(lambda kv=kv, seq=seq, n=n: toy.drafter.propose(kv, [seq], [anchor], [n]))
        theirs, path, candidates, logits = their_draft(model, toy, chunks, anchor, k, 0.0)
        assert_hidden_close(ours[0, 1:], theirs)
        if prop.tokens.tolist() != path.tolist():
            draft = toy.oracle.draft(toy.context(0, n), anchor, n, k)
            assert_first_difference_is_a_tie(toy, draft, anchor, prop.tokens[0].tolist(), path[0].tolist())
        if candidates is not None:
            assert [set(row) for row in prop.candidates[0].tolist()] == [set(row) for row in candidates[0].tolist()]
        sampled = toy.drafter.propose(kv, [seq], [anchor], [n], temperature=0.8)
        if candidates is None:
            torch.testing.assert_close(sampled.q, torch.softmax(logits / 0.8, -1), atol=1e-4, rtol=0)
        else:
            assert_q_equal(model, toy, theirs, sampled, anchor, 0.8)


def assert_first_difference_is_a_tie(toy, draft, anchor, ours, theirs):
    i = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    before = anchor if i == 0 else ours[i - 1]
    gap = toy.oracle.scores(draft.rows[i], before, [ours[i], theirs[i]])
    assert abs(float(gap[0] - gap[1])) < 1e-4


@torch.no_grad()
def assert_q_equal(model, toy: Toy, hidden, ours, anchor: int, temperature: float) -> None:
    """Their selector is walked along our path: its rows of q depend on the token chosen before."""
    selector = model.candidate_selector
    logits = model.compute_logits(hidden[None], Head(toy))
    values, ids = torch.topk(logits, selector.top_k, dim=-1, sorted=False)
    gate, before = selector.hidden_projection(hidden[None]), anchor
    for i, token in enumerate(ours.tokens[0].tolist()):
        pair = selector.predecessor_codebook(torch.tensor(before)) * gate[0, i]
        scores = values[0, i] + selector.successor_codebook(ids[0, i]) @ pair
        q = dict(zip(ids[0, i].tolist(), torch.softmax(scores / temperature, 0).tolist(), strict=True))
        mine = dict(zip(ours.candidates[0, i].tolist(), ours.q[0, i].tolist(), strict=True))
        assert mine.keys() == q.keys()
        assert max(abs(mine[t] - q[t]) for t in q) < 1e-4
        before = token


def test_a_round_of_many_steps_stays_equal():
    """Commit some drafts of each block and draft on, as a loop does, well past the window."""
    toy = Toy(tiny_config(layer_types=LAYERS["mixed"], is_causal=None, sliding_window=W, block_size=B), seed=9)
    model, kv = their_model(toy), toy.drafter.new_kv(1, 96, page_size=2)
    seq, chunks, n = kv.open(), [], 0
    for produced in (7, 1, 4, 2, 3, 1, 1, 4, 9, 2):
        chunks.append((n, n + produced))
        toy.append(kv, seq, n, n + produced)
        n += produced
        _, ours = toy.hidden(lambda: toy.drafter.propose(kv, [seq], [n % 30], [n]))  # noqa: B023
        theirs, *_ = their_draft(model, toy, chunks, n % 30, B - 1, 0.0)
        assert_hidden_close(ours[0, 1:], theirs)


def test_our_saved_checkpoint_drafts_the_same_there(tmp_path):
    toy = Toy(tiny_config(), seed=4)
    toy.drafter.save_pretrained(tmp_path)
    model, info = published.DFlash2DraftModel.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.block_size == toy.config.block_size
    assert model.mask_token_id == toy.config.mask_token_id
    assert tuple(model.target_layer_ids) == toy.config.target_layer_ids
    assert_drafts_equal(toy, toy.drafter, model.eval())


@pytest.mark.parametrize("spelling", ["bare", "with .weight"])
def test_their_saved_checkpoint_drafts_the_same_here(tmp_path, spelling):
    toy = Toy(tiny_config(), seed=5)
    model = their_model(toy)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    codebooks = [name for name in weights if "codebook" in name]
    assert len(codebooks) == 2
    renamed = {
        (name.removesuffix(".weight") + ("" if spelling == "bare" else ".weight")) if name in codebooks else name: t
        for name, t in weights.items()
    }
    save_file(renamed, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [V2]
    drafter = DFlash2Drafter.from_pretrained(tmp_path, dtype=torch.float32).bind_target(toy.embed, toy.head)
    # Transformers writes its own defaults beside the drafter's fields; those that the file must carry are these.
    for name in ("windows", "causal", "block_size", "mask_token_id", "target_layer_ids", "selector_top_k"):
        assert getattr(drafter.config, name) == getattr(toy.config, name), name
    assert_drafts_equal(toy, drafter, model)


def test_v1_checkpoints_go_both_ways(tmp_path):
    toy = Toy(tiny_config(architecture=V1, layer_types=(FULL, SLIDING), is_causal=None), seed=6)
    toy.drafter.save_pretrained(tmp_path / "ours")
    theirs = published.DFlashDraftModel.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    drafter = DFlash2Drafter.from_pretrained(tmp_path / "theirs").bind_target(toy.embed, toy.head)
    assert_drafts_equal(toy, drafter, theirs)


def assert_drafts_equal(toy: Toy, drafter: DFlash2Drafter, model, n: int = 21, anchor: int = 2) -> None:
    k = toy.config.max_draft_tokens
    kv = drafter.new_kv(1, 64)
    seq = kv.open()
    drafter.append(kv, [seq], toy.taps(0, n), [0], [n])
    prop = drafter.propose(kv, [seq], [anchor], [n])
    hidden, path, *_ = their_draft(model, toy, [(0, n)], anchor, k, 0.0)
    assert prop.tokens.tolist() == path.tolist()
    _, ours = toy.hidden(lambda: toy.drafter.propose(kv, [seq], [anchor], [n]))
    assert_hidden_close(ours[0, 1:], hidden)
