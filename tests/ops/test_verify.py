"""verify against a loop written from its description: the reference, and the kernels."""

import itertools
import math

import numpy as np
import pytest
import torch

from dflash2 import Proposal
from dflash2 import verify as verify_proposal
from dflash2.ops.verify import verify

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.triton)]
KINDS = ["one-hot", "sparse", "dense"]
# requests R, drafts k, vocabulary V, candidates C
SHAPES = [(1, 1, 1, 1), (5, 2, 19, 5), (1, 15, 11, 16), (2, 0, 13, 1), (1, 7, 32, 16)]
NAN, INF = math.nan, math.inf


@pytest.fixture
def place(request, backend, monkeypatch):
    """Where a backend runs. Chunks of 8, so that a vocabulary has several (unless this GPU was tuned)."""
    if backend == "torch":
        yield "cpu"
        return
    where = request.getfixturevalue("kernel_device")
    from dflash2.kernels import verify as kernel

    monkeypatch.setitem(kernel.DEFAULTS, "block", 8)
    with np.errstate(all="ignore"):  # the interpreter computes with NumPy, which warns of every infinity
        yield where


def on(place, *tensors):
    return [None if x is None else x.to(place) for x in tensors]


def sampling(place, temperature, accept, replace):
    noise = on(place, temperature, accept.double(), replace.double())
    return dict(zip(("temperature", "accept", "replace"), noise, strict=True))


def proposal(shape, kind, seed=0):
    """Tokens, candidates and q; some ids are outside the vocabulary, some drafts are what the target likes best."""
    requests, k, vocab, count = shape
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (requests, k), generator=g)
    if kind == "one-hot":
        return tokens, None, None
    if kind == "dense":
        return tokens, None, torch.softmax(2 * torch.randn(requests, k, vocab, generator=g), -1)
    candidates = torch.stack([(tokens + 3 * i) % vocab for i in range(min(count, vocab))], -1)  # token among them
    return tokens, candidates, torch.softmax(2 * torch.randn(candidates.shape, generator=g), -1)


def q_by_hand(tokens, candidates, q, r, i, vocab):
    """q of row i over the vocabulary, as a list."""
    if q is None:
        return [float(v == int(tokens[r, i])) for v in range(vocab)]
    ids = range(q.shape[-1]) if candidates is None else candidates[r, i].tolist()
    spread = [0.0] * vocab
    for v, probability in zip(ids, q[r, i].tolist(), strict=True):
        if 0 <= v < vocab:
            spread[v] += probability
    return spread


def p_by_hand(logits, temperature):
    row = [-INF if math.isnan(x) else min(x, torch.finfo(torch.float32).max) for x in logits.tolist()]
    if max(row) == -INF:
        return [0.0] * len(row)
    powers = [math.exp(max((x - max(row)) / temperature, -1000.0)) for x in row]
    return [x / sum(powers) for x in powers]


def best_by_hand(row):
    row = row.tolist()
    for v, x in enumerate(row):
        if math.isnan(x):
            return v
    return row.index(max(row))


def check_greedy(tokens, valid, logits, accepted, following, requests=None):
    for r in range(len(tokens)) if requests is None else requests:
        n = 0
        while n < tokens.shape[1] and valid[r] and int(tokens[r, n]) == best_by_hand(logits[r, n]):
            n += 1
        assert (int(accepted[r]), int(following[r])) == (n, best_by_hand(logits[r, n]))


def check_sampled(tokens, valid, p, candidates, q, accept, replace, accepted, following, slack):
    """``p [R][k+1][V]`` lists. ``slack``: how far probabilities may be rounded; 0 means that every choice is exact."""
    for r in range(len(tokens)):
        vocab, k, n = len(p[r][0]), tokens.shape[1], int(accepted[r])
        assert 0 <= n <= (k if valid[r] else 0)
        for i in range(n):
            token = int(tokens[r, i])
            assert 0 <= token < vocab
            assert float(accept[r, i]) * q_by_hand(tokens, candidates, q, r, i, vocab)[token] < p[r][i][token] + slack
        weights = p[r][n]
        if n < k and valid[r]:
            token, spread = int(tokens[r, n]), q_by_hand(tokens, candidates, q, r, n, vocab)
            if 0 <= token < vocab:
                assert float(accept[r, n]) * spread[token] >= p[r][n][token] - slack
            left = [max(x - y, 0.0) for x, y in zip(weights, spread, strict=True)]
            weights = left if sum(left) > 0 else weights
        token, u = int(following[r]), float(replace[r])
        assert 0 <= token < vocab
        if sum(weights) > slack:
            assert weights[token] > 0
            below = sum(weights[:token])
            assert below - slack <= u * sum(weights) < below + weights[token] + slack


# -- greedy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES), (SHAPES[1], torch.bfloat16), (SHAPES[1], torch.float16)],
    ids=str,
)
def test_greedy_is_the_longest_common_prefix(shape, dtype, backend, place):
    requests, k, vocab, _ = shape
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-2, 3, (requests, k + 1, vocab), generator=g).to(dtype)  # ties
    tokens = torch.tensor([[best_by_hand(row) for row in rows[:k]] for rows in logits], dtype=torch.int64)
    tokens = tokens.view(requests, k)
    valid = torch.arange(requests) != 1
    for r in range(requests):
        if r > 1 and k:
            tokens[r, r % k] = (tokens[r, r % k] + 1) % vocab
    out = verify(*on(place, tokens, valid, logits), backend=backend)
    check_greedy(tokens, valid, logits, *out)
    assert out[0].dtype == out[1].dtype == torch.int64


@pytest.mark.parametrize("backend", BACKENDS)
def test_argmax_of_odd_numbers(backend, place):
    """The lowest id of equals, zeros of both signs being equal; NaN is above +inf, as in torch.argmax."""
    odd = [NAN, INF, -INF, 0.0, -0.0, 1.0, 1e-45, -1e-45, 3.4e38, -3.4e38]
    g = torch.Generator().manual_seed(0)
    rows = torch.tensor(odd)[torch.randint(0, len(odd), (24, 19), generator=g)]
    rows[12:] = rows[12:].nan_to_num(-INF, -INF, -INF)
    rows[20], rows[21], rows[22] = -INF, NAN, -0.0
    logits, none, valid = rows[:, None], torch.zeros(24, 0, dtype=torch.int64), torch.ones(24, dtype=torch.bool)
    accepted, following = verify(*on(place, none, valid, logits), backend=backend)
    check_greedy(none, valid, logits, accepted, following)
    assert following.tolist() == rows.argmax(-1).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_out_of_range_never_stand(kind, temperature, backend, place):
    """P12, B159: with poison around the logits."""
    tokens, candidates, q = proposal((4, 2, 19, 5), kind)
    wrong = torch.tensor([-1, 19, 2**40, -(2**62)])
    tokens[:, 1] = wrong
    if candidates is not None:
        candidates[:, 1, 0] = wrong
    wide = torch.full((6, 3, 19), NAN)
    wide[1:5] = torch.randn(4, 3, 19, generator=torch.Generator().manual_seed(1))
    logits, valid = wide.to(place)[1:5], torch.ones(4, dtype=torch.bool)
    noise = sampling(place, torch.full((4,), temperature), torch.zeros(4, 2), torch.rand(4))
    drafted = dict(zip(("candidates", "q"), on(place, candidates, q), strict=True))
    accepted, following = verify(*on(place, tokens, valid), logits, **noise, **drafted, backend=backend)
    assert int(accepted.max()) <= 1
    assert int(accepted.min()) == (1 if temperature else 0), "a uniform number of 0 accepts what is possible"
    assert 0 <= int(following.min()) <= int(following.max()) < 19


# -- sampled ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sampled_from_logits(shape, kind, backend, place):
    """Greedy and sampled requests mixed, one of them not valid."""
    requests, k, vocab, _ = shape
    g = torch.Generator().manual_seed(vocab)
    logits = 2 * torch.randn(requests, k + 1, vocab, generator=g)
    tokens, candidates, q = proposal(shape, kind)
    for r in range(requests):  # so that some are likely to stand
        logits[r].scatter_add_(-1, tokens[r, :, None], torch.full((k, 1), 3.0)) if k else None
    t = torch.tensor([0.8, 1.5, 0.0, 1e-30, 0.5])[:requests]
    valid = torch.arange(requests) != 1
    accept, replace = torch.rand(requests, k, generator=g).double(), torch.rand(requests, generator=g).double()
    out = verify(
        *on(place, tokens, valid, logits),
        **sampling(place, t, accept, replace),
        **dict(zip(("candidates", "q"), on(place, candidates, q), strict=True)),
        backend=backend,
    )
    hot = (t > 0).nonzero().flatten()
    p = [[p_by_hand(row, float(t[r])) for row in logits[r]] for r in hot]
    drafted = [None if x is None else x[hot] for x in (candidates, q)]
    # p and q are a few fp32 roundings off, and exp of -100 is a hundred times that.
    cut = (x.cpu()[hot] for x in out)
    check_sampled(tokens[hot], valid[hot], p, *drafted, accept[hot], replace[hot], *cut, slack=1e-5)
    check_greedy(tokens, valid, logits, *out, requests=(t <= 0).nonzero().flatten().tolist())


def fractions(*shape, g, zeros=0.5):
    """Rows of multiples of 1/64 that sum to 1, many of them 0: exact in every order of summation."""
    keep = torch.rand(*shape, generator=g) > zeros
    keep[..., 0] |= ~keep.any(-1)
    picks = torch.multinomial(keep.double().flatten(0, -2), 64, replacement=True, generator=g)
    counts = torch.zeros(picks.shape[0], shape[-1]).scatter_add_(-1, picks, torch.ones(picks.shape))
    return (counts / 64).view(shape)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_from_probabilities_is_exact(kind, backend, place):
    """No rounding anywhere: every choice is that of the formula, ids of probability 0 never come out."""
    requests, k, vocab, _ = shape = (16, 2, 21, 5)
    g = torch.Generator().manual_seed(2)
    p, (tokens, candidates, q) = fractions(requests, k + 1, vocab, g=g), proposal(shape, kind)
    if q is not None:
        q = fractions(*q.shape, g=g)
    if kind == "one-hot":
        p[:, :k] = p[:, :k] / 2 + torch.nn.functional.one_hot(tokens, vocab) / 2
    if kind == "sparse":
        candidates[:, :, 1] = candidates[:, :, 0]  # a token twice: its q is the sum
        p[:, :k].scatter_(-1, candidates, q)  # and most of q is allowed
        p[:3, :k], q[:3] = 0, 0  # whatever q is, p may have nothing left
        p[:3, :k].scatter_(-1, tokens[:3, :, None], 0.5)
        q[:3, :, 0] = 0.5
    accept = (torch.randint(0, 256, (requests, k), generator=g).double() + 0.37) / 256
    replace = (torch.randint(0, 256, (requests,), generator=g).double() + 0.37) / 256
    valid = torch.arange(requests) % 7 != 3
    out = verify(
        *on(place, tokens, valid, p.log()),
        **sampling(place, torch.ones(requests), accept, replace),
        **dict(zip(("candidates", "q", "probabilities"), on(place, candidates, q, p), strict=True)),
        backend=backend,
    )
    check_sampled(tokens, valid, p.tolist(), candidates, q, accept, replace, *(x.cpu() for x in out), slack=0)
    assert 0 < int((out[0] > 0).sum()) < requests


def on_a_grid(p, drafts, points):
    """All uniform numbers that matter for one row p of eighths, at midpoints: token, accept, replace, weight."""
    cases = []
    for token, share, q in drafts:
        count = round(float((p - q).clamp_min(0).sum()) * 8)
        grid = itertools.product(range(points), range(count))
        cases += [(token, (a + 0.5) / points, (b + 0.5) / count, share / points / count) for a, b in grid]
    return (torch.tensor(x) for x in zip(*cases, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "form"), [("one-hot", "logits"), ("sparse", "logits"), ("sparse", "probabilities"), ("dense", "logits")]
)
def test_lossless_to_the_last_count(kind, form, backend, place):
    """All uniform numbers on a grid that resolves p and q: what comes out *is* p."""
    p = torch.tensor([1.0, 3, 1, 0, 2, 0, 0, 0, 0, 1]) / 8  # two chunks
    q = torch.tensor([4.0, 2, 2, 0, 0, 0, 0, 0, 0, 0]) / 8
    drafts = [(1, 1.0, torch.eye(10)[1])] if kind == "one-hot" else [(t, float(q[t]), q) for t in range(3)]
    token, accept, replace, weight = on_a_grid(p, drafts, 8 if kind == "one-hot" else 4)
    n, rows = len(token), p.expand(len(token), 2, 10)
    candidates = torch.tensor([2, 0, 1]).expand(n, 1, 3) if kind == "sparse" else None
    spread = {"one-hot": None, "sparse": q[[2, 0, 1]].expand(n, 1, 3), "dense": q.expand(n, 1, 10)}[kind]
    accepted, following = verify(
        *on(place, token[:, None], torch.ones(n, dtype=torch.bool), rows.log() * 0.7),
        **sampling(place, torch.full((n,), 0.7), accept[:, None], replace),
        **dict(zip(("candidates", "q"), on(place, candidates, spread), strict=True)),
        probabilities=rows.to(place) if form == "probabilities" else None,
        backend=backend,
    )
    stood = accepted.cpu() > 0
    assert 0 < int(stood.sum()) < n
    out = torch.zeros(10, dtype=torch.float64).scatter_add_(
        0, torch.where(stood, token, following.cpu()), weight.double()
    )
    torch.testing.assert_close(out, p.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_no_numbers(backend, place):
    """P12: NaN and infinities in whole rows or single entries, temperatures of all sizes."""
    logits = torch.randn(27, 2, 9, generator=torch.Generator().manual_seed(0))
    for r in range(27):
        bad = (NAN, INF, -INF)[r % 3]
        where = (slice(None), slice(0, 1), slice(4, 5))[r // 3 % 3]
        logits[r, :, where] = bad
    t, u = torch.tensor([1e-30, 1.0, 50.0]).repeat_interleave(9), torch.tensor([0.0, 0.3, 1 - 2.0**-24]).repeat(9)
    tokens, valid = torch.full((27, 1), 4), torch.ones(27, dtype=torch.bool)
    out = verify(*on(place, tokens, valid, logits), **sampling(place, t, u[:, None], u), backend=backend)
    p = [[p_by_hand(row, float(t[r])) for row in rows] for r, rows in enumerate(logits)]
    check_sampled(tokens, valid, p, None, None, u[:, None], u, *(x.cpu() for x in out), slack=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_verify(backend, place):
    none = torch.zeros(0, 3, dtype=torch.int64), torch.ones(0, dtype=torch.bool), torch.zeros(0, 4, 5)
    noise = sampling(place, torch.ones(0), torch.zeros(0, 3), torch.zeros(0))
    for options in ({}, noise):
        out = verify(*on(place, *none), **options, backend=backend)
        assert [x.shape for x in out] == [(0,), (0,)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_logits_and_expanded_settings(backend, place):
    """Rows that are slices of wider ones, whose padding is poison, and one temperature for all."""
    tokens, candidates, q = on(place, *proposal((3, 2, 13, 4), "sparse"))
    wide = torch.full((3, 4, 16), NAN)
    wide[:, :3, :13] = torch.randn(3, 3, 13, generator=torch.Generator().manual_seed(0))
    wide, valid = wide.to(place), torch.ones(1, dtype=torch.bool, device=place).expand(3)
    noise = sampling(place, torch.full((3,), 0.7), torch.full((3, 2), 0.3), torch.full((3,), 0.6))
    one = {**noise, "temperature": noise["temperature"][0].expand(3)}
    drafted = {"candidates": candidates, "q": q, "backend": backend}
    sliced = verify(tokens, valid, wide[:, :3, :13], **one, **drafted)
    plain = verify(tokens, valid, wide[:, :3, :13].clone(), **noise, **drafted)
    for mine, true in zip(sliced, plain, strict=True):
        assert torch.equal(mine, true)


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 7, 248_320, 16), (32, 7, 248_320, 16), (3, 15, 202_048, 16), (2, 1, 50_021, 5)])
def test_kernel_on_production_shapes(shape, dtype):
    requests, k, vocab, _ = shape
    g = torch.Generator(device="cuda").manual_seed(0)
    logits = (torch.randn(requests, k + 1, vocab, generator=g, device="cuda") * 3).to(dtype)
    tokens, candidates, q = on("cuda", *proposal(shape, "sparse"))
    best = logits.argmax(-1)
    tokens = torch.where(torch.rand(requests, k, generator=g, device="cuda") < 0.8, best[:, :k], tokens)
    candidates[..., 0] = tokens
    valid = torch.ones(requests, dtype=torch.bool, device="cuda")
    for name, true in zip(
        verify(tokens, valid, logits, backend="triton"), verify(tokens, valid, logits, backend="torch"), strict=True
    ):
        assert torch.equal(name, true)
    logits.scatter_add_(-1, tokens[..., None], torch.full((requests, k, 1), 12.0, dtype=dtype, device="cuda"))
    noise = {
        "temperature": torch.full((requests,), 0.8, device="cuda"),
        "accept": torch.rand(requests, k, generator=g, device="cuda", dtype=torch.float64),
        "replace": torch.rand(requests, generator=g, device="cuda", dtype=torch.float64),
    }
    for drafted in ({}, {"candidates": candidates, "q": q}):
        accepted, following = verify(tokens, valid, logits, **noise, **drafted, backend="triton")
        p = torch.softmax(logits.double() / 0.8, -1)
        for r in range(requests):
            n = int(accepted[r])
            weights = p[r, n].clone()
            if n < k:
                ids, spread = (candidates[r, n], q[r, n].double()) if drafted else (tokens[r, n][None], 1.0)
                weights.scatter_add_(0, ids, torch.zeros(len(ids), device="cuda").double() - spread)
                weights.clamp_min_(0)
            for i in range(min(n + 1, k)):
                share = float((q[r, i] * (candidates[r, i] == tokens[r, i])).sum()) if drafted else 1.0
                margin = float(p[r, i, tokens[r, i]]) - float(noise["accept"][r, i]) * share
                assert margin > -1e-5 if i < n else margin <= 1e-5
            below, total, at = weights.cumsum(0), weights.sum(), int(following[r])
            target = noise["replace"][r] * total
            assert float(weights[at]) > 0
            assert float(below[at] - weights[at]) - 1e-5 <= float(target) <= float(below[at]) + 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [{}, {"top_k": 5}], ids=str)
def test_kernel_follows_the_target(kind, cut):
    """200,000 trials: the first token out is distributed as the target's."""
    rows, vocab = 200_000, 8
    g = torch.Generator(device="cuda").manual_seed(3)
    fixed = torch.Generator().manual_seed(5)
    logits = (1.5 * torch.randn(vocab, generator=fixed)).cuda()
    ids = torch.randperm(vocab, generator=fixed)[:4].cuda() if kind == "sparse" else torch.arange(vocab).cuda()
    q = torch.softmax(2 * torch.randn(len(ids), generator=fixed), -1).cuda()
    if kind == "one-hot":
        drafts, made = ids[2].expand(rows), (None, None)
    else:
        drafts = ids[torch.multinomial(q, rows, replacement=True, generator=g)]
        spread = ids.expand(rows, 1, -1) if kind == "sparse" else None
        made = spread, q.expand(rows, 1, -1)
    valid = torch.ones(rows, dtype=torch.bool, device="cuda")
    plan = Proposal(drafts[:, None].contiguous(), *made, valid)
    out = verify_proposal(plan, logits.expand(rows, 2, vocab), 0.9, generator=g, **cut)
    came = torch.where(out.accepted > 0, drafts, out.next_token)
    p = torch.softmax(logits.double() / 0.9, -1)
    if cut:
        p = p.where(p >= p.topk(5).values[-1], 0.0)
        p /= p.sum()
    counts = torch.bincount(came, minlength=vocab).double()
    assert int(counts[p == 0].sum()) == 0
    mean = p[p > 0] * rows
    chi = float(((counts[p > 0] - mean) ** 2 / mean).sum())
    freedom = int((p > 0).sum()) - 1
    z = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))  # Wilson-Hilferty
    assert z < 4.5


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [None, 0.8])
def test_kernel_in_a_cuda_graph(temperature):
    """The public function too, with settings that are on the device."""
    shape = (2, 7, 50_021, 16)
    tokens, candidates, q = on("cuda", *proposal(shape, "sparse"))
    logits = torch.randn(2, 8, 50_021, device="cuda")
    valid = torch.ones(2, dtype=torch.bool, device="cuda")
    plan = Proposal(tokens, candidates, q, valid)
    t = 0.0 if temperature is None else torch.full((2,), temperature, device="cuda")
    verify_proposal(plan, logits, t)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = verify_proposal(plan, logits, t)
    tokens.copy_(logits[:, :7].argmax(-1))
    tokens[1, 3] += 1
    candidates[..., 0] = tokens
    logits.scatter_(-1, tokens[..., None].where(tokens[..., None] < 50_021, 0), 40.0) if temperature else None
    graph.replay()
    if temperature is None:
        assert out.accepted.tolist() == [7, 3]
        assert torch.equal(out.next_token, torch.stack((logits[0, 7].argmax(), logits[1, 3].argmax())))
    else:
        assert out.accepted.tolist() == [7, 7]


@pytest.mark.gpu
def test_kernel_offsets_are_64_bit():
    vocab, requests = 248_320, (1 << 31) // (2 * 248_320) + 1
    logits = torch.zeros(requests, 2, vocab, dtype=torch.bfloat16, device="cuda")
    logits[-1, 0, 77], logits[-1, 1, 99] = 1, 1
    tokens = torch.full((requests, 1), 77, device="cuda")
    valid = torch.ones(requests, dtype=torch.bool, device="cuda")
    accepted, following = verify(tokens, valid, logits)
    assert (int(accepted[-1]), int(following[-1])) == (1, 99)
    assert int(accepted[:-1].max()) == 0
    assert int(following[:-1].max()) == 0


def test_candidates_without_q_do_not_matter():
    tokens, candidates, _ = proposal((2, 3, 9, 4), "sparse")
    valid, logits = torch.ones(2, dtype=torch.bool), torch.randn(2, 4, 9)
    noise = sampling("cpu", torch.ones(2), torch.rand(2, 3), torch.rand(2))
    for mine, true in zip(
        verify(tokens, valid, logits, **noise, candidates=candidates), verify(tokens, valid, logits, **noise),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(mine, true)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named():
    shape = (2, 3, 9, 4)
    tokens, candidates, q = proposal(shape, "sparse")
    valid, logits = torch.ones(2, dtype=torch.bool), torch.zeros(2, 4, 9)
    noise = {"temperature": torch.ones(2), "accept": torch.rand(2, 3).double(), "replace": torch.rand(2).double()}
    with pytest.raises(ValueError, match=r"target_logits has shape \[2, 3, 9\].*expected \[2, 4, V\]"):
        verify(tokens, valid, logits[:, :3])
    with pytest.raises(ValueError, match="one was left out"):
        verify(tokens, valid, logits, temperature=noise["temperature"])
    with pytest.raises(ValueError, match=r"verify got candidates \[2, 3, 2\]: expected \[2, 3, 4\]"):
        verify(tokens, valid, logits, **noise, candidates=candidates[..., :2], q=q)
    for name, wrong in {"q": q[:1], "probabilities": logits[..., :3]}.items():
        with pytest.raises(ValueError, match=rf"verify got {name} \["):
            verify(tokens, valid, logits, **noise, **{name: wrong})
    for name in noise:
        with pytest.raises(ValueError, match=rf"verify got {name} \[1"):
            verify(tokens, valid, logits, **{**noise, name: noise[name][:1]})
    with pytest.raises(ValueError, match=r"verify got valid \[1\]: expected \[2\]"):
        verify(tokens, valid[:1], logits)
