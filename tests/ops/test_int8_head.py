"""int8_head against whole-number arithmetic in numpy, to the bit; its kernels against the same, and the C best."""

import math

import numpy as np
import pytest
import torch

from dflash2.ops.int8_head import int8_head, int8_head_reference, int8_head_top
from dflash2.ops.int8_rows import quantize_rows
from dflash2.ops.launch import override
from dflash2.ops.top_candidates import merge_top

#: Small tiles: many of them, and tails, in a small vocabulary.
SMALL = {"BLOCK_V": 16, "BLOCK_R": 8, "BLOCK_K": 32}
ROWS = (1, 7, 8, 56, 64)


def inputs(rows, vocab, width, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight, scale = quantize_rows(torch.randn(vocab, width, generator=generator))
    return hidden.to(device), weight.to(device), scale.to(device)


def by_whole_numbers(hidden, weight, scale, bias=None):
    """The formula in numpy: sums in int64, every other step one fp32 operation."""
    x, w = hidden.float().cpu().numpy(), weight.cpu().numpy().astype(np.int64)
    row_scale = np.abs(x).max(-1, keepdims=True) / np.float32(32639)
    q = np.rint(np.divide(x, row_scale, out=np.zeros_like(x), where=row_scale > 0)).astype(np.int64)
    total = (q @ w.T).astype(np.float32)
    logits = (scale.cpu().numpy()[None, :] * row_scale) * total
    return torch.from_numpy(logits if bias is None else logits + bias.float().cpu().numpy())


def best_by_hand(logits, count):
    """A stable sort in Python: ids and values of each row."""
    found = []
    for row in logits.tolist():
        clean = [-math.inf if math.isnan(v) else v for v in row]
        ids = sorted(range(len(row)), key=lambda i: (-clean[i], i))[:count]
        found.append((ids, [clean[i] for i in ids]))
    ids, values = zip(*found, strict=True)
    return torch.tensor(ids), torch.tensor(values)


def assert_best(found, logits, count):
    ids, values = (t.cpu() for t in found)
    expected_ids, expected = best_by_hand(logits.cpu(), count)
    assert (ids.dtype, values.dtype) == (torch.int64, torch.float32)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(values, expected)


# -- the definition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 37, 13), (8, 300, 1024), (5, 70, 1031), (2, 41, 5120)], ids=str)
def test_reference_is_whole_number_arithmetic(shape, dtype):
    """Widths on both sides of where one fp32 sum stays exact; the largest numbers that exist in one row."""
    hidden, weight, scale = inputs(*shape, dtype)
    hidden[0], weight[0] = 3.0, 127
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(int8_head(hidden, weight, scale), by_whole_numbers(hidden, weight, scale))
    assert torch.equal(int8_head(hidden, weight, scale, bias), by_whole_numbers(hidden, weight, scale, bias))


def test_accuracy_of_the_rows():
    """Each element is off by at most half a step: 2^-16 of the row's largest value."""
    hidden, weight, scale = inputs(9, 60, 200)
    hidden[:, 3] *= 100
    exact = hidden.double() @ (weight.double() * scale.double()[:, None]).T
    step = hidden.double().abs().amax(1, keepdim=True) * 2**-16
    bound = step * (weight.double().abs() * scale.double()[:, None]).sum(1)
    error = (int8_head(hidden, weight, scale).double() - exact).abs()
    # 32639 is 0.4 % short of 2^15; the last term is the roundings to fp32.
    assert (error <= 1.005 * bound + 4 * torch.finfo(torch.float32).eps * exact.abs()).all()


@pytest.mark.parametrize("width", [64, 1100])
def test_rows_do_not_depend_on_their_number(width):
    hidden, weight, scale = inputs(64, 301, width)
    whole = int8_head(hidden, weight, scale)
    for rows in ROWS:
        for first in (0, 64 - rows):
            part = hidden[first : first + rows]
            assert torch.equal(int8_head(part, weight, scale), whole[first : first + rows])


def test_zero_tiny_and_damaged_rows():
    hidden, weight, scale = inputs(6, 20, 8)
    hidden[0], hidden[1], hidden[2, 3], hidden[3, 0], hidden[4, 5] = 0, 1e-36, math.nan, math.inf, -math.inf
    logits = int8_head(hidden, weight, scale)
    assert (logits[:2] == 0).all()
    assert logits[2:5].isnan().all()
    assert logits[5].isfinite().all()
    ids, values = int8_head_top(hidden, weight, scale, count=3)
    assert ids[:5].tolist() == [[0, 1, 2]] * 5
    assert (values[2:5] == -math.inf).all()


def test_gradients_are_those_of_the_rows_as_they_are():
    hidden, weight, scale = inputs(4, 50, 9)
    bias = torch.randn(50)
    upstream = torch.randn(4, 50)
    results = []
    for head in (
        lambda x, b: int8_head(x, weight, scale, b, vocab_size=47),
        lambda x, b: (x @ (weight * scale[:, None]).T + b)[:, :47],
    ):
        x, b = hidden.clone().requires_grad_(), bias.clone().requires_grad_()
        head(x, b).backward(upstream[:, :47])
        results.append((x.grad, b.grad))
    torch.testing.assert_close(*results)


def test_padded_rows_are_not_read():
    hidden, weight, scale = inputs(3, 40, 16)
    scale[37:], bias = math.nan, torch.zeros(40)
    bias[37:] = math.nan
    assert torch.equal(
        int8_head(hidden, weight, scale, bias, vocab_size=37), int8_head(hidden, weight[:37], scale[:37])
    )


def test_shards_merge_to_the_whole():
    hidden, weight, scale = inputs(5, 40, 16)
    weight[30], scale[30] = weight[2], scale[2]  # a tie across shards
    shards = [
        int8_head_top(hidden, weight[a:b], scale[a:b], count=6, first_id=a) for a, b in ((0, 3), (3, 31), (31, 40))
    ]
    assert shards[0][0][:, 3:].eq(-1).all()
    assert shards[0][1][:, 3:].eq(-math.inf).all()
    ids, values = merge_top(*(torch.stack(part) for part in zip(*shards, strict=True)), 6)
    assert_best((ids, values), by_whole_numbers(hidden, weight, scale), 6)


def test_empty():
    hidden, weight, scale = inputs(3, 9, 4)
    assert int8_head(hidden[:0], weight, scale).shape == (0, 9)
    assert int8_head_top(hidden[:0], weight, scale, count=2)[0].shape == (0, 2)
    ids, values = int8_head_top(hidden, weight, scale, count=2, vocab_size=0)
    assert ids.eq(-1).all()
    assert values.eq(-math.inf).all()
    assert int8_head(hidden[:, :0], weight[:, :0], scale).eq(0).all()


def test_what_does_not_fit_is_named():
    hidden, weight, scale = inputs(3, 9, 4)
    with pytest.raises(ValueError, match=r"hidden \[3, 3\].*expected hidden \[N, H\]"):
        int8_head(hidden[:, 1:], weight, scale)
    with pytest.raises(ValueError, match=r"scale \[8\].*expected scale \[V'\]"):
        int8_head(hidden, weight, scale[1:])
    with pytest.raises(ValueError, match=r"bias \[8\].*or None"):
        int8_head(hidden, weight, scale, scale[1:])
    with pytest.raises(ValueError, match=r"scale torch.bfloat16.*leave the scale alone"):
        int8_head(hidden, weight, scale.bfloat16())
    with pytest.raises(ValueError, match="cpu.*meta.*together"):
        int8_head(hidden.to("meta"), weight, scale)
    with pytest.raises(ValueError, match="vocab_size=10: the weight has 9 rows"):
        int8_head(hidden, weight, scale, vocab_size=10)
    with pytest.raises(ValueError, match="count=0"):
        int8_head_top(hidden, weight, scale, count=0)
    with pytest.raises(ValueError, match="count=65 and the kernel keeps at most 64"):
        int8_head_top(hidden, weight, scale, count=65, backend="triton")
    assert int8_head_top(hidden, weight, scale, count=65)[0].shape == (3, 65)


# -- the kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 37, 13), (9, 33, 96)], ids=str)
def test_logits_kernel(shape, dtype, kernel_device):
    hidden, weight, scale = inputs(*shape, dtype, kernel_device)
    hidden[0], weight[0] = 3.0, 127
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(1)).to(kernel_device, dtype)
    for b in (None, bias):
        with override("int8_head", SMALL):
            actual = int8_head(hidden, weight, scale, b, backend="triton")
        assert torch.equal(actual.cpu(), by_whole_numbers(hidden, weight, scale, b))


@pytest.mark.triton
@pytest.mark.parametrize(("rows", "count", "programs"), [(1, 1, 0), (3, 5, 0), (3, 5, 3), (9, 2, 0), (9, 2, 5)])
def test_top_kernel(rows, count, programs, kernel_device):
    """Most of the 20 tiles find the floor above them; the last holds 1 token."""
    hidden, weight, scale = inputs(rows, 305, 40, device=kernel_device)
    weight[290], scale[290] = weight[4], scale[4]  # ties, of which the lower id comes first
    hidden[-1] = weight[4].float()
    with override("int8_head", SMALL | {"PROGRAMS": programs}):
        found = int8_head_top(hidden, weight, scale, count=count, backend="triton")
    assert_best(found, by_whole_numbers(hidden, weight, scale), count)
    assert found[0][-1, 0] == 4


@pytest.mark.triton
@pytest.mark.parametrize(("rows", "stages"), [(1, 2), (7, 5), (17, 3)])
def test_top_kernel_that_asks_for_weights_early(rows, stages, kernel_device):
    hidden, weight, scale = inputs(rows, 305, 160, device=kernel_device)
    with override("int8_head", {"BLOCK_V": 64, "BLOCK_R": 16, "BLOCK_K": 32, "EARLY": 1, "num_stages": stages}):
        found = int8_head_top(hidden, weight, scale, count=5, backend="triton")
    assert_best(found, by_whole_numbers(hidden, weight, scale), 5)


@pytest.mark.triton
def test_top_kernel_of_equal_rows(kernel_device):
    """Nothing can be left out early: every token of every tile is as good as the C-th."""
    hidden, weight, scale = inputs(2, 70, 8, device=kernel_device)
    hidden[1] = math.nan
    weight[:], scale[:] = weight[0], scale[0]
    with override("int8_head", SMALL):
        ids, values = int8_head_top(hidden, weight, scale, count=4, backend="triton")
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert values[1].eq(-math.inf).all()


@pytest.mark.triton
def test_top_kernel_of_padded_biased_shards(kernel_device):
    """Padding with the largest logits, infinite biases of both signs, a shard smaller than C, global ids."""
    hidden, weight, scale = inputs(3, 45, 16, device=kernel_device)
    scale[40:], bias = 1e4, torch.zeros(45, device=kernel_device)
    bias[40:], bias[7], bias[9:30], bias[39] = math.inf, math.inf, -math.inf, math.nan
    logits = by_whole_numbers(hidden, weight, scale, bias)[:, :40]
    shards = []
    with override("int8_head", SMALL):
        for a, b in ((0, 38), (38, 45)):
            part = (hidden, weight[a:b], scale[a:b], bias[a:b])
            shards.append(int8_head_top(*part, count=4, first_id=a, vocab_size=min(b, 40) - a, backend="triton"))
    assert shards[1][0].tolist() == [[38, 39, -1, -1]] * 3
    ids, values = merge_top(*(torch.stack(part) for part in zip(*shards, strict=True)), 4)
    assert_best((ids, values), logits, 4)


@pytest.mark.triton
def test_kernel_rows_do_not_depend_on_their_number(kernel_device):
    hidden, weight, scale = inputs(64, 40, 40, device=kernel_device)
    whole = int8_head(hidden, weight, scale, backend="torch")
    for rows in ROWS:
        with override("int8_head", SMALL if rows % 8 else {"BLOCK_V": 32, "BLOCK_R": 32, "BLOCK_K": 64}):
            actual = int8_head(hidden[64 - rows :], weight, scale, backend="triton")
        assert torch.equal(actual, whole[64 - rows :]), rows


@pytest.mark.triton
def test_kernel_reads_strided_arguments(kernel_device):
    hidden, weight, scale = inputs(3, 20, 16, device=kernel_device)
    expected = int8_head(hidden, weight, scale, backend="torch")
    wide = torch.full((3, 32), math.nan, device=kernel_device)
    wide[:, 8:24] = hidden
    with override("int8_head", SMALL):
        actual = int8_head(wide[:, 8:24], weight.T.contiguous().T, scale, backend="triton")
    assert torch.equal(actual, expected)


@pytest.mark.triton
def test_kernel_of_zero_tiny_and_damaged_rows(kernel_device):
    hidden, weight, scale = inputs(6, 20, 8, device=kernel_device)
    hidden[0], hidden[1], hidden[2, 3], hidden[3, 0], hidden[4, 5] = 0, 1e-36, math.nan, math.inf, -math.inf
    expected = int8_head(hidden, weight, scale, backend="torch")
    with override("int8_head", SMALL):
        actual = int8_head(hidden, weight, scale, backend="triton")
    assert torch.equal(actual.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


# -- on a GPU, at full size -----------------------------------------------------------------------------------------

PUBLISHED = {"vocab": 248_320, "width": 5120}


@pytest.fixture(scope="module")
def published():
    """A published head, made on the GPU: 1.27 GB."""
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (PUBLISHED["vocab"], PUBLISHED["width"]), dtype=torch.int8, device="cuda")
    scale = torch.rand(PUBLISHED["vocab"], device="cuda") * 1e-3
    weight[200_000], scale[200_000] = weight[77], scale[77]
    hidden = torch.randn(224, PUBLISHED["width"], device="cuda").bfloat16()
    hidden[3] = weight[77].bfloat16()
    return hidden, weight, scale


@pytest.mark.gpu
def test_published_head_is_the_definition_to_the_bit(published):
    hidden, weight, scale = published
    expected = int8_head(hidden[:9], weight, scale, backend="torch")
    assert torch.equal(int8_head(hidden[:9], weight, scale, backend="triton"), expected)
    # What the GPU calls the definition is what the CPU does.
    some = slice(100_000, 100_500)
    cpu = int8_head_reference(hidden[:9].cpu(), weight[some].cpu(), scale[some].cpu(), None, 500)
    assert torch.equal(expected[:, some].cpu(), cpu)
    assert_best(int8_head_top(hidden[:9], weight, scale, count=16, backend="triton"), expected, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 16, 64])
def test_published_head_for_any_number_of_rows(published, count):
    hidden, weight, scale = published
    whole = int8_head(hidden, weight, scale, backend="triton")
    ids, values = int8_head_top(hidden, weight, scale, count=count, backend="triton")
    order = whole.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, order.indices[:, :count])
    assert torch.equal(values, order.values[:, :count])
    for rows in (*ROWS, 17, 128, 223):
        assert torch.equal(int8_head(hidden[:rows], weight, scale, backend="triton"), whole[:rows]), rows
        part = int8_head_top(hidden[:rows], weight, scale, count=count, backend="triton")
        assert torch.equal(part[0], ids[:rows]), rows
        assert torch.equal(part[1], values[:rows]), rows


@pytest.mark.gpu
def test_every_launch_setting_gives_the_same_bits(published):
    from dflash2.kernels import int8_head as kernel

    hidden, weight, scale = published
    expected = int8_head_top(hidden[:56], weight, scale, count=16, backend="torch")
    for settings in kernel.CANDIDATES:
        for rows in (7, 56):
            with override("int8_head", settings):
                found = int8_head_top(hidden[:rows], weight, scale, count=16, backend="triton")
            assert torch.equal(found[0], expected[0][:rows]), settings
            assert torch.equal(found[1], expected[1][:rows]), settings


@pytest.mark.gpu
def test_capture_and_replay(published):
    hidden, weight, scale = published
    rows = hidden[:7].clone()
    for _ in range(2):  # compiled before the capture
        int8_head_top(rows, weight, scale, count=16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = int8_head_top(rows, weight, scale, count=16)
    for first in (0, 7):
        rows.copy_(hidden[first : first + 7])
        graph.replay()
        expected = int8_head_top(rows, weight, scale, count=16)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.gpu
def test_offsets_are_64_bit():
    """More than 2^31 elements in the weight; its last row has the best logit."""
    vocab, width = (1 << 31) // 4096 + 5, 4096
    weight = torch.ones(vocab, width, dtype=torch.int8, device="cuda")
    scale = torch.ones(vocab, device="cuda")
    scale[-1] = 2.0
    ids, values = int8_head_top(torch.ones(1, width, device="cuda"), weight, scale, count=2, backend="triton")
    assert ids.tolist() == [[vocab - 1, 0]]
    torch.testing.assert_close(values.tolist(), [[8192.0, 4096.0]], rtol=1e-6, atol=0)
