"""dense_topk: the order of exact products up to what fp32 sums tell apart; a row's bits whatever the batch."""

import math

import pytest
import torch

from dflash2.ops.dense_topk import dense_topk, dense_topk_reference
from dflash2.ops.launch import override
from dflash2.ops.top_candidates import merge_top

SMALL = {"BLOCK_V": 16, "BLOCK_R": 16, "BLOCK_K": 32}
ROWS = (1, 7, 8, 56, 64)
# The interpreter multiplies the bits of bf16.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def inputs(rows, vocab, width, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(rows + vocab)
    hidden, weight = (torch.randn(n, width, generator=generator).to(device, dtype) for n in (rows, vocab))
    return hidden, weight


def whole_numbers(rows, vocab, width, dtype=torch.float16, device="cpu"):
    """Small ones, whose products every order of summing gets exactly; many ties."""
    generator = torch.Generator().manual_seed(rows + vocab)
    return [torch.randint(-3, 4, (n, width), generator=generator).to(device, dtype) for n in (rows, vocab)]


def stable_best(logits, count):
    clean = logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    order = clean.sort(dim=-1, descending=True, stable=True)
    return order.indices[:, :count], order.values[:, :count].float()


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def assert_best(found, hidden, weight, bias=None):
    """Values within what fp32 sums of H products are off by, ids the best by them: no other token is surely better."""
    ids, values = found
    exact = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = hidden.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    slack = (hidden.shape[1] + 1) * torch.finfo(torch.float32).eps * size
    assert ((values.double() - exact.gather(1, ids)).abs() <= slack.gather(1, ids)).all()
    assert (values.diff(dim=1) <= 0).all()
    others = (exact - slack).scatter(1, ids, -math.inf).amax(1)
    assert (others <= (exact + slack).gather(1, ids)[:, -1]).all()
    assert all(len(set(row)) == len(row) for row in ids.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 37, 13), (3, 300, 2100)], ids=str)
def test_reference(shape, dtype):
    hidden, weight = inputs(*shape, dtype)
    bias = torch.randn(shape[1]).to(dtype)
    count = min(4, shape[1])
    for b in (None, bias):
        assert_best(dense_topk(hidden, weight, b, count=count), hidden, weight, b)
    hidden, weight = whole_numbers(*shape, dtype)
    exact = hidden.double() @ weight.double().T
    assert_same(dense_topk(hidden, weight, count=count), stable_best(exact, count))
    assert torch.equal(dense_topk_reference(hidden, weight, None, shape[1]).double(), exact)


def test_logits_are_not_rounded_to_16_bits():
    weight = torch.zeros(2, 2, dtype=torch.bfloat16)
    weight[:, 0], weight[1, 1] = 1.0, 2**-10
    ids, values = dense_topk(torch.ones(1, 2, dtype=torch.bfloat16), weight, count=2)
    assert ids.tolist() == [[1, 0]]
    assert values.tolist() == [[1 + 2**-10, 1.0]]


def test_empty_and_small_vocabularies():
    hidden, weight = inputs(3, 9, 4)
    assert dense_topk(hidden[:0], weight, count=2)[1].shape == (0, 2)
    ids, values = dense_topk(hidden, weight, count=4, vocab_size=2, first_id=50)
    assert ids[:, :2].sort().values.tolist() == [[50, 51]] * 3
    assert ids[:, 2:].eq(-1).all()
    assert values[:, 2:].eq(-math.inf).all()
    assert dense_topk(hidden, weight, count=4, vocab_size=0)[0].eq(-1).all()


def test_what_does_not_fit_is_named():
    hidden, weight = inputs(3, 9, 4)
    with pytest.raises(ValueError, match=r"hidden \[3, 3\].*expected hidden \[N, H\]"):
        dense_topk(hidden[:, 1:], weight, count=1)
    with pytest.raises(ValueError, match=r"bias \[4\]; expected bias \[V'\]"):
        dense_topk(hidden, weight, weight[0], count=1)
    with pytest.raises(ValueError, match=r"bfloat16 and weight torch.float32; expected one"):
        dense_topk(hidden.bfloat16(), weight, count=1)
    with pytest.raises(ValueError, match="cpu.*meta.*together"):
        dense_topk(hidden.to("meta"), weight, count=1)
    with pytest.raises(ValueError, match="vocab_size=10: the weight has 9 rows"):
        dense_topk(hidden, weight, count=1, vocab_size=10)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "count", "programs"), [((1, 1, 1), 1, 0), ((3, 37, 13), 5, 2), ((17, 130, 70), 2, 0)], ids=str
)
def test_kernel(shape, count, programs, dtype, kernel_device):
    hidden, weight = inputs(*shape, dtype, kernel_device)
    bias = torch.randn(shape[1]).to(kernel_device, dtype)
    with override("dense_topk", SMALL | {"PROGRAMS": programs}):
        assert_best(dense_topk(hidden, weight, bias, count=count, backend="triton"), hidden, weight, bias)
        hidden, weight = whole_numbers(*shape, dtype, kernel_device)
        found = dense_topk(hidden, weight, count=count, backend="triton")
    assert_same(found, stable_best(hidden.double() @ weight.double().T, count))


@pytest.mark.triton
def test_kernel_of_padded_biased_shards(kernel_device):
    """Padding that must not be read, NaN rows, infinite biases of both signs, a shard smaller than C, global ids."""
    hidden, weight = whole_numbers(3, 45, 16, device=kernel_device)
    hidden[2, 5] = math.nan
    weight[40:], bias = math.nan, torch.zeros(45, device=kernel_device)
    bias[40:], bias[7], bias[9:30], bias[39] = math.inf, math.inf, -math.inf, math.nan
    expected = stable_best((hidden.double() @ weight.double().T + bias)[:, :40], 4)
    shards = []
    with override("dense_topk", SMALL):
        for a, b in ((0, 38), (38, 45)):
            part = (hidden, weight[a:b], bias[a:b])
            shards.append(dense_topk(*part, count=4, first_id=a, vocab_size=min(b, 40) - a, backend="triton"))
    assert shards[1][0].tolist() == [[38, 39, -1, -1]] * 3
    assert_same(merge_top(*(torch.stack(part) for part in zip(*shards, strict=True)), 4), expected)


@pytest.mark.triton
def test_kernel_reads_strided_arguments(kernel_device):
    hidden, weight = whole_numbers(3, 20, 16, device=kernel_device)
    wide = torch.full((3, 32), math.nan, dtype=hidden.dtype, device=kernel_device)
    wide[:, 8:24] = hidden
    with override("dense_topk", SMALL):
        found = dense_topk(wide[:, 8:24], weight.T.contiguous().T, count=3, backend="triton")
    assert_same(found, stable_best(hidden.double() @ weight.double().T, 3))


@pytest.fixture(scope="module")
def published():
    """A published head, made on the GPU: 2.5 GB. Two of its rows are equal, and one row of hidden asks for them."""
    torch.manual_seed(0)
    weight = torch.randn(248_320, 5120, dtype=torch.bfloat16, device="cuda")
    hidden = torch.randn(224, 5120, dtype=torch.bfloat16, device="cuda")
    weight[200_000], hidden[3] = weight[77], weight[77]
    return hidden, weight


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 16, 64])
def test_published_head(published, count):
    hidden, weight = published
    whole = dense_topk(hidden, weight, count=count, backend="triton")
    assert whole[0][3, 0] == 77
    for i in (0, 3, 223):
        assert_best([t[i : i + 1] for t in whole], hidden[i : i + 1], weight)
    for rows in (*ROWS, 17, 128, 223):
        assert_same(dense_topk(hidden[:rows], weight, count=count, backend="triton"), [t[:rows] for t in whole])


@pytest.mark.gpu
def test_every_launch_setting_gives_the_same_bits(published):
    from dflash2.kernels import dense_topk as kernel

    hidden, weight = published
    expected = dense_topk(hidden[:56], weight, count=16, backend="triton")
    for settings in kernel.CANDIDATES:
        for rows in (7, 56):
            with override("dense_topk", settings):
                found = dense_topk(hidden[:rows], weight, count=16, backend="triton")
            assert torch.equal(found[0], expected[0][:rows]), settings
            assert torch.equal(found[1], expected[1][:rows]), settings


@pytest.mark.gpu
def test_capture_and_replay(published):
    hidden, weight = published
    rows = hidden[:7].clone()
    for _ in range(2):  # compiled before the capture
        dense_topk(rows, weight, count=16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = dense_topk(rows, weight, count=16)
    for first in (0, 7):
        rows.copy_(hidden[first : first + 7])
        graph.replay()
        assert_same(found, dense_topk(rows, weight, count=16))
