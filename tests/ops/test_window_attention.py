"""window_attention against a loop over positions, and the kernel against the reference."""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch

from dflash2.ops.launch import override
from dflash2.ops.window_attention import PagedContext, window_attention
from dflash2.testing import assert_kernel_close

PAGE, RING_PAGES = 5, 16
RING = PAGE * RING_PAGES
#: Small tiles and many splits, so that small shapes have all that large ones have.
SPLIT = {"tile": 16, "programs_per_sm": 64, "max_splits": 16}


@dataclass
class Case:
    """R sequences at ``starts``; a share of their rows is missing, stale or on a page that nobody owns."""

    starts: tuple[int, ...]
    n: int = 4
    heads: tuple[int, int] = (2, 1)
    head_dim: int = 16
    window: int | None = None
    causal: bool = False
    length: int = RING
    faults: float = 0.25

    def __str__(self):
        rule = f"W{self.window}{'c' if self.causal else ''}"
        return f"{self.starts}-n{self.n}-{self.heads}-hd{self.head_dim}-{rule}-L{self.length}"


#: Starts without context, inside the first page, on and off page borders, past one and many turns of the ring.
RAGGED = (0, 1, 7, 33, RING + 3, 1000 * RING + 6)
CASES = [
    *[Case(RAGGED, window=w, causal=causal) for w in (1, 3, 4, 5, 70) for causal in (False, True)],
    Case(RAGGED),
    Case(RAGGED, window=14),
    Case(RAGGED, length=42),
    Case(RAGGED, length=10, window=30),
    Case((40,), length=0),
    Case((), window=5),
    Case((21, 0), n=1, window=9),
    Case((21, 50), n=8, window=8, heads=(4, 1), causal=True),
    Case((33,), n=16, window=20, heads=(8, 2), causal=True),
    Case((21, 70), n=5, heads=(6, 2), head_dim=80),  # groups of 3
    Case((90,), n=3, heads=(10, 2), head_dim=64, faults=1.0),  # nothing but holes
    Case((99,), n=2, heads=(3, 3), head_dim=128, window=33, faults=0.0),
    Case((78,), n=30, heads=(3, 1), window=65),  # more queries than one program takes
    Case((45, 46), n=0),
]
FULL, SLIDING = Case(RAGGED), Case((33, RING + 3), window=70)
CASES_16_BIT = [Case(RAGGED, window=70, causal=True), Case((70, 21), n=8, heads=(12, 4), head_dim=128)]


@dataclass
class World:
    """Arguments of the operation, and the rows that are there: by request, position -> (keys, values)."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tags: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    rows: list[dict[int, tuple[torch.Tensor, torch.Tensor]]]

    def context(self, requests=slice(None)):
        starts = torch.tensor(self.case.starts, dtype=torch.int64, device=self.q.device)[requests]
        return PagedContext(self.tags, self.page_table, self.slots[requests], starts, PAGE, self.case.length)

    def attend(self, backend, dtype=None, requests=slice(None)):
        tensors = [x[requests] for x in (self.q, self.k, self.v)] + [self.keys, self.values]
        c = self.case
        return window_attention(
            *(t if dtype is None else t.to(dtype) for t in tensors), self.context(requests), window=c.window,
            causal=c.causal, backend=backend,
        )  # fmt: skip

    def to(self, device):
        moved = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return World(**{**vars(self), **moved})


def world(case, dtype=torch.float32, seed=0):
    """Every row is NaN but those that some query sees; of other sequences some have our positions as tags."""
    draw, generator = random.Random(str(case) + str(seed)), torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    (nq, nkv), hd, count = case.heads, case.head_dim, len(case.starts)
    slots = draw.sample(range(count + 2), count)
    pages = list(range((count + 2) * RING_PAGES))
    draw.shuffle(pages)
    table = torch.tensor(pages).view(count + 2, RING_PAGES)
    rows = (len(pages) + 1) * PAGE  # the last page is nobody's
    keys, values = torch.full((2, rows, nkv, hd), float("nan"), dtype=dtype)
    tags = torch.full((rows,), -1)
    stored = [{} for _ in case.starts]
    reach = case.length if case.window is None else min(case.length, case.window - 1)
    for slot in range(count + 2):
        start = case.starts[slots.index(slot)] if slot in slots else RING
        for place in range(RING_PAGES):
            if draw.random() < case.faults / 3:
                table[slot, place] = -1
        for p in range(max(0, start - RING), start):
            page = int(table[slot, p // PAGE % RING_PAGES])
            fault = draw.random() < case.faults
            if page < 0 or (fault and draw.random() < 0.5):
                continue
            tags[page * PAGE + p % PAGE] = p + draw.choice((-RING, RING)) if fault else p
            if not fault and slot in slots and p >= start - reach:
                row = page * PAGE + p % PAGE
                keys[row], values[row] = normal(nkv, hd), normal(nkv, hd)
                stored[slots.index(slot)][p] = keys[row].double(), values[row].double()
    block = normal(count, case.n, nq, hd), normal(count, case.n, nkv, hd), normal(count, case.n, nkv, hd)
    slots = torch.tensor(slots, dtype=torch.int64)
    return World(case, *block, keys, values, tags, table, slots, stored)


def by_hand(w):
    """One query of one head at a time, over all positions that there are."""
    case, (nq, nkv) = w.case, w.case.heads
    out = torch.zeros(w.q.shape, dtype=torch.float64)
    for r, start in enumerate(case.starts):
        for i in range(case.n):
            for h in range(nq):
                g, scores, values = h // (nq // nkv), [], []
                for p, (key, value) in w.rows[r].items():
                    near = case.window is None or start + i - p < case.window
                    if near and start - case.length <= p < start:
                        scores.append(float(w.q[r, i, h].double() @ key[g]) / math.sqrt(case.head_dim))
                        values.append(value[g])
                for j in range(case.n):
                    near = case.window is None or abs(i - j) < case.window
                    if near and (j <= i or not case.causal):
                        scores.append(float(w.q[r, i, h].double() @ w.k[r, j, g].double()) / math.sqrt(case.head_dim))
                        values.append(w.v[r, j, g].double())
                weights = [math.exp(s - max(scores)) for s in scores]
                out[r, i, h] = sum(x * v for x, v in zip(weights, values, strict=True)) / sum(weights)
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_formula(case):
    w = world(case)
    torch.testing.assert_close(w.attend("torch", torch.float64), by_hand(w), rtol=1e-12, atol=1e-12)


def test_a_start_outside_of_all_positions_sees_no_context():
    """Positions from a device are not checked."""
    w = world(Case((50, 50)))
    context = PagedContext(w.tags, w.page_table, w.slots, torch.tensor([-7, 2**40]), PAGE, RING)
    assert not context.there.any()


def test_gradients():
    w = world(Case((9, 2), n=2, faults=0.0, length=9))
    w.keys.nan_to_num_(), w.values.nan_to_num_()
    leaves = [x.double().requires_grad_() for x in (w.q, w.k, w.v, w.keys[:], w.values[:])]
    assert torch.autograd.gradcheck(
        lambda *x: window_attention(*x, w.context(), window=5, causal=True), leaves, atol=1e-6, fast_mode=True
    )


def check_kernel(w, settings=SPLIT):
    exact, reference = w.attend("torch", torch.float64), w.attend("torch")
    with override("window_attention", settings):
        assert_kernel_close(w.attend("triton"), reference, exact)


@pytest.mark.triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case, kernel_device):
    check_kernel(world(case).to(kernel_device))


@pytest.mark.triton
@pytest.mark.parametrize("case", CASES_16_BIT, ids=str)
def test_kernel_in_16_bits(case, kernel_device):
    check_kernel(world(case, torch.float16).to(kernel_device))


@pytest.mark.triton
def test_kernel_without_splits(kernel_device):
    check_kernel(world(SLIDING).to(kernel_device), {"max_splits": 1})


@pytest.mark.triton
@pytest.mark.parametrize("case", [FULL, Case(RAGGED, length=42), Case((40,), length=0), Case(())], ids=str)
def test_kernel_finds_the_rows_of_the_reference(case, kernel_device):
    w = world(case).to(kernel_device)
    assert w.context().rows("triton").tolist() == w.context().rows("torch").tolist()
    starts = torch.tensor([-7, 2**40] * 3, device=kernel_device)[: len(w.slots)]
    context = PagedContext(w.tags, w.page_table, w.slots, starts, PAGE, RING)
    assert (context.rows("triton") == -1).all()


@pytest.mark.triton
def test_kernel_serves_all_layers_of_a_context(kernel_device):
    """What programs count each other with is zero again after each launch."""
    w = world(SLIDING).to(kernel_device)
    shared = w.context()
    with override("window_attention", SPLIT):
        for q in (w.q, -w.q):
            outs = [
                window_attention(q, w.k, w.v, w.keys, w.values, context, window=70, causal=False, backend="triton")
                for context in (shared, w.context())
            ]
            assert torch.equal(*outs)


@pytest.mark.triton
def test_kernel_request_does_not_depend_on_the_batch(kernel_device):
    w = world(SLIDING).to(kernel_device)
    with override("window_attention", SPLIT):
        together = w.attend("triton")
        for r in range(len(w.slots)):
            alone = w.attend("triton", requests=slice(r, r + 1))
            # Other splits of the same sums in fp32, each of the weights within rounding.
            torch.testing.assert_close(alone, together[r : r + 1], rtol=1e-5, atol=1e-6)


@pytest.mark.triton
def test_kernel_reads_strided_arguments(kernel_device):
    """Heads as parts of one projection, and one layer of a pool that has rows of all layers."""
    w = world(Case((21, 50), n=3, heads=(4, 2))).to(kernel_device)
    qkv = torch.cat((w.q, w.k, w.v), 2)
    w.q, w.k, w.v = qkv.split((4, 2, 2), 2)
    both = torch.stack((w.keys, w.values), 1)
    w.keys, w.values = both.unbind(1)
    check_kernel(w)


def large(requests, n=8, length=2047, dtype=torch.bfloat16, starts=None, heads=(32, 8, 128)):
    """Production shapes, ragged by default: heads, key heads, their width; pages of 16, a fifth of the rows missing."""
    heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(requests)
    ring_pages = -(-(length + 1) // 16) + 2
    pages = torch.randperm(requests * ring_pages, generator=generator).view(requests, ring_pages)
    if starts is None:
        starts = [(1 + r) * 977 % (2 * length) for r in range(requests)]
    starts = torch.tensor(starts)
    tags = torch.full(((requests * ring_pages + 1) * 16,), -1)
    keys, values = torch.full((2, len(tags), kv_heads, dim), float("nan"), dtype=dtype)
    for r in range(requests):
        p = torch.arange(max(0, int(starts[r]) - length), int(starts[r]))
        p = p[torch.rand(len(p), generator=generator) < 0.8]
        at = pages[r, p // 16 % ring_pages] * 16 + p % 16
        tags[at] = p
        keys[at], values[at] = torch.randn(2, len(p), kv_heads, dim, generator=generator).to(dtype)
    q, k, v = (torch.randn(requests, n, h, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads))
    tensors = [x.cuda() for x in (q, k, v, keys, values)]
    context = PagedContext(*(x.cuda() for x in (tags, pages, torch.arange(requests), starts)), 16, length)
    return tensors, context


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("requests", "n", "length", "window"), [(1, 8, 2047, 2048), (1, 16, 2047, 2048), (1, 8, 3000, None),
                                            (5, 8, 2047, 2048), (32, 8, 2047, 2048), (3, 7, 2047, 1000)],
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_kernel_at_production_shapes(requests, n, length, window, causal, dtype):
    tensors, context = large(requests, n, length, dtype)
    exact = window_attention(*(x.double() for x in tensors), context, window=window, causal=causal, backend="torch")
    reference = window_attention(*tensors, context, window=window, causal=causal, backend="torch")
    fresh = replace(context)
    actual = window_attention(*tensors, fresh, window=window, causal=causal, backend="triton")
    assert fresh.rows().tolist() == context.rows().tolist()
    assert_kernel_close(actual, reference, exact)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads", [(9, 3, 64), (16, 8, 64), (64, 8, 128), (20, 4, 128), (8, 4, 256), (32, 8, 80)], ids=str
)
@pytest.mark.parametrize("n", [1, 8, 16, 24])
@pytest.mark.parametrize("requests", [1, 2, 4, 8, 16, 64])
def test_kernel_at_other_heads(requests, n, heads):
    """The shipped drafter's come first: of their kernels some read outside of shared memory (`_OWN_ROWS`)."""
    tensors, context = large(requests, n, 511, heads=heads)
    exact = window_attention(*(x.double() for x in tensors), context, window=512, causal=False, backend="torch")
    reference = window_attention(*tensors, context, window=512, causal=False, backend="torch")
    actual = window_attention(*tensors, replace(context), window=512, causal=False, backend="triton")
    assert_kernel_close(actual, reference, exact)


@pytest.mark.parametrize("limit", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("queries", [16, 64])
def test_settings_of_one_shape_fit_all_others(queries, dim, limit):
    """An H200's for heads of 128 asked for 393 KiB at heads of 256."""
    kernel = pytest.importorskip("dflash2.kernels.window_attention")
    for settings in (kernel.DEFAULTS, *kernel.CANDIDATES):
        tile, stages = kernel.fitted(settings["tile"], settings["num_stages"], queries, dim, 2, limit)
        assert 2 * (2 * stages * tile * dim + queries * (dim + tile)) <= limit
        assert 2 <= stages <= settings["num_stages"]
        assert 16 <= tile <= settings["tile"]
    roomy = kernel.fitted(128, 3, 64, 128, 2, 227 << 10)
    assert roomy == (128, 3)  # what was measured runs as it was measured


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 4])
def test_replay_equals_eager(requests):
    tensors, context = large(requests)

    def run():
        fresh = replace(context)  # a context that has found no rows yet
        outs = [window_attention(*tensors, fresh, window=2048, causal=False, backend="triton") for _ in range(3)]
        return torch.stack(outs)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for shift in (0, 3, 100):
        context.starts.add_(shift)
        tensors[0].mul_(1.01)
        eager = run()
        for _ in range(3):
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, eager)


@pytest.mark.gpu
def test_auto_is_the_kernel_on_a_gpu():
    tensors, context = large(2)
    out = window_attention(*tensors, context, window=2048, causal=False)
    assert torch.equal(out, window_attention(*tensors, context, window=2048, causal=False, backend="triton"))
    assert context.rows().dtype == torch.int32


def test_wrong_arguments_are_named():
    w = world(Case((21, 50), heads=(4, 2)))
    tensors = {"q": w.q, "k": w.k, "v": w.v, "context_keys": w.keys, "context_values": w.values, "context": w.context()}

    def attend(window=4, **other):
        return window_attention(**(tensors | other), window=window, causal=False)

    with pytest.raises(ValueError, match=r"got q \[4, 4, 16\].*expected q \[R, n, nq, hd\]"):
        attend(q=w.q[0])
    with pytest.raises(ValueError, match="R, n, nkv and hd must agree"):
        attend(q=w.q[:, :2])
    with pytest.raises(ValueError, match="context must have R sequences and a tag for each row"):
        attend(context_keys=w.keys[1:], context_values=w.values[1:])
    with pytest.raises(ValueError, match="2 key heads must divide the 3 heads"):
        attend(q=w.q[:, :, :3])
    with pytest.raises(ValueError, match="window=0.*at least 1"):
        attend(window=0)
    with pytest.raises(ValueError, match="expected one dtype on one device"):
        attend(k=w.k.double())
    with pytest.raises(ValueError, match=r"starts \[1\]; expected"):
        PagedContext(w.tags, w.page_table, w.slots, w.slots[:1], PAGE, RING)
    with pytest.raises(ValueError, match="expected int64 on one device"):
        PagedContext(w.tags.int(), w.page_table, w.slots, w.slots, PAGE, RING)
    with pytest.raises(ValueError, match="page_size=0"):
        PagedContext(w.tags, w.page_table, w.slots, w.slots, 0, RING)
