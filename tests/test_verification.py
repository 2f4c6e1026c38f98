"""P10: what comes out follows the target alone, whatever was drafted and however it was drawn."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Toy, tiny_config
from torch import Tensor

from dflash2 import DFlash2Drafter, Proposal, verify
from dflash2.ops.selector_walk import draw, selector_walk
from dflash2.random import Stream, uniform
from dflash2.verification import target_probabilities

ROWS, BATCHES = 20_000, 10  # 200,000 trials


def z_score(counts: Tensor, expected: Tensor) -> float:
    """Chi-square of counts against probabilities as a normal score (Wilson-Hilferty); events of probability 0 fail."""
    counts, expected = counts.double().flatten(), expected.double().flatten()
    assert int(counts[expected == 0].sum()) == 0, "a token of probability 0 came out"
    mean = expected / expected.sum() * counts.sum()
    small = mean < 10
    if small.any():  # pool what is too rare for the approximation
        counts = torch.cat((counts[~small], counts[small].sum()[None]))
        mean = torch.cat((mean[~small], mean[small].sum()[None]))
        keep = mean > 0
        counts, mean = counts[keep], mean[keep]
    df = len(mean) - 1
    if df == 0:
        return 0.0
    x = float(((counts - mean) ** 2 / mean).sum())
    return ((x / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


def assert_follows(counts: Tensor, expected: Tensor) -> None:
    z = z_score(counts, expected)
    assert z < 4.5, f"chi-square is {z:.1f} standard deviations above its mean"  # one in 300,000


class Target:
    """A Markov target over V tokens: row j's logits are a table indexed by the token before it."""

    def __init__(self, vocab: int, k: int, seed: int, spread: float = 1.5):
        g = torch.Generator().manual_seed(seed)
        self.tables = torch.randn(k + 1, vocab, vocab, generator=g) * spread
        self.vocab, self.k = vocab, k

    def logits(self, drafts: Tensor) -> Tensor:
        """``[R, k]`` drafts after anchor 0 -> ``[R, k+1, V]``."""
        before = torch.cat((torch.zeros(len(drafts), 1, dtype=torch.int64), drafts), 1)
        return self.tables[torch.arange(self.k + 1), before]

    def joint(self, warp) -> Tensor:
        """Probability of the first two output tokens, ``[V, V]``."""
        first = warp(self.tables[0, 0][None])[0].double()
        return first[:, None] * warp(self.tables[1]).double()


def produced(target: Target, proposal: Proposal, out, warp, g: torch.Generator) -> Tensor:
    """The first two tokens that each request puts out, ``[R, 2]``; the second comes from the next round if need be."""
    accepted, bonus = out.accepted, out.next_token
    first = torch.where(accepted > 0, proposal.tokens[:, 0], bonus)
    later = torch.multinomial(warp(target.tables[1]), len(first), replacement=True, generator=g)  # [V, R]
    later = later[first, torch.arange(len(first))]
    if target.k == 1:
        second = torch.where(accepted > 0, bonus, later)
    else:
        second = torch.where(accepted > 1, proposal.tokens[:, 1], torch.where(accepted == 1, bonus, later))
    return torch.stack((first, second), 1)


def greedy_drafts(vocab: int, k: int, g: torch.Generator, rows: int) -> Proposal:
    """Deterministic drafts: q is one-hot, given as None or spelled out over candidates."""
    tokens = torch.randint(0, vocab, (1, k), generator=torch.Generator().manual_seed(5)).expand(rows, k)
    return Proposal(tokens, None, None, torch.ones(rows, dtype=torch.bool))


def one_hot_drafts(vocab: int, k: int, g: torch.Generator, rows: int) -> Proposal:
    plain = greedy_drafts(vocab, k, g, rows)
    candidates = torch.stack([(plain.tokens + i) % vocab for i in range(3)], -1)
    q = torch.zeros(rows, k, 3)
    q[..., 0] = 1
    return Proposal(plain.tokens, candidates, q, plain.valid)


def walked_drafts(vocab: int, k: int, g: torch.Generator, rows: int) -> Proposal:
    """The selector's walk over C of V candidates, each row depending on the token drawn before."""
    fixed = torch.Generator().manual_seed(6)
    c = min(4, vocab)
    ids = torch.stack([torch.randperm(vocab, generator=fixed)[:c] for _ in range(k)]).expand(rows, k, c)
    gate, logits = torch.randn(k, 4, generator=fixed), torch.randn(k, c, generator=fixed) * 2
    books = torch.randn(2, vocab, 4, generator=fixed)
    t, noise = torch.full((rows,), 0.8), uniform((rows, k), Stream.DRAFT, g, torch.device("cpu"))
    anchors = torch.zeros(rows, dtype=torch.int64)
    shared = gate.expand(rows, k, 4), anchors, ids, logits.expand(rows, k, c), *books
    walk = selector_walk(*shared, temperature=t, uniforms=noise)
    return Proposal(walk.tokens, ids, walk.q, torch.ones(rows, dtype=torch.bool))


def dense_drafts(vocab: int, k: int, g: torch.Generator, rows: int) -> Proposal:
    """v1: each row by itself from the whole vocabulary."""
    q = torch.softmax(torch.randn(k, vocab, generator=torch.Generator().manual_seed(7)) * 2, -1).expand(rows, k, vocab)
    tokens = draw(q, uniform((rows, k), Stream.DRAFT, g, torch.device("cpu")))
    return Proposal(tokens, None, q, torch.ones(rows, dtype=torch.bool))


DRAFTS = {"greedy": greedy_drafts, "one-hot": one_hot_drafts, "walk": walked_drafts, "dense": dense_drafts}
WARPS = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "both": {"temperature": 0.9, "top_k": 4, "top_p": 0.7},
}


def transformers_warp(temperature: float, top_p: float = 1.0, top_k: int = 0):
    """The distribution that `generate` of Transformers samples from."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    steps = [TemperatureLogitsWarper(float(temperature))]
    steps += [TopKLogitsWarper(int(top_k))] if top_k else []
    steps += [TopPLogitsWarper(float(top_p))] if top_p < 1 else []

    def warp(logits: Tensor) -> Tensor:
        scores = logits.flatten(0, -2)
        for step in steps:
            scores = step(None, scores)
        return torch.softmax(scores, -1).view_as(logits)

    return warp


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("vocab", [4, 32])
def test_output_follows_the_target(vocab, kind, k):
    """B165, B167, B170: 200,000 trials; draft and verification start from one and the same seed."""
    check(Target(vocab, k, seed=vocab + k), kind, {"temperature": 1.0})


@pytest.mark.parametrize("warp", [w for w in WARPS if w != "plain"])
@pytest.mark.parametrize("kind", ["greedy", "walk", "dense"])
def test_output_follows_the_warped_target(kind, warp):
    """B172: top-k and top-p act on the target alone; the drafts know nothing of them."""
    check(Target(8, 2, seed=14), kind, WARPS[warp])  # a seed at which some drafts survive every cut


def check(target: Target, kind: str, sampling: dict) -> None:
    vocab, k, warp = target.vocab, target.k, transformers_warp(**sampling)
    draft_noise, verify_noise = (torch.Generator().manual_seed(1234) for _ in range(2))
    g = torch.Generator().manual_seed(99)
    pairs = torch.zeros(vocab * vocab)
    accepted = 0
    for _ in range(BATCHES):
        proposal = DRAFTS[kind](vocab, k, draft_noise, ROWS)
        out = verify(proposal, target.logits(proposal.tokens), **sampling, generator=verify_noise)
        assert int(out.accepted.min()) >= 0
        assert int(out.accepted.max()) <= k
        accepted += int(out.accepted.sum())
        both = produced(target, proposal, out, warp, g)
        pairs += torch.bincount(both[:, 0] * vocab + both[:, 1], minlength=vocab * vocab)
    expected = target.joint(warp)
    pairs = pairs.view(vocab, vocab)
    assert_follows(pairs.sum(1), expected.sum(1))
    assert_follows(pairs, expected)
    assert accepted > 0


def test_the_test_sees_a_wrong_sampler():
    """The same chi-square refuses residuals that ignore q, and an acceptance that uses q's maximum (B170)."""
    target, vocab = Target(8, 2, seed=3), 8
    warp = transformers_warp(1.0)
    g = torch.Generator().manual_seed(1)
    proposal = walked_drafts(vocab, 2, g, ROWS * 5)
    p = warp(target.logits(proposal.tokens))
    q = (proposal.q * proposal.candidates.eq(proposal.tokens[..., None])).sum(-1)
    u = torch.rand(ROWS * 5, generator=g)
    stands = u * q[:, 0] < p[:, 0].gather(1, proposal.tokens[:, :1])[:, 0]
    wrong = torch.where(stands, proposal.tokens[:, 0], torch.multinomial(p[:, 0], 1, generator=g)[:, 0])
    assert z_score(torch.bincount(wrong, minlength=vocab), p[0, 0]) > 10


def test_acceptance_rate_is_the_best_possible():
    """sum of min(p, q): a verifier that rejects more is lossless too, and useless."""
    target, vocab = Target(8, 1, seed=4), 8
    for kind in ("walk", "dense", "greedy"):
        g, g2 = (torch.Generator().manual_seed(2) for _ in range(2))
        proposal = DRAFTS[kind](vocab, 1, g, 100_000)
        out = verify(proposal, target.logits(proposal.tokens), temperature=1.0, generator=g2)
        p = torch.softmax(target.tables[0, 0], -1)
        if proposal.q is None:
            best = p[proposal.tokens[0, 0]]
        else:
            ids = torch.arange(vocab) if proposal.candidates is None else proposal.candidates[0, 0]
            best = torch.minimum(p[ids], proposal.q[0, 0]).sum()
        assert float(out.accepted.float().mean()) == pytest.approx(float(best), abs=0.006)


# -- the drafter's own q --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"architecture": "DFlashDraftModel"}], ids=["v2", "v1"])
def test_q_is_what_was_drawn_from(changes):
    """P10, through a drafter: tokens follow the q that is returned, row by row and given the token before."""
    toy = Toy(tiny_config(vocab_size=12, mask_token_id=11, output_multiplier=0.3, **changes))
    kv = toy.drafter.new_kv(1)
    seq = kv.open()
    toy.append(kv, seq, 0, 9)
    vocab, g = 12, torch.Generator().manual_seed(0)
    counts, q_of = torch.zeros(3, vocab, vocab), {}
    for _ in range(10):
        prop = toy.drafter.propose(kv, [seq] * 2000, [3] * 2000, [9] * 2000, temperature=0.9, generator=g)
        dense = prop.q if prop.candidates is None else torch.zeros(2000, 3, vocab).scatter(-1, prop.candidates, prop.q)
        torch.testing.assert_close(dense.sum(-1), torch.ones(2000, 3))
        before = torch.cat((torch.full((2000, 1), 3), prop.tokens[:, :-1]), 1)
        for i in range(3):
            counts[i] += torch.bincount(before[:, i] * vocab + prop.tokens[:, i], minlength=vocab**2).view(vocab, vocab)
            for b in range(vocab):
                same = dense[before[:, i] == b, i]
                if len(same):
                    q_of[i, b] = same[0]
                    torch.testing.assert_close(same, same[:1].expand_as(same), rtol=1e-4, atol=1e-6)
    assert len(q_of) > 6
    for (i, b), q in q_of.items():
        assert_follows(counts[i, b], q)


def test_whole_loop_of_a_drafter_is_lossless():
    """Propose and verify with one seed each, the same: the first output token follows the target."""
    toy = Toy(tiny_config(vocab_size=12, mask_token_id=11, output_multiplier=0.3))
    kv = toy.drafter.new_kv(1)
    seq = kv.open()
    toy.append(kv, seq, 0, 9)
    target = Target(12, 3, seed=8)
    warp = transformers_warp(0.9)
    g, g2 = (torch.Generator().manual_seed(77) for _ in range(2))
    pairs, noise = torch.zeros(144), torch.Generator().manual_seed(1)
    for _ in range(20):
        prop = toy.drafter.propose(kv, [seq] * 2000, [3] * 2000, [9] * 2000, temperature=0.9, generator=g)
        out = verify(prop, target.logits(prop.tokens), temperature=0.9, generator=g2)
        both = produced(target, prop, out, warp, noise)
        pairs += torch.bincount(both[:, 0] * 12 + both[:, 1], minlength=144)
    assert_follows(pairs.view(12, 12), target.joint(warp))


def test_q_knows_nothing_of_the_targets_settings():
    """B172: q is a softmax at the temperature, nothing else; `propose` does not even take top-k or top-p."""
    parameters = inspect.signature(DFlash2Drafter.propose).parameters
    assert not {"top_p", "top_k", "min_p", "repetition_penalty"} & set(parameters)
    scores, ids = torch.randn(5, 1, 6), torch.arange(6).expand(5, 1, 6)
    neutral = torch.zeros(5, 1, 2), torch.zeros(5, dtype=torch.int64), ids, scores, torch.zeros(6, 2), torch.zeros(6, 2)
    walk = selector_walk(*neutral, temperature=torch.full((5,), 0.7), uniforms=torch.rand(5, 1).double())
    torch.testing.assert_close(walk.q, torch.softmax(scores / 0.7, -1))


def test_streams_are_independent():
    """B167: equal seeds, different streams: no common bits, no correlation, each uniform."""
    n = 200_000
    draws = {
        s: uniform((n,), s, torch.Generator().manual_seed(5), torch.device("cpu")) for s in Stream
    }  # the same generator state for each
    for s, u in draws.items():
        assert 0 <= float(u.min()) <= float(u.max()) < 1
        assert_follows(torch.bincount((u * 64).long(), minlength=64), torch.ones(64))
        for other in Stream:
            if other != s:
                joint = (u * 16).long() * 16 + (draws[other] * 16).long()
                assert_follows(torch.bincount(joint, minlength=256), torch.ones(256))
                low = (u * 2**40).long() % 16 * 16 + (draws[other] * 2**40).long() % 16
                assert_follows(torch.bincount(low, minlength=256), torch.ones(256))
    again = uniform((n,), Stream.DRAFT, torch.Generator().manual_seed(5), torch.device("cpu"))
    assert torch.equal(again, draws[Stream.DRAFT])


def test_noise_is_splitmix64():
    """The hash, against exact unsigned arithmetic."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    g, g2 = (torch.Generator().manual_seed(9) for _ in range(2))
    bits = torch.randint(0, 2**63 - 1, (500,), generator=g, dtype=torch.int64).tolist()
    for stream in Stream:
        g2.manual_seed(9)
        expected = [(mix(b + stream * 0x9E3779B97F4A7C15 & mask) >> 11) * 2.0**-53 for b in bits]
        assert uniform((500,), stream, g2, torch.device("cpu")).tolist() == expected


# -- greedy ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(2, 4), st.integers(0, 10_000), st.data())
def test_greedy_is_the_longest_common_prefix(k, rows, vocab, seed, data):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, vocab + 1, (rows, k), generator=g)  # -1 and V among them
    logits = torch.randint(0, 3, (rows, k + 1, vocab), generator=g).float()
    logits += torch.arange(vocab) * -0.01  # no ties
    valid = torch.tensor([data.draw(st.booleans()) for _ in range(rows)])
    as_tensor = data.draw(st.booleans())
    out = verify(Proposal(tokens, None, None, valid), logits, torch.zeros(rows) if as_tensor else 0.0)
    for r in range(rows):
        n = 0
        while n < k and valid[r] and int(logits[r, n].argmax()) == int(tokens[r, n]):
            n += 1
        assert int(out.accepted[r]) == n
        assert int(out.next_token[r]) == int(logits[r, n].argmax())
    assert out.accepted.dtype == out.next_token.dtype == torch.int64


def test_rows_of_different_temperature():
    """Greedy rows in a sampled batch are as if alone; sampled rows follow their own temperature, top-k and top-p."""
    target, vocab, k, rows = Target(8, 2, seed=11), 8, 2, 30_000
    g, g2 = (torch.Generator().manual_seed(3) for _ in range(2))
    proposal = walked_drafts(vocab, k, g, rows)
    logits = target.logits(proposal.tokens)
    t = torch.tensor([0.0, 0.5, 1.5]).repeat(rows // 3)
    top_k, top_p = torch.tensor([0, 0, 3]).repeat(rows // 3), torch.tensor([1.0, 0.7, 1.0]).repeat(rows // 3)
    out = verify(proposal, logits, t, top_p, top_k, g2)
    greedy = verify(proposal, logits, 0.0)
    cold = t == 0
    assert torch.equal(out.accepted[cold], greedy.accepted[cold])
    assert torch.equal(out.next_token[cold], greedy.next_token[cold])
    noise = torch.Generator().manual_seed(4)
    for value, warp in ((0.5, transformers_warp(0.5, top_p=0.7)), (1.5, transformers_warp(1.5, top_k=3))):
        both = produced(target, proposal, out, warp, noise)[t == value]
        counts = torch.bincount(both[:, 0] * vocab + both[:, 1], minlength=vocab**2)
        assert_follows(counts.view(vocab, vocab), target.joint(warp))


# -- the target's distribution --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 50, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.95, 1.0])
def test_probabilities_equal_transformers(temperature, top_k, top_p):
    logits = torch.randn(3, 4, 100, generator=torch.Generator().manual_seed(top_k)) * 3
    ours = target_probabilities(logits, temperature, top_p, top_k)
    torch.testing.assert_close(ours, transformers_warp(temperature, top_p, top_k)(logits), rtol=1e-4, atol=1e-7)
    assert torch.equal(ours > 0, transformers_warp(temperature, top_p, top_k)(logits) > 0)


def test_probabilities_per_request():
    logits = torch.randn(4, 3, 60)
    t, p, k = torch.tensor([0.5, 1.0, 2.0, 1.0]), torch.tensor([1.0, 0.5, 0.9, 1.0]), torch.tensor([0, 0, 5, 7])
    ours = target_probabilities(logits, t, p, k)
    for r in range(4):
        alone = target_probabilities(logits[r], float(t[r]), float(p[r]), int(k[r]))
        torch.testing.assert_close(ours[r], alone)
        torch.testing.assert_close(alone, transformers_warp(float(t[r]), float(p[r]), int(k[r]))(logits[r]))


def test_top_p_1_cuts_nothing():
    """A running sum in fp32 reaches 1 before the end of a wide vocabulary; off must mean off."""
    logits = torch.zeros(2, 1, 150_000)
    logits[:, :, 0] = 14.0
    off = target_probabilities(logits, 1.0)
    for p, k in ((torch.tensor([1.0, 1.0]), 0), (1.0, torch.tensor([0, 0])), (1.0, 150_000)):
        ours = target_probabilities(logits, 1.0, p, k)
        assert bool((ours > 0).all())
        torch.testing.assert_close(ours, off, rtol=1e-4, atol=0)  # torch's own softmax of 150,000 is 3e-5 off in fp32


def test_ties_at_a_cut_keep_the_lower_id():
    p = target_probabilities(torch.zeros(1, 6), 1.0, 1.0, 2)
    assert p.tolist() == [[0.5, 0.5, 0, 0, 0, 0]]
    assert target_probabilities(torch.zeros(1, 4), 1.0, 0.5, 0).tolist() == [[0.5, 0.5, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 0.3, 1.0, 100.0])
def test_infinities_and_tiny_temperatures(temperature):
    logits = torch.tensor([[math.inf, 0.0, math.nan, -math.inf, 5.0], [3e38, -3e38, 3e38, 0.0, 0.0]])
    p = target_probabilities(logits, temperature)
    assert p[0].tolist() == [1, 0, 0, 0, 0]
    torch.testing.assert_close(p[1], torch.tensor([0.5, 0, 0.5, 0, 0]))
    one = target_probabilities(torch.tensor([[30.0, 29.0, -5.0]]), temperature)
    assert float(one.sum()) == pytest.approx(1)
    assert int(one.argmax()) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rows_stay_in_range(temperature, bad):
    """P12: whole rows of it, or one entry."""
    logits = torch.randn(4, 3, 9)
    logits[0], logits[1, 0], logits[2, 1, 4] = bad, bad, bad
    proposal = Proposal(torch.full((4, 2), 4), None, None, torch.ones(4, dtype=torch.bool))
    for seed in range(20):
        out = verify(proposal, logits, temperature, generator=torch.Generator().manual_seed(seed))
        assert int(out.next_token.min()) >= 0
        assert int(out.next_token.max()) < 9
        if temperature and bad == math.inf:
            assert int(out.accepted[2]) in (0, 2), "one +inf is a certain token"


# -- edges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, 8, 10**9])
@pytest.mark.parametrize("kind", DRAFTS)
def test_ids_out_of_range_are_rejected(kind, wrong):
    """P12, B159: never accepted, and the output still follows the target."""
    target, vocab, rows = Target(8, 1, seed=12), 8, 50_000
    g, g2 = (torch.Generator().manual_seed(6) for _ in range(2))
    proposal = DRAFTS[kind](vocab, 1, g, rows)
    bad = torch.full_like(proposal.tokens, wrong)
    candidates = None
    if proposal.candidates is not None:
        candidates = torch.where(proposal.candidates == proposal.tokens[..., None], wrong, proposal.candidates)
    logits = target.tables[0, 0].expand(rows, 2, vocab)
    out = verify(Proposal(bad, candidates, proposal.q, proposal.valid), logits, 1.0, generator=g2)
    assert int(out.accepted.max()) == 0
    if kind in ("greedy", "one-hot"):  # elsewhere the token was not what q says, so nothing is promised
        assert_follows(torch.bincount(out.next_token, minlength=vocab), torch.softmax(target.tables[0, 0], -1))
    assert 0 <= int(out.next_token.min()) <= int(out.next_token.max()) < vocab
    assert int(verify(Proposal(bad, candidates, None, proposal.valid), logits, 0.0).accepted.max()) == 0


def test_a_wider_target_vocabulary():
    """Padded rows of the target's head belong to the target: q covers fewer ids than p."""
    target, rows = Target(12, 1, seed=13), 100_000
    g, g2 = (torch.Generator().manual_seed(6) for _ in range(2))
    for kind in ("walk", "dense"):
        proposal = DRAFTS[kind](8, 1, g, rows)
        out = verify(proposal, target.tables[0, 0].expand(rows, 2, 12), 1.0, generator=g2)
        tokens = torch.where(out.accepted > 0, proposal.tokens[:, 0], out.next_token)
        assert_follows(torch.bincount(tokens, minlength=12), torch.softmax(target.tables[0, 0], -1))


@pytest.mark.parametrize("kind", DRAFTS)
def test_invalid_requests_have_no_drafts(kind):
    target, vocab, rows = Target(8, 2, seed=14), 8, 60_000
    g, g2 = (torch.Generator().manual_seed(7) for _ in range(2))
    made = DRAFTS[kind](vocab, 2, g, rows)
    valid = torch.arange(rows) % 2 == 0
    proposal = Proposal(made.tokens, made.candidates, made.q, valid)
    out = verify(proposal, target.logits(made.tokens), 1.0, generator=g2)
    assert int(out.accepted[~valid].max()) == 0
    assert int(out.accepted[valid].max()) == 2
    counts = torch.bincount(out.next_token[~valid], minlength=vocab)
    assert_follows(counts, torch.softmax(target.tables[0, 0], -1))
    greedy = verify(proposal, target.logits(made.tokens), 0.0)
    assert bool((greedy.next_token[~valid] == target.tables[0, 0].argmax()).all())


def test_no_residual_left_uses_p():
    """p and q agree on everything that p has; a token outside p falls, and p itself is drawn from."""
    p = torch.tensor([0.5, 0.5, 0.0])  # exact in floating point, so that nothing is left to the last bit
    rows = 40_000
    logits = p.log().expand(rows, 2, 3)
    candidates = torch.tensor([0, 1, 2]).expand(rows, 1, 3)
    proposal = Proposal(torch.full((rows, 1), 2), candidates, p.expand(rows, 1, 3), torch.ones(rows, dtype=torch.bool))
    out = verify(proposal, logits, 1.0, generator=torch.Generator().manual_seed(0))
    assert int(out.accepted.max()) == 0
    assert_follows(torch.bincount(out.next_token, minlength=3), p)


def test_without_drafts():
    rows = 40_000
    none = Proposal(torch.zeros(rows, 0, dtype=torch.int64), None, None, torch.ones(rows, dtype=torch.bool))
    logits = torch.randn(5)
    out = verify(none, logits.expand(rows, 1, 5), 0.8, generator=torch.Generator().manual_seed(0))
    assert int(out.accepted.abs().max()) == 0
    assert_follows(torch.bincount(out.next_token, minlength=5), torch.softmax(logits / 0.8, -1))
    assert bool((verify(none, logits.expand(rows, 1, 5)).next_token == logits.argmax()).all())
    nobody = Proposal(torch.zeros(0, 3, dtype=torch.int64), None, None, torch.ones(0, dtype=torch.bool))
    for temperature in (0.0, 1.0):
        assert verify(nobody, torch.zeros(0, 4, 5), temperature).accepted.shape == (0,)


@pytest.mark.parametrize("shape", [(2, 3, 9), (2, 5, 9), (3, 4, 9), (4, 9), (2, 4, 9, 1)])
def test_shapes(shape):
    proposal = Proposal(torch.zeros(2, 3, dtype=torch.int64), None, None, torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"target_logits has shape.*expected \[2, 4, V\]"):
        verify(proposal, torch.zeros(shape))


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
def test_setting_shapes(name):
    proposal = Proposal(torch.zeros(2, 3, dtype=torch.int64), None, None, torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=rf"{name} has shape \[3\].*each of 2"):
        verify(proposal, torch.zeros(2, 4, 9), **{"temperature": 1.0, name: torch.ones(3)})


def test_same_seed_same_result():
    g = torch.Generator().manual_seed(1)
    proposal = walked_drafts(8, 3, g, 500)
    logits = Target(8, 3, seed=1).logits(proposal.tokens)
    runs = [verify(proposal, logits, 1.0, generator=torch.Generator().manual_seed(s)) for s in (5, 5, 6)]
    assert torch.equal(runs[0].accepted, runs[1].accepted)
    assert torch.equal(runs[0].next_token, runs[1].next_token)
    assert not torch.equal(runs[0].next_token, runs[2].next_token)


def test_draw_never_takes_an_impossible_entry():
    p = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for u in (0.0, 1e-300, 0.25, 0.5, 0.75, 1 - 2**-53):
        assert int(draw(p, torch.tensor([u], dtype=torch.float64))) in (1, 3)
        assert int(draw(p * 0.3, torch.tensor([u], dtype=torch.float64))) in (1, 3)
