"""P11, P12, P14 and losslessness of the whole loop, over tiny random Transformers models of several families."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, wraps

import pytest
import torch
import transformers as tf
from test_verification import assert_follows, transformers_warp
from tiny import FULL, SLIDING, tiny_config
from torch import Tensor, nn

from dflash2 import ConfigError, DFlash2Drafter, Int8LMHead, Proposal, decoding, generate, generation
from dflash2.target import decoder_layers
from dflash2.width import AutoWidth

V, H, LAYERS = 50, 32, 4
SHAPE = {
    "hidden_size": H, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": V, "max_position_embeddings": 512, "eos_token_id": None, "pad_token_id": 0,
    "bos_token_id": None, "head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SHAPE, sliding_window=6)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SHAPE)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**SHAPE, sliding_window=6, query_pre_attn_scalar=8)),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=H, n_layer=LAYERS, n_head=4, vocab_size=V, n_positions=512, pad_token_id=0)
    ),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(hidden_size=H, ffn_dim=64, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=V,
                     word_embed_proj_dim=H, pad_token_id=0, max_position_embeddings=512)
    ),
}  # fmt: skip


@cache
def target(family: str = "llama", vocab: int = V) -> nn.Module:
    torch.manual_seed(1)
    made = FAMILIES[family]()
    if vocab != V:
        made = tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE | {"vocab_size": vocab}))
    for p in made.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.3)  # far from the initial 0.02, at which every continuation repeats one token
    made.generation_config.eos_token_id = None
    return made.eval().requires_grad_(False)


def drafter(seed: int = 0, **changes) -> DFlash2Drafter:
    torch.manual_seed(seed)
    fields = {"hidden_size": H, "vocab_size": V, "mask_token_id": 3, "block_size": 8, "sliding_window": 16} | changes
    made = DFlash2Drafter(tiny_config(**fields))
    for p in made.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.3)
    return made.requires_grad_(False)


@cache
def prompt(row: int, length: int) -> Tensor:
    return torch.randint(4, V, (length,), generator=torch.Generator().manual_seed(100 * row + length))


@cache
def reference(family: str, row: int, length: int, tokens: int = 48) -> tuple[int, ...]:
    """Plain greedy decoding of one prompt by Transformers."""
    ids = prompt(row, length)[None]
    out = target(family).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return tuple(out[0, length:].tolist())


def batch(lengths: list[int], side: str = "left") -> tuple[Tensor, Tensor]:
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.int64), torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, n in enumerate(lengths):
        part = slice(width - n, width) if side == "left" else slice(0, n)
        ids[row, part], mask[row, part] = prompt(row, n), 1
    return ids, mask


def cut(tokens: tuple[int, ...], budget: int, stops: tuple[int, ...] = ()) -> list[int]:
    out = []
    for t in tokens[:budget]:
        out.append(t)
        if t in stops:
            break
    return out


def answers(out, ids: Tensor, expected: list[list[int]]) -> None:
    """The sequences are the prompts as given, the expected tokens, and padding after them."""
    assert torch.equal(out.sequences[:, : ids.shape[1]], ids)
    assert out.sequences.shape[1] == ids.shape[1] + max(map(len, expected))
    for row, tokens in enumerate(expected):
        got = out.sequences[row, ids.shape[1] :].tolist()
        assert got[: len(tokens)] == tokens, f"row {row}"
        assert set(got[len(tokens) :]) <= {0}
    check_stats(out, [len(tokens) for tokens in expected])


def check_stats(out, lengths: list[int]) -> None:
    """P14: every token but the first comes from a round; what rounds produced adds up."""
    s = out.stats
    assert s.new_tokens == sum(lengths)
    assert [sum(a) for a in out.acceptance_lengths] == [n - 1 for n in lengths]
    assert all(x >= 1 for a in out.acceptance_lengths for x in a)
    assert s.rounds == sum(map(len, out.acceptance_lengths))
    flat = [x for a in out.acceptance_lengths for x in a]
    assert s.acceptance_length == pytest.approx(sum(flat) / len(flat) if flat else 0.0)
    assert s.accepted <= s.proposed
    assert s.prefill_s > 0
    assert s.decode_s >= 0


class Script:
    """Puts the target's own continuation in the place of drafts, right up to a chosen slot, and checks every round.

    The real `propose` still runs: it refuses a position that is not the context's next.
    """

    def __init__(
        self, monkeypatch, made: DFlash2Drafter, family: str, lengths: list[int], stands: Callable[[int], int]
    ):
        self.rows: dict[int, int] = {}
        self.rounds = 0
        append, propose = made.append, made.propose

        def watched_append(kv, seqs, taps, starts, counts, *a, **kw):
            if not self.rows:
                self.rows = {q: row for row, q in enumerate(seqs)}
            append(kv, seqs, taps, starts, counts, *a, **kw)

        def scripted(kv, seqs, anchors, starts, k, temperature, generator):
            real = propose(kv, seqs, anchors, starts, k, temperature, generator)
            assert bool(real.valid.all())
            tokens = torch.zeros_like(real.tokens)
            for i, (q, start) in enumerate(zip(seqs, starts, strict=True)):
                row = self.rows[q]
                done = start - lengths[row]
                first, end = kv.span(q)
                assert end == start, "committed length is not the draft context's length"
                assert made.config.retention is None or end - first >= min(made.config.retention, end)
                text = reference(family, row, lengths[row])
                assert int(anchors[i]) == text[done]
                right = text[done + 1 : done + 1 + k]
                n = min(stands(row), k)
                tokens[i, : len(right)] = torch.tensor(right)
                tokens[i, n:] = (tokens[i, n:] + 1 + i) % V
                self.rounds += 1
            return Proposal(tokens, None, None, real.valid)

        monkeypatch.setattr(made, "append", watched_append)
        monkeypatch.setattr(made, "propose", scripted)


# -- greedy output is the target's own ------------------------------------------------------------------------------

RAGGED = {1: [9], 2: [7, 11], 3: [5, 14, 9], 4: [1, 12, 6, 3], 5: [8, 8, 2, 15, 4]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("side", ["left", "right"])
def test_greedy_output_is_the_targets(family, size, side):
    ids, mask = batch(RAGGED[size], side)
    out = generate(target(family), drafter(), ids, mask, max_new_tokens=24)
    answers(out, ids, [cut(reference(family, r, n), 24) for r, n in enumerate(RAGGED[size])])


@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "changes", [{}, {"architecture": "DFlashDraftModel"}, {"layer_types": (SLIDING, FULL)}], ids=str
)
def test_other_batches_and_drafters(size, side, changes):
    ids, mask = batch(RAGGED[size], side)
    out = generate(target(), drafter(**changes), ids, mask, max_new_tokens=20)
    answers(out, ids, [cut(reference("llama", r, n), 20) for r, n in enumerate(RAGGED[size])])


@pytest.mark.parametrize("family", FAMILIES)
def test_accepted_blocks(family, monkeypatch):
    """A perfect drafter: whole blocks of eight are accepted and committed."""
    lengths = RAGGED[3]
    ids, mask = batch(lengths)
    made = drafter()
    Script(monkeypatch, made, family, lengths, lambda row: 7)
    out = generate(target(family), made, ids, mask, max_new_tokens=33)
    answers(out, ids, [cut(reference(family, r, n), 33) for r, n in enumerate(lengths)])
    assert out.acceptance_lengths == [[8, 8, 8, 8]] * 3
    assert out.stats.target_passes == 1 + 4


@pytest.mark.parametrize("family", FAMILIES)
def test_uneven_acceptance(family, monkeypatch):
    """Each row at its own pace, so that the caches have to be realigned; rows leave at different rounds."""
    lengths = RAGGED[4]
    ids, mask = batch(lengths, "right")
    g = torch.Generator().manual_seed(3)
    made = drafter(sliding_window=5)
    Script(
        monkeypatch,
        made,
        family,
        lengths,
        lambda row: (7, 0, 3)[row] if row < 3 else int(torch.randint(8, (), generator=g)),
    )
    out = generate(target(family), made, ids, mask, max_new_tokens=30)
    answers(out, ids, [cut(reference(family, r, n), 30) for r, n in enumerate(lengths)])
    assert out.acceptance_lengths[0] == [8, 8, 8, 5]
    assert out.acceptance_lengths[1] == [1] * 29


def test_a_thousand_random_rounds(monkeypatch):
    """P11: after each of them the committed length is the draft context's length (asserted in `Script`)."""
    g = torch.Generator().manual_seed(11)
    rounds = 0
    made = drafter(sliding_window=7)
    for trial in range(25):
        lengths = torch.randint(1, 12, (4,), generator=g).tolist()
        ids, mask = batch(lengths, ("left", "right")[trial % 2])
        budget, k = int(torch.randint(30, 40, (), generator=g)), int(torch.randint(1, 8, (), generator=g))
        texts = [reference("llama", r, n) for r, n in enumerate(lengths)]
        stops = tuple({texts[0][20], texts[1][25]}) if trial % 3 == 0 else ()
        with monkeypatch.context() as patch:
            script = Script(
                patch, made, "llama", lengths, lambda row: int(torch.randint(-3, 8, (), generator=g).clamp_min(0))
            )
            out = generate(target(), made, ids, mask, budget, num_draft_tokens=k, eos_token_id=list(stops))
            rounds += script.rounds
        answers(out, ids, [cut(t, budget, stops) for t in texts])
    assert rounds > 1000


# -- stops and budgets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", range(17))
@pytest.mark.parametrize("stands", [7, 2, 0])
def test_stop_at_every_slot(slot, stands, monkeypatch):
    """B175, B177: the first stop token ends the answer and is kept, wherever in a block it falls."""
    text = reference("llama", 0, 9)
    stops = (text[slot],)
    expected = cut(text, 40, stops)
    made = drafter()
    Script(monkeypatch, made, "llama", [9], lambda row: stands)
    ids, mask = batch([9])
    out = generate(target(), made, ids, mask, max_new_tokens=40, eos_token_id=stops[0])
    answers(out, ids, [expected])
    theirs = target().generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False, eos_token_id=stops[0])
    assert out.sequences.tolist() == theirs.tolist()


def test_several_stop_ids_and_rows(monkeypatch):
    lengths = RAGGED[5]
    texts = [reference("llama", r, n) for r, n in enumerate(lengths)]
    stops = (texts[0][5], texts[1][0], texts[2][11], texts[4][17])
    ids, mask = batch(lengths)
    expected = [cut(t, 25, stops) for t in texts]
    assert len(set(map(len, expected))) > 2
    for stands in (7, 1):
        with monkeypatch.context() as patch:
            made = drafter()
            Script(patch, made, "llama", lengths, lambda row, n=stands: n)
            out = generate(target(), made, ids, mask, max_new_tokens=25, eos_token_id=stops)
        answers(out, ids, expected)
    theirs = target().generate(ids, attention_mask=mask, max_new_tokens=25, do_sample=False, eos_token_id=list(stops))
    assert out.sequences.tolist() == theirs.tolist(), "padding after the stop as Transformers has it"


def test_stop_ids_of_the_generation_config(monkeypatch):
    text = reference("llama", 0, 9)
    monkeypatch.setattr(target().generation_config, "eos_token_id", [text[4], text[9]])
    ids, mask = batch([9])
    answers(generate(target(), drafter(), ids, mask, 20), ids, [cut(text, 20, (text[4], text[9]))])
    answers(generate(target(), drafter(), ids, mask, 20, eos_token_id=[]), ids, [cut(text, 20)])
    answers(generate(target(), drafter(), ids, mask, 20, eos_token_id=-1), ids, [cut(text, 20)])
    answers(generate(target(), drafter(), ids, mask, 20, eos_token_id=text[7]), ids, [cut(text, 20, (text[7],))])


@pytest.mark.parametrize("budget", range(1, 10))
@pytest.mark.parametrize("stands", [7, 1])
def test_budget(budget, stands, monkeypatch):
    """B178: k = 7 with any budget; the last block shrinks, and with one token left nothing is drafted."""
    lengths = [9, 4]
    ids, mask = batch(lengths)
    made = drafter()
    script = Script(monkeypatch, made, "llama", lengths, lambda row: stands)
    out = generate(target(), made, ids, mask, max_new_tokens=budget)
    answers(out, ids, [cut(reference("llama", r, n), budget) for r, n in enumerate(lengths)])
    if budget == 1:
        assert script.rounds == 0
        assert out.stats.target_passes == 1
    if stands == 7:
        assert out.stats.proposed == 2 * max(0, min(7, budget - 2))


def test_budgets_of_a_drafter_with_full_attention(monkeypatch):
    """One row far ahead of the other, near its budget: its last block must still have room for its rows."""
    lengths = [16, 16]
    ids, mask = batch(lengths)
    for budget in (15, 16, 17, 18, 24, 31, 32, 33):
        with monkeypatch.context() as patch:
            made = drafter(layer_types=(FULL, FULL))
            Script(patch, made, "llama", lengths, lambda row: (2, 0)[row])
            out = generate(target(), made, ids, mask, max_new_tokens=budget)
        answers(out, ids, [cut(reference("llama", r, n), budget) for r, n in enumerate(lengths)])


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_up_to_the_last(family, monkeypatch):
    """A request may end at the target's last position, even while blocks are longer than what it has left."""
    made, lengths, budget = drafter(), [6, 6], 11
    torch.manual_seed(1)
    if family == "gpt2":
        config = tf.GPT2Config(n_embd=H, n_layer=LAYERS, n_head=4, vocab_size=V, n_positions=16, pad_token_id=0)
        model = tf.GPT2LMHeadModel(config)
    else:
        config = tf.OPTConfig(
            hidden_size=H, ffn_dim=64, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=V,
            word_embed_proj_dim=H, pad_token_id=0, max_position_embeddings=16,
        )  # fmt: skip
        model = tf.OPTForCausalLM(config)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.3)
    model.eval().generation_config.eos_token_id = None
    ids, mask = batch(lengths)
    theirs = model.generate(ids, attention_mask=mask, max_new_tokens=budget, do_sample=False)
    texts = theirs[:, 6:].tolist()
    propose = made.propose

    def scripted(kv, seqs, anchors, starts, k, *a):
        real = propose(kv, seqs, anchors, starts, k, *a)
        tokens = torch.full_like(real.tokens, 1)
        for i, (q, start) in enumerate(zip(seqs, starts, strict=True)):
            right = texts[q][start - 5 : start - 5 + (2, 0)[q]]  # one request far ahead of the other
            tokens[i, : len(right[:k])] = torch.tensor(right[:k], dtype=torch.int64)
        return Proposal(tokens, None, None, real.valid)

    monkeypatch.setattr(made, "propose", scripted)
    assert generate(model, made, ids, mask, budget).sequences.tolist() == theirs.tolist()


@pytest.mark.parametrize("k", range(8))
def test_num_draft_tokens(k, monkeypatch):
    lengths = RAGGED[2]
    ids, mask = batch(lengths)
    made = drafter()
    out = generate(target(), made, ids, mask, max_new_tokens=17, num_draft_tokens=k)
    expected = [cut(reference("llama", r, n), 17) for r, n in enumerate(lengths)]
    answers(out, ids, expected)
    assert max(map(max, out.acceptance_lengths)) <= k + 1
    if k == 0:
        assert out.stats.proposed == 0
        assert out.acceptance_lengths == [[1] * 16] * 2
    Script(monkeypatch, made, "llama", lengths, lambda row: 7)
    out = generate(target(), made, ids, mask, max_new_tokens=17, num_draft_tokens=k)
    answers(out, ids, expected)
    assert out.stats.target_passes == 1 + math.ceil(16 / (k + 1))


# -- widths that change -----------------------------------------------------------------------------------------------


def choose_at_random(monkeypatch, seed: int, idle: int = 6) -> None:
    """Any width in any round, and runs of rounds without drafts."""
    g = torch.Generator().manual_seed(seed)
    resting = 0

    def choose(self, requests, most):
        nonlocal resting
        resting -= 1
        if resting > 0:
            return 0
        if int(torch.randint(6, (), generator=g)) == 0:
            resting = int(torch.randint(1, idle + 1, (), generator=g))
        return int(torch.randint(most + 1, (), generator=g))

    monkeypatch.setattr(AutoWidth, "choose", choose)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_sequence_of_widths_gives_the_targets_output(family, size, monkeypatch):
    """And leaves no hole in the drafter's context (`Script` looks at the span in every round with drafts)."""
    lengths = RAGGED[size]
    ids, mask = batch(lengths)
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        with monkeypatch.context() as patch:
            choose_at_random(patch, seed)
            made = drafter(sliding_window=9)
            Script(patch, made, family, lengths, lambda row, g=g: int(torch.randint(8, (), generator=g)))
            stops = (reference(family, 0, lengths[0])[25 + seed],)
            out = generate(target(family), made, ids, mask, 40, num_draft_tokens="auto", eos_token_id=stops)
        answers(out, ids, [cut(reference(family, r, n), 40, stops) for r, n in enumerate(lengths)])
        assert sum(out.stats.widths.values()) == out.stats.target_passes - 1
        assert set(out.stats.widths) <= set(range(8))
        assert out.stats.drafts_per_pass <= 7


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_any_sequence_of_widths_on_a_gpu(family, monkeypatch):
    """And the clock's own choice: plain decoding's output, in fp32."""
    import copy

    model, made = copy.deepcopy(target(family)).cuda(), drafter().cuda()
    ids, mask = (x.cuda() for x in batch(RAGGED[3]))
    plain = generate(model, made, ids, mask, 40, num_draft_tokens=0)
    for _ in range(3):
        assert torch.equal(generate(model, made, ids, mask, 40, num_draft_tokens="auto").sequences, plain.sequences)
    for seed in range(4):
        with monkeypatch.context() as patch:
            choose_at_random(patch, seed)
            out = generate(model, made, ids, mask, 40, num_draft_tokens="auto")
        assert torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize("waiting", [1, 3, 64])
def test_context_of_rounds_without_drafts_comes_later(waiting, monkeypatch):
    """Row by row what a round with drafts appends, however many rounds wait."""
    monkeypatch.setattr(decoding, "WAITING_ROUNDS", waiting)
    lengths = RAGGED[3]
    ids, mask = batch(lengths)
    rows: list[dict[tuple[int, int], Tensor]] = []
    for widths in ("auto", 1):
        made, found = drafter(), {}
        append = made.append

        def watched(kv, seqs, taps, starts, counts, valid=None, append=append, found=found):
            for q, part, start, n in zip(seqs, taps.split(counts), starts, valid or counts, strict=True):
                found.update({(q, start + i): part[i] for i in range(n)})
            append(kv, seqs, taps, starts, counts, valid)

        with monkeypatch.context() as patch:
            choose_at_random(patch, 5, idle=9)
            patch.setattr(made, "append", watched)
            stops = (reference("llama", 1, lengths[1])[20],)
            out = generate(target(), made, ids, mask, 40, num_draft_tokens=widths, eos_token_id=stops)
        answers(out, ids, [cut(reference("llama", r, n), 40, stops) for r, n in enumerate(lengths)])
        rows.append(found)
    assert len(rows[0]) > 0.5 * len(rows[1])
    for key, row in rows[0].items():
        torch.testing.assert_close(row, rows[1][key], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stands", [7, 0])
def test_auto_follows_what_stands(stands, monkeypatch):
    """On a clock that only the target's passes move, by 10 ms and 1 ms for each row."""
    now = 0.0
    model, lengths, made = target("qwen3"), RAGGED[1], drafter()
    forward = model.forward

    @wraps(forward)
    def timed(*a, **kw):
        nonlocal now
        now += 0.010 + 0.001 * kw["input_ids"].shape[1]
        return forward(*a, **kw)

    monkeypatch.setattr(model, "forward", timed)
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: now)
    Script(monkeypatch, made, "qwen3", lengths, lambda row: stands)
    ids, mask = batch(lengths)
    for _ in range(2):
        out = generate(model, made, ids, mask, 48, num_draft_tokens="auto")
        answers(out, ids, [cut(reference("qwen3", 0, lengths[0]), 48)])
    plain_s = (48 - 1) * 0.011
    if stands:
        assert out.stats.widths[7] >= 4, "47 tokens are six blocks at least"
        assert len(out.acceptance_lengths[0]) <= 8
        assert out.stats.decode_s < 0.3 * plain_s
    else:
        assert out.stats.widths[7] <= 4
        assert out.stats.decode_s < 1.1 * plain_s


def test_costs_are_kept_for_the_next_call():
    made, ids = drafter(), batch([5])[0]
    generate(target(), made, ids, max_new_tokens=30, num_draft_tokens="auto")
    (costs,) = generation._costs[made].values()
    generate(target(), made, ids, max_new_tokens=30, num_draft_tokens="auto")
    assert list(generation._costs[made].values()) == [costs]
    assert costs.to_measure(1, 7) is None
    generate(target("qwen3"), made, ids, max_new_tokens=3, num_draft_tokens="auto")
    assert len(generation._costs[made]) == 2, "another target costs something else"


def test_sampling_with_widths_that_change(monkeypatch):
    """15,000 answers against the exact joint distribution of three tokens."""
    vocab, ids = 8, torch.tensor([[1, 6, 2, 7, 5]])
    model, made = target(vocab=vocab), drafter(vocab_size=vocab, mask_token_id=3, block_size=4)
    expected = joint_of_three(model, ids, transformers_warp(temperature=0.9), vocab)
    choose_at_random(monkeypatch, 1)
    counts = torch.zeros(vocab**3)
    torch.manual_seed(0)
    for _ in range(15):
        out = generate(model, made, ids.expand(1000, -1), None, 3, temperature=0.9, num_draft_tokens="auto")
        t = out.sequences[:, 5:]
        counts += torch.bincount((t[:, 0] * vocab + t[:, 1]) * vocab + t[:, 2], minlength=vocab**3)
    assert_follows(counts.view(vocab, vocab, vocab), expected)


def test_training_goes_on_after_generating():
    """Nothing that inference mode made is left where gradients pass."""
    import copy

    model, made = copy.deepcopy(target()).requires_grad_(True), drafter().requires_grad_(True)
    ids, mask = batch([5])
    out = generate(model, made, ids, mask, 12, num_draft_tokens="auto")
    assert not out.sequences.is_inference()
    model(input_ids=out.sequences, labels=out.sequences).loss.backward()
    kv = made.new_kv(1, 64)
    made.append(kv, [kv.open()], torch.zeros(4, 2 * H), [0], [4])
    hidden = made.embed(torch.tensor([[5]]), 3)
    made(hidden, torch.arange(4)[None, None], lambda layer, q, k, v: q).sum().backward()
    assert all(p.grad is not None for p in (model.lm_head.weight, made.norm.weight))


# -- long prompts, taps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_prompts_in_chunks(family, chunk, monkeypatch):
    """Rows that are all padding in the first chunks, windows shorter than a chunk (B10, B11)."""
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", chunk)
    lengths = [2, 23, 9]
    ids, mask = batch(lengths, "right")
    made = drafter(sliding_window=12)
    Script(monkeypatch, made, family, lengths, lambda row: row + 2)
    out = generate(target(family), made, ids, mask, max_new_tokens=20)
    answers(out, ids, [cut(reference(family, r, n), 20) for r, n in enumerate(lengths)])
    assert out.stats.target_passes >= math.ceil(23 / chunk) + 19 // 5


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_the_outputs_of_the_layers(family, monkeypatch):
    """B92, B93, K10: what is appended is hidden_states[L + 1], the last layer's before the final norm."""
    model, lengths = target(family), [3, 8]
    made = drafter(target_layer_ids=(2, 0, 3))
    rows: dict[int, dict[int, Tensor]] = {0: {}, 1: {}}
    append = made.append
    handles: dict[int, int] = {}

    def watched(kv, seqs, taps, starts, counts, valid=None):
        if not handles:
            handles.update({q: row for row, q in enumerate(seqs)})
        for q, part, start, n in zip(seqs, taps.split(counts), starts, valid or counts, strict=True):
            rows[handles[q]] |= {start + i: part[i] for i in range(n)}
        append(kv, seqs, taps, starts, counts, valid)

    monkeypatch.setattr(made, "append", watched)
    ids, mask = batch(lengths)
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 5)
    out = generate(model, made, ids, mask, max_new_tokens=12)
    for row, n in enumerate(lengths):
        text = torch.cat((prompt(row, n), out.sequences[row, ids.shape[1] :]))[:-1]
        last: list[Tensor] = []
        hook = decoder_layers(model)[3].register_forward_hook(
            lambda m, a, o, last=last: last.append(o[0] if isinstance(o, tuple) else o)
        )
        states = model(text[None], output_hidden_states=True).hidden_states
        hook.remove()
        expected = torch.cat((states[3], states[1], last[0].view_as(states[1])), -1)[0]
        assert sorted(rows[row]) == list(range(len(text)))
        torch.testing.assert_close(
            torch.stack([rows[row][i] for i in range(len(text))]), expected, rtol=1e-3, atol=1e-3
        )


def test_only_tapped_layers_are_captured(monkeypatch):
    model, hooked, arguments = target(), [], []
    forward = model.forward

    @wraps(forward)
    def recorded(*a, **kw):
        hooked.append([len(layer._forward_hooks) for layer in decoder_layers(model)])
        arguments.append(kw)
        return forward(*a, **kw)

    monkeypatch.setattr(model, "forward", recorded)
    ids, mask = batch([5])
    generate(model, drafter(), ids, mask, 6)
    assert {tuple(h) for h in hooked} == {(1, 0, 1, 0)}
    assert not any(kw.get("output_hidden_states") for kw in arguments)
    hooked.clear()
    generate(model, drafter(), ids, mask, 3, num_draft_tokens=0)
    assert {tuple(h) for h in hooked} == {(0, 0, 0, 0)}
    assert [len(layer._forward_hooks) for layer in decoder_layers(model)] == [0] * LAYERS


def test_hooks_are_removed_after_a_failure(monkeypatch):
    model, made = target(), drafter()

    def fail(*a, **kw):
        raise RuntimeError("stop")

    monkeypatch.setattr(made, "propose", fail)
    ids, mask = batch([5])
    with pytest.raises(RuntimeError, match="stop"):
        generate(model, made, ids, mask, 6)
    assert [len(layer._forward_hooks) for layer in decoder_layers(model)] == [0] * LAYERS


# -- sampling -------------------------------------------------------------------------------------------------------


def joint_of_three(model: nn.Module, ids: Tensor, warp, vocab: int) -> Tensor:
    """Probability of every continuation of three tokens, by running them all."""
    all_pairs = torch.cartesian_prod(torch.arange(vocab), torch.arange(vocab))
    text = torch.cat((ids.expand(len(all_pairs), -1), all_pairs), 1)
    p = warp(model(text).logits[:, -3:]).double()  # [V*V, 3, V]
    first = p[:, 0].gather(1, all_pairs[:, :1])
    second = p[:, 1].gather(1, all_pairs[:, 1:])
    return (first * second * p[:, 2]).view(vocab, vocab, vocab)


@pytest.mark.parametrize("drafts", ["own", "one-hot"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.8}, {"temperature": 1.2, "top_k": 4, "top_p": 0.9}], ids=str)
def test_sampled_output_follows_the_target(sampling, drafts, monkeypatch):
    """B165, B167 through the whole loop: 15,000 answers against the exact joint distribution of three tokens."""
    vocab = 8
    model = target(vocab=vocab)
    made = drafter(vocab_size=vocab, mask_token_id=3, block_size=4)
    if drafts == "one-hot":
        propose = made.propose
        monkeypatch.setattr(made, "propose", lambda kv, q, a, s, k, t, g: propose(kv, q, a, s, k, 0.0, g))
    ids = torch.tensor([[1, 6, 2, 7, 5]])
    expected = joint_of_three(model, ids, transformers_warp(**sampling), vocab)
    counts, accepted = torch.zeros(vocab**3), 0
    for seed in range(5):
        out = generate(model, made, ids.expand(3000, -1), max_new_tokens=3, seed=seed, **sampling)
        t = out.sequences[:, 5:]
        counts += torch.bincount((t[:, 0] * vocab + t[:, 1]) * vocab + t[:, 2], minlength=vocab**3)
        accepted += out.stats.accepted
    assert accepted > 500
    counts = counts.view(vocab, vocab, vocab)
    assert_follows(counts.sum((1, 2)), expected.sum((1, 2)))
    assert_follows(counts.sum(2), expected.sum(2))
    assert_follows(counts, expected)


def test_sampling_agrees_with_transformers():
    """Against samples of `target.generate` itself, by the chi-square of two samples."""
    vocab = 8
    model, made = target(vocab=vocab), drafter(vocab_size=vocab, mask_token_id=3, block_size=4)
    ids = torch.tensor([[1, 6, 2, 7, 5]]).expand(6000, -1)
    ours = generate(model, made, ids, max_new_tokens=5, temperature=0.9, top_k=5, top_p=0.9, seed=0).sequences[:, 5:]
    torch.manual_seed(0)
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=True, temperature=0.9, top_k=5, top_p=0.9
    )[:, 5:]
    for a, b in ((0, 1), (1, 2), (3, 4)):
        one, two = (torch.bincount(t[:, a] * vocab + t[:, b], minlength=vocab**2).double() for t in (ours, theirs))
        both = (one + two) > 20
        x = float(((one - two) ** 2 / (one + two))[both].sum())
        df = int(both.sum())
        assert (x - df) / math.sqrt(2 * df) < 5


def test_seeds():
    ids, mask = batch(RAGGED[3])
    runs = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(len(runs))  # the global generator has no part in it
        runs[name] = generate(target(), drafter(), ids, mask, 20, temperature=1.0, seed=seed)
    assert torch.equal(runs["a"].sequences, runs["b"].sequences)
    assert runs["a"].acceptance_lengths == runs["b"].acceptance_lengths
    assert not torch.equal(runs["a"].sequences, runs["c"].sequences)
    made = drafter()
    unseeded = [generate(target(), made, ids, mask, 20, temperature=1.0).sequences for _ in range(2)]
    assert not torch.equal(*unseeded)
    state = torch.get_rng_state()
    generate(target(), made, ids, mask, 5, temperature=1.0, seed=1)
    assert torch.equal(torch.get_rng_state(), state), "a seed leaves the global generator alone"


def test_a_temperature_near_zero_is_greedy():
    ids, mask = batch(RAGGED[2])
    out = generate(target(), drafter(), ids, mask, 12, temperature=1e-6, seed=0)
    assert out.sequences.tolist() == generate(target(), drafter(), ids, mask, 12).sequences.tolist()


# -- streaming, heads -----------------------------------------------------------------------------------------------


class Collector:
    def __init__(self):
        self.prompt, self.tokens, self.ended = None, [], 0

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        assert not self.ended
        if self.prompt is None:
            self.prompt = value.tolist()
        else:
            assert value.dim() == 1
            assert len(value)
            self.tokens += value.tolist()

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("stands", [7, 3, 0])
def test_streamer_gets_exactly_the_tokens(stands, monkeypatch):
    text = reference("llama", 0, 9)
    made, streamer = drafter(), Collector()
    Script(monkeypatch, made, "llama", [9], lambda row: stands)
    ids, mask = batch([9])
    out = generate(target(), made, ids, mask, 30, eos_token_id=text[20], streamer=streamer)
    assert streamer.prompt == ids.tolist()
    assert streamer.tokens == out.sequences[0, 9:].tolist() == cut(text, 30, (text[20],))
    assert streamer.ended == 1


def test_a_shared_int8_head():
    """The drafter may read another head than the target: the output is the target's all the same."""
    made = drafter()
    made.bind_target(target("qwen3").get_input_embeddings(), Int8LMHead.from_linear(target("qwen3").lm_head))
    ids, mask = batch(RAGGED[2])
    out = generate(target("qwen3"), made, ids, mask, 20)
    answers(out, ids, [cut(reference("qwen3", r, n), 20) for r, n in enumerate(RAGGED[2])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_target_and_drafter(dtype, target_dtype):
    """P12: any mix runs; in fp32 the target's output is its own, whatever the drafter computes in."""
    import copy

    model = copy.deepcopy(target()).to(target_dtype)
    ids, mask = batch(RAGGED[2])
    for temperature in (0.0, 1.0):
        out = generate(model, drafter().to(dtype), ids, mask, 20, temperature=temperature, seed=1)
        check_stats(out, [20, 20])
        assert 0 <= int(out.sequences.min()) <= int(out.sequences.max()) < V
        if target_dtype == torch.float32 and temperature == 0:
            answers(out, ids, [cut(reference("llama", r, n), 20) for r, n in enumerate(RAGGED[2])])


@pytest.mark.parametrize("size", [3e4, math.inf, math.nan])
def test_taps_that_overflow(size, monkeypatch):
    """P12, K20: an fp16 drafter over taps beyond its range drafts nothing or nonsense; the output stays."""
    made = drafter().half()
    append = made.append

    def enlarged(kv, seqs, taps, *a):
        append(kv, seqs, torch.full_like(taps, size), *a)

    monkeypatch.setattr(made, "append", enlarged)
    ids, mask = batch(RAGGED[2])
    out = generate(target(), made, ids, mask, 16)
    answers(out, ids, [cut(reference("llama", r, n), 16) for r, n in enumerate(RAGGED[2])])
    out = generate(target(), made, ids, mask, 16, temperature=1.0, seed=0)
    assert 0 <= int(out.sequences.min()) <= int(out.sequences.max()) < V


def test_binds_the_target_once():
    made = drafter()
    ids, mask = batch([4])
    generate(target(), made, ids, mask, 3)
    assert made.is_bound
    assert made._embedding[0] is target().get_input_embeddings().weight
    head = made._head[0]
    generate(target(), made, ids, mask, 3)
    assert made._head[0] is head


def test_pages_are_all_returned(monkeypatch):
    made, kvs = drafter(), []
    new_kv = made.new_kv
    monkeypatch.setattr(made, "new_kv", lambda *a, **kw: kvs.append(new_kv(*a, **kw)) or kvs[-1])
    ids, mask = batch(RAGGED[3])
    generate(target(), made, ids, mask, 20)
    assert kvs[0].open_sequences == []
    assert kvs[0].pages_in_use == 0


# -- refusals -------------------------------------------------------------------------------------------------------


def test_recurrent_targets_are_refused():
    linear = {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    }  # fmt: skip
    made = [
        tf.MambaForCausalLM(tf.MambaConfig(hidden_size=H, num_hidden_layers=LAYERS, vocab_size=V, state_size=4)),
        tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**SHAPE | linear)),
    ]
    ids, mask = batch([6])
    for model in made:
        with pytest.raises(ConfigError, match=rf"{type(model).__name__}.*cannot be rolled back"):
            generate(model.eval(), drafter(), ids, mask, 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_target_layers": 5}, "another target.*num_target_layers: drafter 5, target 4"),
        (
            {"num_target_layers": None, "target_layer_ids": (1, 4)},
            r"another target.*target_layer_ids: \[1, 4\], target has layers 0 to 3",
        ),
        ({"vocab_size": V + 1}, "another target.*vocab_size: drafter 51, target 50"),
        (
            {"vocab_size": 20, "mask_token_id": 3, "hidden_size": 16},
            "another target.*hidden_size: drafter 16, target 32",
        ),
    ],
    ids=str,
)
def test_drafter_of_another_target_is_refused(changes, words):
    ids, mask = batch([6])
    with pytest.raises(ConfigError, match=words):
        generate(target(), drafter(**changes), ids, mask, 5)


def test_target_rows_beyond_the_drafters_vocabulary():
    """To the drafter they are padding (B138). As anchors they draft nothing; the output stays the target's."""
    ids, mask = batch(RAGGED[3])
    for temperature in (0.0, 1.0):
        made = drafter(vocab_size=20)
        out = generate(target(), made, ids, mask, 24, temperature=temperature, seed=0)
        check_stats(out, [24] * 3)
        if temperature == 0:
            answers(out, ids, [cut(reference("llama", r, n), 24) for r, n in enumerate(RAGGED[3])])


def test_drafter_bound_to_another_target_is_refused():
    """Bound to one target by hand and run over one of another width."""
    made = drafter().bind_target(torch.ones(V, H), torch.ones(V, H))
    ids, mask = batch([6])
    for change in ({"hidden_size": 64}, {"vocab_size": V - 1}):
        other = tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE | change)).eval()
        with pytest.raises(ConfigError, match="another target"):
            generate(other, made, ids, mask, 5)


MASKS = {
    "hole": ([[1, 0, 1, 1]], "holes"),
    "two holes": ([[0, 1, 0, 1]], "holes"),
    "empty row": ([[0, 0, 0, 0]], "leave each request a token"),
    "shape": ([[1, 1, 1]], "must match input_ids"),
}


@pytest.mark.parametrize("case", MASKS)
def test_masks_that_are_refused(case):
    mask, words = MASKS[case]
    with pytest.raises(ValueError, match=words):
        generate(target(), drafter(), torch.ones(1, 4, dtype=torch.int64), torch.tensor(mask), 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"num_draft_tokens": 8}, "num_draft_tokens=8.*7"),
        ({"num_draft_tokens": -1}, "num_draft_tokens=-1"),
        ({"num_draft_tokens": "auto", "temperature": 1.0, "seed": 1}, "no seed makes sampling repeatable"),
        ({"num_draft_tokens": "most"}, "num_draft_tokens='most'.*or 'auto'"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"temperature": 1.0, "top_k": -1}, "top_k=-1"),
        ({"input_ids": torch.ones(4, dtype=torch.int64)}, r"input_ids has shape \[4\]"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.int64)}, r"input_ids has shape \[1, 0\]"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64), "streamer": Collector()}, "streamer takes one request"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),  # no object's address: every worker must collect the same
)
def test_arguments_that_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        generate(
            target(), drafter(), **{"input_ids": torch.ones(1, 4, dtype=torch.int64), "max_new_tokens": 5} | arguments
        )
