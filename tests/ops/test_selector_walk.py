"""selector_walk against a loop written from the formula: the reference, and the kernel."""

import math
from dataclasses import astuple

import pytest
import torch

from dflash2.ops.selector_walk import Walk, selector_walk, shape_logits

# requests R, rows k, candidates C, rank r, vocabulary V
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 3, 5, 3, 11),
    (3, 7, 16, 37, 97),  # the rank has a tail
    (2, 15, 16, 64, 50),
    (1, 2, 17, 130, 40),  # three tiles of 64 and a tail
    (2, 7, 4, 8, 8),
]
PRODUCTION = [(1, 7, 16, 256, 248_320), (32, 7, 16, 256, 248_320), (4, 15, 16, 256, 202_048)]
LOWEST, LARGEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max


def inputs(shape, dtype=torch.float32, device="cpu"):
    """Small whole numbers: scores are exact in every order of summation, and there are ties."""
    requests, k, count, rank, vocab = shape
    g = torch.Generator().manual_seed(k * 1000 + rank)

    def whole(*dims, most=2):
        return torch.randint(-most, most + 1, dims, generator=g).to(device, dtype)

    anchors = torch.randint(0, vocab, (requests,), generator=g).to(device)
    candidates = torch.randint(0, vocab, (requests, k, count), generator=g).to(device)
    logits = whole(requests, k, count, most=8).float().sort(-1, descending=True).values
    return [whole(requests, k, rank), anchors, candidates, logits, whole(vocab, rank), whole(vocab, rank)]


def sampling(shape, device="cpu", temperatures=(0.0, 0.7, 40.0, 1e-30, -1.0)):
    """Greedy and sampled rows, mixed."""
    g = torch.Generator().manual_seed(shape[0])
    t = torch.tensor(temperatures).repeat(shape[0])[: shape[0]]
    uniforms = torch.rand(shape[0], shape[1], generator=g, dtype=torch.float64)
    return {"temperature": t.to(device), "uniforms": uniforms.to(device)}


def made_finite(x):
    return LOWEST if math.isnan(x) else min(max(x, LOWEST), LARGEST)


def scores_by_hand(arguments, r, i, before, multiplier=1.0, softcap=None):
    """Scores of row i of request r given the token before, one product at a time, in Python floats."""
    gate, _, candidates, logits, a, b = arguments
    last = len(a) - 1
    before = min(max(before, 0), last)
    scores = []
    for token, logit in zip(candidates[r, i].tolist(), logits[r, i].double().tolist(), strict=True):
        shaped = logit * multiplier
        if softcap is not None and shaped != -math.inf:
            shaped = softcap * math.tanh(shaped / softcap)
        row = b[min(max(token, 0), last)]
        pair = math.fsum(math.prod(v) for v in zip(a[before].tolist(), gate[r, i].tolist(), row.tolist(), strict=True))
        scores.append(made_finite(made_finite(shaped) + pair))
    return scores


def softmax_by_hand(scores, temperature):
    powers = [math.exp(max((s - max(scores)) / temperature, -1000.0)) for s in scores]
    return [p / sum(powers) for p in powers]


def check(arguments, walk: Walk, multiplier=1.0, softcap=None, temperature=None, uniforms=None, slack=0.0):
    """Hold a walk to the formula, each row given the token that the walk itself chose before.

    ``slack``: how far scores may be rounded; a choice between scores closer than that is free.
    """
    arguments = [x.cpu() for x in arguments]
    index, tokens = walk.index.tolist(), walk.tokens.tolist()
    for r, anchor in enumerate(arguments[1].tolist()):
        before = anchor
        for i, chosen in enumerate(index[r]):
            scores = scores_by_hand(arguments, r, i, before, multiplier, softcap)
            t = 0.0 if temperature is None else float(temperature[r])
            if t <= 0:
                assert scores[chosen] >= max(scores) - slack
                if slack == 0:
                    assert chosen == scores.index(max(scores))
                q = [float(c == chosen) for c in range(len(scores))]
            else:
                q = softmax_by_hand(scores, t)
                # Exponents are rounded by fp32 steps of their size, those that matter being above -100.
                near = 1e-5 + slack / t
                u, below = float(uniforms[r, i]), sum(q[:chosen])
                assert below - near <= u <= below + q[chosen] + near
                assert walk.q[r, i, chosen] > 0
            if walk.q is not None:
                near = 1e-5 + (slack / t if t > 0 else 0)
                torch.testing.assert_close(walk.q[r, i].cpu(), torch.tensor(q), rtol=near, atol=near)
            before = int(arguments[2][r, i, chosen])
            assert tokens[r][i] == before
        best = arguments[3][r, :, 0].tolist()
        assert bool(walk.meaningful[r]) == all(map(math.isfinite, best))
    assert walk.tokens.dtype == walk.index.dtype == torch.int64
    assert walk.meaningful.dtype == torch.bool


BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.triton)]


@pytest.fixture
def place(request, backend):
    """The device of a backend; the kernel's is asked for only when it runs."""
    return request.getfixturevalue("kernel_device") if backend == "triton" else "cpu"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_is_exact(shape, backend, place):
    arguments = inputs(shape, device=place)
    walk = selector_walk(*arguments, backend=backend)
    assert walk.q is None
    check(arguments, walk)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, backend, place):
    arguments = inputs(SHAPES[2], dtype, place)
    check(arguments, selector_walk(*arguments, multiplier=0.5, backend=backend), 0.5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("shape", [*SHAPES[:3], (5, 2, 5, 3, 11)], ids=str)
def test_sampled_rows_follow_their_q(shape, softcap, backend, place):
    arguments, noise = inputs(shape, device=place), sampling(shape, place)
    walk = selector_walk(*arguments, softcap=softcap, **noise, backend=backend)
    # A softcap's tanh is rounded: 4 steps of fp32 of at most 3, and sums below 64 once more.
    check(arguments, walk, softcap=softcap, **noise, slack=0.0 if softcap is None else 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_rows_are_as_if_alone(backend, place):
    arguments, noise = inputs(SHAPES[2], device=place), sampling(SHAPES[2], place, (0.0, 1.0, -3.0))
    mixed, greedy = selector_walk(*arguments, **noise, backend=backend), selector_walk(*arguments, backend=backend)
    for r in (0, 2):
        assert torch.equal(mixed.index[r], greedy.index[r])
        assert torch.equal(mixed.q[r].argmax(-1), greedy.index[r])
        assert torch.equal(mixed.q[r].sum(-1), torch.ones(7, device=place))
        assert int((mixed.q[r] > 0).sum()) == 7


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers(bad, temperature, backend, place):
    """All of a row, its best, its last: choices stay in range, q a distribution, and the flag says so."""
    shape = (4, 3, 5, 3, 11)
    arguments, noise = inputs(shape, device=place), sampling(shape, place, (temperature,))
    arguments[3][0, 1], arguments[3][1, 2, 0], arguments[3][2, 0, -1] = bad, bad, bad
    for softcap in (None, 3.0):
        walk = selector_walk(*arguments, softcap=softcap, **noise, backend=backend)
        check(arguments, walk, softcap=softcap, **noise, slack=0.0 if softcap is None else 1e-5)
        assert walk.meaningful.tolist() == [False, False, True, True]
        torch.testing.assert_close(walk.q.sum(-1).cpu(), torch.ones(4, 3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ruled_out_candidates_are_never_drawn(backend, place):
    shape = (50, 2, 5, 3, 11)
    arguments, noise = inputs(shape, device=place), sampling(shape, place, (30.0,))
    arguments[3][..., 2:] = -math.inf
    noise["uniforms"][:10], noise["uniforms"][10:20] = 0.0, 1 - 2.0**-53
    for softcap in (None, 5.0):
        walk = selector_walk(*arguments, softcap=softcap, **noise, backend=backend)
        assert int(walk.index.max()) == 1
        assert not bool(walk.q[..., 2:].any())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", [-1, 11, 2**40, -(2**62)])
def test_ids_out_of_range_read_the_nearest_row(wrong, backend, place):
    """B159. Poison lies on both sides of the codebooks; what comes back is still the id that came in."""
    arguments = inputs((3, 4, 5, 3, 11), device=place)
    for table in (4, 5):
        wide = torch.full((33, 3), math.nan, device=place)
        wide[11:22] = arguments[table]
        arguments[table] = wide[11:22]
    arguments[1][0] = wrong
    arguments[2][1, :, 0], arguments[2][2, 2] = wrong, wrong
    walk = selector_walk(*arguments, backend=backend)
    check(arguments, walk)
    assert walk.tokens[2, 2] == wrong


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 3, 5, 3, 11), (2, 0, 5, 3, 11)], ids=str)
def test_nothing_to_walk(shape, backend, place):
    requests, k, count = shape[:3]
    arguments, noise = inputs(shape, device=place), sampling(shape, place)
    walk = selector_walk(*arguments, **noise, backend=backend)
    assert walk.tokens.shape == walk.index.shape == (requests, k)
    assert walk.q.shape == (requests, k, count)
    assert walk.meaningful.tolist() == [True] * requests
    assert selector_walk(*arguments, backend=backend).q is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_arguments(backend, place):
    shape = (3, 4, 5, 3, 11)
    arguments, noise = inputs(shape, device=place), sampling(shape, place, (0.5,))
    strided = [torch.stack((x, torch.full_like(x, 1)), -1)[..., 0] for x in arguments]
    expected = selector_walk(*arguments, **noise, backend=backend)
    noise["temperature"] = torch.tensor(0.5, device=place).expand(3)
    for mine, true in zip(*map(astuple, (selector_walk(*strided, **noise, backend=backend), expected)), strict=True):
        assert torch.equal(mine, true)


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_follow_q(backend, place):
    """Uniforms on a grid: a candidate comes out in proportion to its q, to one grid point."""
    n = 200
    arguments = [x.expand(n, *x.shape[1:]) if i < 4 else x for i, x in enumerate(inputs((1, 1, 5, 3, 11)))]
    u = (torch.arange(n, dtype=torch.float64)[:, None] + 0.5) / n
    noise = {"temperature": torch.full((n,), 6.0, device=place), "uniforms": u.to(place)}
    walk = selector_walk(*(x.to(place) for x in arguments), **noise, backend=backend)
    counts = torch.bincount(walk.index.flatten().cpu(), minlength=5).double()
    assert int((walk.q[0, 0] > 0.01).sum()) > 2
    torch.testing.assert_close(counts, walk.q[0, 0].cpu().double() * n, rtol=0, atol=1.001)


@pytest.mark.triton
def test_kernel_scores_are_fp32(kernel_device):
    """Arbitrary numbers. Choices within rounding of fp32 sums of 256 products are free, no others."""
    g = torch.Generator().manual_seed(0)
    shape = (2, 3, 16, 256, 300)
    arguments = inputs(shape)
    for at in (0, 3, 4, 5):
        arguments[at] = torch.randn(arguments[at].shape, generator=g)
    for dtype in (torch.float32, torch.bfloat16):
        cast = [x.to(kernel_device, dtype if x.is_floating_point() else x.dtype) for x in arguments]
        cast[3] = arguments[3].to(kernel_device)
        for options in ({}, sampling(shape, kernel_device, (0.9, 0.0))):
            walk = selector_walk(*cast, multiplier=1.7, softcap=4.0, **options, backend="triton")
            # |a g b| is about 1, and three TF32 parts hold a product to 2^-22: 256 of them to 6e-5. Sums add some.
            check(cast, walk, 1.7, 4.0, **options, slack=1e-4)


@pytest.mark.triton
def test_kernel_row_does_not_depend_on_the_batch(kernel_device):
    shape = (5, 3, 5, 37, 97)
    arguments, noise = inputs(shape, torch.bfloat16, kernel_device), sampling(shape, kernel_device)
    together = selector_walk(*arguments, **noise, backend="triton")
    one = [x[3:4] if i < 4 else x for i, x in enumerate(arguments)], {n: x[3:4] for n, x in noise.items()}
    alone = selector_walk(*one[0], **one[1], backend="triton")
    for mine, true in zip(astuple(alone), astuple(together), strict=True):
        assert torch.equal(mine, true[3:4])


@pytest.mark.triton
def test_kernel_refuses_what_it_cannot_hold(kernel_device):
    arguments = inputs((1, 2, 100, 1, 300), device=kernel_device)
    with pytest.raises(ValueError, match=r"2 rows of 100 candidates.*backend='auto' or 'torch'"):
        selector_walk(*arguments, backend="triton")
    check(arguments, selector_walk(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("shape", PRODUCTION, ids=str)
def test_kernel_on_production_shapes(shape, sampled):
    arguments = inputs(shape, torch.bfloat16, "cuda")
    options = sampling(shape, "cuda") if sampled else {}
    ours, true = (selector_walk(*arguments, **options, backend=name) for name in ("triton", "torch"))
    greedy = options["temperature"] <= 0 if sampled else torch.ones(shape[0], dtype=torch.bool, device="cuda")
    assert torch.equal(ours.index[greedy], true.index[greedy])
    assert torch.equal(ours.meaningful, true.meaningful)
    two = [x if i in (1, 2) else x.float() for i, x in enumerate(arguments)]
    two[:4] = [x[:2] for x in two[:4]]
    first = Walk(ours.tokens[:2], ours.index[:2], ours.q[:2] if sampled else None, ours.meaningful[:2])
    check(two, first, **{n: x[:2] for n, x in options.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (2, 60, 16, 256, 99), (1, 1, 128, 32, 200), (1, 3, 64, 100, 99)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_compiles_for_every_shape(shape, dtype):
    arguments, noise = inputs(shape, dtype, "cuda"), sampling(shape, "cuda")
    walk = selector_walk(*arguments, softcap=5.0, **noise, backend="triton")
    # Up to 2,048 = 8 r, rounded to fp32.
    check(arguments, walk, softcap=5.0, **noise, slack=3e-4)


@pytest.mark.gpu
def test_kernel_in_a_cuda_graph():
    shape = PRODUCTION[0]
    arguments, noise = inputs(shape, torch.bfloat16, "cuda"), sampling(shape, "cuda", (0.8,))
    selector_walk(*arguments, **noise)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        walk = selector_walk(*arguments, **noise)
    arguments[0].copy_(arguments[0].flip(-1))
    noise["uniforms"].copy_(noise["uniforms"].flip(-1))
    graph.replay()
    for mine, true in zip(astuple(walk), astuple(selector_walk(*arguments, **noise)), strict=True):
        assert torch.equal(mine, true)


def test_shaped_logits():
    logits = torch.tensor([-math.inf, -100.0, -0.5, 0.0, 1e-4, 2.0, math.inf])
    assert torch.equal(shape_logits(logits, 2.0), logits * 2)
    capped = shape_logits(logits, 2.0, 5.0)
    expected = [-math.inf] + [5 * math.tanh(2 * x / 5) for x in logits[1:].tolist()]
    torch.testing.assert_close(capped, torch.tensor(expected))


def test_wrong_arguments_are_named():
    arguments = inputs(SHAPES[1])
    noise = sampling(SHAPES[1])
    for at, change, message in (
        (0, lambda x: x[0], r"gate \[3, 3\].*expected gate \[R, k, r\]"),
        (1, lambda x: x[:1], r"anchors \[1\].*expected anchors \[R\]"),
        (3, lambda x: x[..., :2], "logits like the candidates"),
        (2, lambda x: x[..., :0], "C >= 1"),
        (4, lambda x: x[:, :2], "of the gate's rank"),
        (5, lambda x: x[:4], "two codebooks"),
    ):
        wrong = list(arguments)
        wrong[at] = change(wrong[at])
        with pytest.raises(ValueError, match=message):
            selector_walk(*wrong)
    with pytest.raises(ValueError, match="one was left out"):
        selector_walk(*arguments, temperature=noise["temperature"])
    with pytest.raises(ValueError, match=r"temperature \[1\].*expected \[R\], \[R, k\]"):
        selector_walk(*arguments, temperature=noise["temperature"][:1], uniforms=noise["uniforms"])


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.triton
def test_a_gate_in_parts_is_their_sum(device):
    g = torch.Generator().manual_seed(0)
    parts = torch.randint(-4, 5, (3, 2, 3, 8), generator=g).float()
    candidates = torch.stack([torch.randperm(30, generator=g)[:4] for _ in range(6)]).view(2, 3, 4)
    tables = [torch.randint(-2, 3, (30, 8), generator=g).float() for _ in range(2)]
    logits = torch.randint(-9, 9, (2, 3, 4), generator=g).float().sort(-1, descending=True).values
    anchors = torch.tensor([3, 7])
    whole = selector_walk(parts.sum(0), anchors, candidates, logits, *tables, backend="torch")
    for backend in ("torch", "triton"):
        found = selector_walk(parts, anchors, candidates, logits, *tables, backend=backend)
        assert torch.equal(found.tokens, whole.tokens)
