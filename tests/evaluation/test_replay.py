"""Replay held against the drafter itself, against generation, and against sampling with `dflash2.verify`."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from test_generate import drafter, target
from test_properties_perfect_copy import V as COPY_V
from test_properties_perfect_copy import copying_drafter, taps_of, text
from tiny import FULL, SLIDING

import dflash2
from dflash2.evaluation.evaluate import replay_trace
from dflash2.evaluation.live_check import live_check
from dflash2.evaluation.record import Document, Question, answer, record_answers, record_documents
from dflash2.evaluation.replay import Odds, anchors_of, draft_odds
from dflash2.evaluation.rounds import round_lengths
from dflash2.evaluation.trace import Shard, Trace
from dflash2.lm_head import DenseLMHead
from dflash2.training.data import Documents
from dflash2.training.replay import replay
from dflash2.training.target import FrozenTarget

VOCAB, STOP = 8, 1
DRAFTERS = {
    "v2": {},
    "v1": {"architecture": "DFlashDraftModel"},
    "full": {"layer_types": (SLIDING, FULL), "is_causal": None},
    "softcap": {"final_logit_softcapping": 3.0, "output_multiplier": 0.3},
}


@cache
def guesser(kind: str = "v2", seed: int = 0) -> dflash2.DFlash2Drafter:
    """Random, but of so few tokens that it is often right."""
    few = {"vocab_size": VOCAB, "mask_token_id": VOCAB - 1, "selector_top_k": 4, "block_size": 5, "sliding_window": 9}
    return drafter(seed, **few | DRAFTERS[kind])


def questions(lengths=(4, 7, 12, 23, 9)) -> list[Question]:
    g = torch.Generator().manual_seed(0)
    return [Question(torch.randint(0, VOCAB, (n,), generator=g).tolist(), "set", "domain", str(n)) for n in lengths]


def trace(folder, family="llama", tokens=24, **kw) -> Trace:
    kw = {"layer_ids": (0, 1, 2), "max_new_tokens": tokens, "stops": [STOP], "batch_size": 3} | kw
    return record_answers(target(family, VOCAB), "toy", questions(), folder, **kw)


def bound(kind: str, tables) -> dflash2.DFlash2Drafter:
    return guesser(kind).bind_target(tables.embedding, tables.head)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_odds_are_those_of_real_proposals_everywhere(kind, tmp_path):
    """Every position, every width, the shorter blocks before the end of the budget included."""
    made = trace(tmp_path, tokens=12, stops=[])
    tables = made.tables()
    d = bound(kind, tables)
    for shard in made.shards():
        a = anchors_of(shard, made.max_new_tokens)
        taps = shard.taps.unflatten(-1, (3, -1))[:, [0, 2]].flatten(1)
        odds = draft_odds(d, shard, taps, tables.head, a, [1, 2, 3, 4])
        kv = d.new_kv(1, 256)
        for n in range(len(a.token)):
            at, position, start = int(a.token[n]), int(a.position[n]), int(shard.starts[a.document[n]])
            seq = kv.open()
            d.append(kv, [seq], taps[start:at], [0], [position])
            for k, found in odds.items():
                width = min(k, int(a.left[n]) - 1)
                drafts = d.propose(kv, [seq], [int(shard.tokens[at])], [position], width).tokens[0].tolist()
                truth = shard.tokens[at + 1 : at + 1 + min(width, int(a.after[n]))].tolist()
                right = 0
                while right < len(truth) and drafts[right] == truth[right]:
                    right += 1
                assert found.stands[n].cumprod().sum() == right
                assert found.found[n, :right].all()
            kv.close(seq)


@pytest.mark.parametrize("tokens", [24, 5, 2, 1])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_rounds_are_those_of_generation(kind, tokens, tmp_path):
    """Stops inside a block, blocks that the budget shortens, answers of one token."""
    made = trace(tmp_path, tokens=tokens)
    d = bound(kind, made.tables())
    replayed = replay_trace(made, d)
    ended = set()
    for i, (shard, n) in enumerate((s, n) for s in made.shards() for n in range(len(s.lengths))):
        start, prompt, length = (int(x[n]) for x in (shard.starts, shard.prompt_lengths, shard.lengths))
        document = shard.tokens[start : start + length]
        out = dflash2.generate(
            target("llama", VOCAB), d, document[None, :prompt], max_new_tokens=tokens, eos_token_id=STOP
        )
        assert out.sequences[0].tolist() == document.tolist()
        assert out.acceptance_lengths[0] == replayed.lengths[i]
        ended.add(int(document[-1]) == STOP)
    if tokens == 24:
        assert any(n > 1 for r in replayed.lengths for n in r), "nothing ever stood: this shows little"
        assert len(ended) == 2, "some answers end by the stop and some by the budget"


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt2", "opt"])
def test_targets_of_other_kinds(family, tmp_path):
    """Sliding windows, softcapped logits, learned positions: taps of whole documents are those of decoding."""
    model, d = target(family), drafter()
    asked = [Question(torch.randint(4, 50, (n,)).tolist()) for n in (9, 14)]
    made = record_answers(model, family, asked, tmp_path, layer_ids=d.config.target_layer_ids, max_new_tokens=20)
    assert [f["agreement"] for f in made.found()] == [1.0]
    check = live_check(model, d.bind_target(made.tables().embedding, made.tables().head), made, 2)
    assert check.same_rounds == check.prompts == 2


def test_the_live_check_agrees(tmp_path):
    made = trace(tmp_path)
    found = live_check(target("llama", VOCAB), bound("v2", made.tables()), made, 4)
    assert (found.prompts, found.same_tokens, found.same_rounds, found.differences) == (4, 4, 4, [])
    assert found.acceptance_live > 1


def test_the_live_check_sees_what_differs(tmp_path, monkeypatch):
    made = trace(tmp_path)
    d = bound("v2", made.tables())
    propose = d.propose
    found = live_check(target("llama", 9), d, made, 2)  # another target
    assert (found.same_tokens, found.same_rounds, len(found.differences)) == (0, 0, 2)
    assert {"dataset", "id", "token", "logit_gap"} <= found.differences[0].keys()
    monkeypatch.setattr(d, "propose", lambda *a, **kw: dataclasses.replace(p := propose(*a, **kw), tokens=p.tokens * 0))
    found = live_check(target("llama", VOCAB), d, made, 5)
    assert found.same_tokens == 5 > found.same_rounds
    assert all("round" in f for f in found.differences)


def perfect(documents: int, answer_tokens: int, temperature: float = 0.0) -> tuple[Shard, dflash2.DFlash2Drafter]:
    """Periodic documents and the drafter that copies them without a miss."""
    period, prompt = 11, 13
    tokens = [text(prompt + answer_tokens, period) for _ in range(documents)]
    shard = Shard(
        tokens=torch.tensor([t for document in tokens for t in document]),
        lengths=torch.full((documents,), prompt + answer_tokens),
        prompt_lengths=torch.full((documents,), prompt),
        temperatures=torch.full((documents,), temperature),
        taps=torch.cat([taps_of(t, 1, 0) for t in tokens]),
        states=None,
        about=[{}] * documents,
    )
    made = copying_drafter(period, 1, layer_types=(SLIDING,), is_causal=False, block_size=8, sliding_window=period + 1)
    return shard, made


def test_a_perfect_copy_gives_exactly_eight_of_eight():
    shard, d = perfect(2, 1 + 8 * 6)
    a = anchors_of(shard, 10**6)
    odds = draft_odds(d, shard, shard.taps, DenseLMHead(torch.eye(COPY_V)), a, [7])[7]
    assert round_lengths(odds.stands, a) == [[8] * 6] * 2
    assert round_lengths(odds.unary, a) == [[8] * 6] * 2


@pytest.mark.parametrize("shift", [-1, 1])
def test_taps_of_the_wrong_rows_are_seen(shift):
    shard, d = perfect(1, 49)
    a = anchors_of(shard, 10**6)
    odds = draft_odds(d, shard, shard.taps.roll(shift, 0), DenseLMHead(torch.eye(COPY_V)), a, [7])[7]
    assert odds.stands.mean() < 0.5


@pytest.mark.parametrize("kind", ["v2", "v1"])
def test_odds_at_a_temperature_are_those_of_sampling(kind, tmp_path):
    """Blocks drafted and verified many times over one recorded answer: given that the output is the recorded one, how
    often was it an accepted draft? And given only the draft before, how often is a draft accepted at all?"""
    heat, k = 1.3, 2
    model = target("llama", VOCAB)
    made = trace(tmp_path, temperature=heat, stops=[], seed=3)
    tables = made.tables()
    d = bound(kind, tables)
    shard = next(made.shards())
    assert shard.states is not None
    a = anchors_of(shard, 10**6)
    odds = draft_odds(d, shard, taps := shard.taps.unflatten(-1, (3, -1))[:, [0, 2]].flatten(1), tables.head, a, [k])[k]
    open_ = (odds.stands > 0.1) & (odds.stands < 0.9)
    n = int(np.argmax(odds.stands[:, 0] * open_.all(1)))  # where neither draft is a sure thing
    at, position, start = int(a.token[n]), int(a.position[n]), int(shard.starts[a.document[n]])
    text_, gold = shard.tokens[start : at + 1], shard.tokens[at + 1 : at + 3]
    logits = {}
    for first in range(VOCAB):
        for second in range(VOCAB):
            ids = torch.cat((text_, torch.tensor([first, second])))[None]
            logits[first, second] = model(input_ids=ids).logits[0, -3:]
    rows, repeats = 500, 60
    kv = d.new_kv(rows, 64)
    seqs = [kv.open() for _ in range(rows)]
    d.append(kv, seqs, taps[start:at].repeat(rows, 1), [0] * rows, [position] * rows)
    generator = torch.Generator().manual_seed(0)
    drafts, accepted, final = [], [], []
    for _ in range(repeats):
        prop = d.propose(kv, seqs, [int(text_[-1])] * rows, [position] * rows, k, heat, generator)
        truth = torch.stack([logits[i, j] for i, j in prop.tokens.tolist()])
        out = dflash2.verify(prop, truth, heat, generator=generator)
        drafts.append(prop.tokens), accepted.append(out.accepted), final.append(out.next_token)
    token, n_ok, after = torch.cat(drafts), torch.cat(accepted), torch.cat(final)
    output = torch.where(n_ok[:, None] > torch.arange(k), token, after[:, None])
    first = output[:, 0] == gold[0]
    then = first & (n_ok >= 1)
    both = then & (output[:, 1] == gold[1])
    drafted = then & (token[:, 0] == gold[0])
    for given, stood, expected in (
        (first, n_ok >= 1, odds.stands[n, 0]),
        (both, n_ok >= 2, odds.stands[n, 1]),
        (torch.ones_like(first), n_ok >= 1, odds.overlap[n, 0]),
        (drafted, n_ok >= 2, odds.overlap[n, 1]),
    ):
        samples = int(given.sum())
        share = float((stood & given).sum()) / samples
        assert samples > 200
        assert abs(share - expected) < 4 * max((expected * (1 - expected) / samples) ** 0.5, 1e-3)


def test_expected_acceptance_is_what_generation_takes_on_average(tmp_path):
    """Over sampled answers of their own each, replay and generation estimate one number."""
    model, heat, count = target("llama", VOCAB), 1.0, 160
    asked = [Question(questions()[0].tokens)] * count
    made = record_answers(
        model, "toy", asked, tmp_path, layer_ids=(0, 2), max_new_tokens=17, temperature=heat, batch_size=80
    )
    d = bound("v2", made.tables())
    t = replay_trace(made, d).tallies[4]
    out = dflash2.generate(
        model, d, torch.tensor([asked[0].tokens] * count), max_new_tokens=17, temperature=heat, eos_token_id=[], seed=1
    )
    live = np.array([len(r) for r in out.acceptance_lengths], float)
    error = (live.var() / count + t.rounds.var() / count) ** 0.5
    assert abs(live.mean() - t.rounds.mean()) < 4 * error
    assert t.rounds.var() < live.var(), "chances leave out the noise of drafting"


def test_plain_answers_are_those_of_generation():
    asked = [q.tokens for q in questions()]
    alone = [answer(target("llama", VOCAB), [p], 16, 0.0, [STOP])[0] for p in asked]
    assert answer(target("llama", VOCAB), asked, 16, 0.0, [STOP]) == alone


def test_training_counts_the_same_rounds(tmp_path):
    """Its replay drafts by the training forward, over packed documents that it runs itself."""
    asked = questions()
    answers = answer(target("llama", VOCAB), [q.tokens for q in asked], 24, 0.0, [])
    whole = [q.tokens + a for q, a in zip(asked, answers, strict=True)]
    made = record_documents(
        target("llama", VOCAB), "toy", [Document(q, a, 0.0) for q, a in zip(asked, answers, strict=True)], tmp_path,
        layer_ids=(0, 2), max_new_tokens=1000,
    )  # fmt: skip
    d = bound("v2", made.tables())
    documents = Documents(
        np.array([t for w in whole for t in w]), np.array([len(w) for w in whole]),
        np.array([len(q.tokens) for q in asked]), np.zeros(len(whole)),
    )  # fmt: skip
    frozen = FrozenTarget(target("llama", VOCAB), d.config.target_layer_ids)
    found = replay(d, frozen, documents, row_tokens=96, rows_per_step=2, blocks_per_step=32, tile=8, chunk=64)
    t = replay_trace(made, d).tallies[4]
    assert found.rounds == pytest.approx(float((t.tokens / t.rounds).mean()))
    assert found.unary == pytest.approx(float((t.tokens / t.unary_rounds).mean()))
    assert found.anchors == pytest.approx(float(t.yielded.sum() / t.anchors.sum()))
    assert found.by_row == pytest.approx((t.kept.sum(0) / t.reached.sum(0).clip(1)).tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_kernels(temperature, kernel_device, tmp_path):
    """The same odds from Triton kernels: in the interpreter where there is no GPU."""
    made = record_answers(
        target("llama", VOCAB), "toy", questions()[:1], tmp_path, layer_ids=(0, 2), max_new_tokens=5,
        temperature=temperature,
    )  # fmt: skip
    shard = next(made.shards())
    a = anchors_of(shard, 1000)
    odds: list[Odds] = []
    for backend, device in (("torch", "cpu"), ("triton", kernel_device)):
        tables = made.tables(device)
        d = dflash2.DFlash2Drafter(guesser().config, device=device).requires_grad_(False)
        d.load_state_dict(guesser().state_dict())
        d.backend = backend
        d.bind_target(tables.embedding, tables.head)
        odds.append(draft_odds(d, shard, shard.taps, tables.head, a, [4])[4])
    for name in ("stands", "unary", "found", "overlap"):
        one, other = (getattr(o, name) for o in odds)
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_it_is_what_it_is_on_the_cpu(dtype, tmp_path):
    """Kernels and thousands of anchors at once. In bf16 a near-tie may fall the other way now and then."""
    made = trace(tmp_path, tokens=64, stops=[])
    tables, on_gpu = made.tables(), made.tables("cuda", dtype)
    here = bound("v2", tables)
    there = dflash2.DFlash2Drafter(here.config, dtype=dtype, device="cuda").requires_grad_(False)
    there.load_state_dict(here.state_dict())
    there.bind_target(on_gpu.embedding, on_gpu.head)
    for shard in made.shards():
        a = anchors_of(shard, made.max_new_tokens)
        taps = shard.taps.unflatten(-1, (3, -1))[:, [0, 2]].flatten(1)
        one = draft_odds(here, shard, taps, tables.head, a, [4])[4].stands
        other = draft_odds(there, shard, taps.to(dtype), on_gpu.head, a, [4])[4].stands
        differ = (one != other).any(1).mean()
        assert differ == 0 if dtype == torch.float32 else differ < 0.1
