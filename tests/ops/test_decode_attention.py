"""decode_attention: a loop over rows, heads and positions decides; other slots and later positions are not touched."""

import math

import pytest
import torch

from dflash2.ops.decode_attention import HeadNorm, decode_attention
from dflash2.ops.launch import override

SHAPES = [(1, 1, 1, 16), (3, 3, 1, 64), (2, 1, 7, 24), (5, 2, 2, 8)]  # rows, key heads, group, head size
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def inputs(rows, kv_heads, group, head_dim, *, tokens=40, dtype=torch.float32, device="cpu", norm=False):
    generator = torch.Generator().manual_seed(rows + head_dim)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    qkv = randn(rows, (group + 2) * kv_heads * head_dim)
    keys, values = (randn(rows + 2, kv_heads, tokens, head_dim) for _ in range(2))
    slots = torch.randperm(rows + 2, generator=generator)[:rows].to(device)
    lengths = torch.tensor([0, 1, 17, 39, 16, 33, 5][:rows], device=device)
    angles = torch.rand(rows, head_dim // 2, generator=generator).to(device) * 6
    norms = HeadNorm(1 + 0.1 * randn(head_dim), 1 + 0.1 * randn(head_dim), 1e-5) if norm else None
    return (qkv, keys, values, slots, lengths, angles.cos(), angles.sin()), norms


def brute(qkv, keys, values, slots, lengths, cos, sin, norm):
    """Output, new keys and new values from one product at a time, in fp64."""
    keys, values = keys.double().clone(), values.double().clone()
    _, kv_heads, _, head_dim = keys.shape
    heads = qkv.double().unflatten(1, (-1, head_dim))
    queries = heads.shape[1] - 2 * kv_heads
    half, out = head_dim // 2, torch.zeros(len(qkv), queries, head_dim, dtype=torch.float64)

    def turned(x, row, weight):
        if weight is not None:
            x = x / math.sqrt(float((x * x).mean()) + norm.eps) * weight.double()
        c, s = cos[row].double(), sin[row].double()
        return torch.cat((x[:half] * c - x[half:] * s, x[half:] * c + x[:half] * s))

    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        for head in range(kv_heads):
            keys[slot, head, length] = turned(heads[row, queries + head], row, norm and norm.k)
            values[slot, head, length] = heads[row, queries + kv_heads + head]
        for head in range(queries):
            q = turned(heads[row, head], row, norm and norm.q)
            shared = head // (queries // kv_heads)
            weights = torch.stack([q @ keys[slot, shared, p] / math.sqrt(head_dim) for p in range(length + 1)])
            out[row, head] = weights.softmax(0) @ values[slot, shared, : length + 1]
    return out.flatten(1), keys, values


def tolerance(dtype):
    """Of values of about 1: roundings of the operands to dtype, of the weights and of the result, and fp32 sums."""
    return {"rtol": 0, "atol": max(8 * torch.finfo(dtype).eps, 2e-5)}


def assert_step(args, norm, backend):
    cpu = [a.cpu() for a in args]
    cpu_norm = norm and HeadNorm(norm.q.cpu(), norm.k.cpu(), norm.eps)
    expected, keys, values = brute(*cpu, cpu_norm)
    # What lies behind a row's length was never written.
    for slot, length in zip(cpu[3].tolist(), cpu[4].tolist(), strict=True):
        args[1][slot, :, length:] = math.nan
        args[2][slot, :, length:] = math.nan
        keys[slot, :, length + 1 :] = math.nan
        values[slot, :, length + 1 :] = math.nan
    out = decode_attention(*args, norm=norm, backend=backend)
    assert out.dtype == args[0].dtype
    for got, wanted in ((out, expected), (args[1], keys), (args[2], values)):
        torch.testing.assert_close(got.cpu().double(), wanted, equal_nan=True, **tolerance(args[0].dtype))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference(shape, norm):
    args, norms = inputs(*shape, norm=norm)
    assert_step(args, norms, "torch")


@pytest.mark.triton
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape, dtype, norm, kernel_device):
    args, norms = inputs(*shape, dtype=dtype, device=kernel_device, norm=norm)
    with override("decode_attention", {"TILE": 16}):
        assert_step(args, norms, "triton")


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.triton)])
def test_no_rows(backend, kernel_device):
    args, _ = inputs(1, 2, 2, 16, device=kernel_device)
    qkv, keys, values, slots, lengths, cos, sin = args
    out = decode_attention(qkv[:0], keys, values, slots[:0], lengths[:0], cos[:0], sin[:0], backend=backend)
    assert out.shape == (0, 64)


def test_what_does_not_fit_is_named():
    (qkv, *rest), _ = inputs(2, 2, 2, 8)
    with pytest.raises(ValueError, match=r"qkv \[2, 63\].*expected qkv \[R, \(nq \+ 2 nkv\) hd\]"):
        decode_attention(qkv[:, 1:], *rest)
    keys, values, slots, lengths, cos, sin = rest
    with pytest.raises(ValueError, match="contiguous keys"):
        decode_attention(qkv, keys[:, :, 1:], values[:, :, 1:], slots, lengths, cos, sin)
    with pytest.raises(ValueError, match=r"expected slots and lengths \[R\]"):
        decode_attention(qkv, keys, values, slots[:1], lengths, cos, sin)
    with pytest.raises(ValueError, match="keys torch.float16.*one floating-point dtype"):
        decode_attention(qkv, keys.half(), values, slots, lengths, cos, sin)
    with pytest.raises(ValueError, match="slots torch.int32.*int64"):
        decode_attention(qkv, keys, values, slots.int(), lengths, cos, sin)


def published(rows=257, tokens=1424):
    """SmolLM2's heads, on the GPU, at lengths from 0 to full."""
    torch.manual_seed(0)
    qkv = torch.randn(rows, 15 * 64, dtype=torch.bfloat16, device="cuda")
    keys, values = (torch.randn(rows + 1, 3, tokens, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    lengths = torch.linspace(0, tokens - 1, rows, device="cuda").long()
    angles = torch.rand(rows, 32, device="cuda") * 6
    return qkv, keys, values, torch.randperm(rows + 1, device="cuda")[:rows], lengths, angles.cos(), angles.sin()


@pytest.mark.gpu
def test_every_launch_setting_at_a_published_shape():
    from dflash2.kernels import decode_attention as kernel

    args = published()
    exact, keys, values = (a.cuda() for a in brute_by_rows(*args))
    for settings in kernel.CANDIDATES:
        with override("decode_attention", settings):
            out = decode_attention(*args, backend="triton")
        torch.testing.assert_close(out.double(), exact, **tolerance(torch.bfloat16))
        torch.testing.assert_close(args[1].double(), keys, **tolerance(torch.bfloat16))
        torch.testing.assert_close(args[2].double(), values, **tolerance(torch.bfloat16))


def brute_by_rows(qkv, keys, values, slots, lengths, cos, sin):
    """The reference in fp64, a row at a time."""
    qkv, keys, values = (a.double() for a in (qkv, keys, values))
    rows = zip(*(a.split(1) for a in (qkv, slots, lengths, cos, sin)), strict=True)
    out = [decode_attention(one, keys, values, *rest, backend="torch") for one, *rest in rows]
    return torch.cat(out), keys, values


@pytest.mark.gpu
def test_capture_and_replay():
    args = published(rows=33)
    lengths = args[4]
    decode_attention(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(*args)
    lengths.div_(2, rounding_mode="floor")
    graph.replay()
    assert torch.equal(out, decode_attention(*args))
