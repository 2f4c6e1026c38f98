"""context_rows from its formula, one head of one row at a time; the kernels against it, and through `append`."""

import math

import pytest
import torch
from torch import nn

from dflash2 import DFlash2Config, DFlash2Drafter
from dflash2.append import append_rows_on_device
from dflash2.ops.context_rows import (
    ContextWeights,
    RowMap,
    context_features,
    context_rows,
    project_rows,
    store_features,
)
from dflash2.ops.int8_rows import quantize_rows
from dflash2.ops.launch import override
from dflash2.testing import NoHostReads, assert_kernel_close, cpu_as_device

NAN = float("nan")
#: L, taps width, H, nkv, hd: one and primes, heads that are no power of two, several spans of inputs, 512 wide.
SHAPES = [(1, 3, 5, 1, 2), (2, 14, 7, 3, 6), (2, 1100, 24, 2, 8), (3, 40, 32, 1, 40), (1, 256, 128, 1, 4)]
REAL = [(3, 2560, 512, 4, 64), (5, 25600, 5120, 8, 128), (5, 33280, 6656, 8, 128), (6, 20480, 2560, 4, 128)]


def make_weights(shape, dtype=torch.float32, device="cpu", *, bias=False, int8=False) -> ContextWeights:
    layers, taps, hidden, heads, head_dim = shape
    g = torch.Generator(device).manual_seed(hidden)

    def normal(*dims, scale=1.0):
        return (torch.randn(*dims, generator=g, device=device) * scale).to(dtype)

    def linear(out, inputs, biased):
        weight, scale = normal(out, inputs, scale=inputs**-0.5), None
        if int8:
            weight, scale = quantize_rows(weight)
        return RowMap(weight, scale, normal(out) if biased else None)

    width = heads * head_dim
    return ContextWeights(
        fc=linear(hidden, taps, False),
        hidden_norm=1 + normal(hidden, scale=0.3),
        keys=tuple(linear(width, hidden, bias) for _ in range(layers)),
        values=tuple(linear(width, hidden, bias) for _ in range(layers)),
        key_norms=tuple(1 + normal(head_dim, scale=0.3) for _ in range(layers)),
        eps=1e-6,
        frequencies=1.0 / 1e4 ** (torch.arange(head_dim // 2, dtype=torch.float32, device=device) * 2 / head_dim),
        rope_scale=1.25,
    )


def make_rows(shape, n, dtype=torch.float32, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator(device).manual_seed(n)
    taps = torch.randn(n, shape[1], generator=g, device=device).to(dtype)
    return taps, torch.arange(n, device=device) * 257 % 200_003


def formula(taps, positions, w: ContextWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp64 from the formula; the angles alone are fp32, as they are defined."""

    def dense(m):
        return m.weight.double() if m.scale is None else m.weight.double() * m.scale.double()[:, None]

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + w.eps).sqrt() * weight.double()

    features = norm(taps.double() @ dense(w.fc).T, w.hidden_norm)
    head_dim = w.key_norms[0].shape[0]
    half = head_dim // 2
    angle = (positions.float()[:, None] * w.frequencies).double()[:, None]
    keys, values = [], []
    for k_map, v_map, k_norm in zip(w.keys, w.values, w.key_norms, strict=True):
        k, v = (features @ dense(m).T + (0 if m.bias is None else m.bias.double()) for m in (k_map, v_map))
        k = norm(k.unflatten(-1, (-1, head_dim)), k_norm)
        turned = torch.polar(torch.full_like(angle, w.rope_scale), angle) * torch.complex(k[..., :half], k[..., half:])
        keys.append(torch.cat((turned.real, turned.imag), -1))
        values.append(v.unflatten(-1, (-1, head_dim)))
    return torch.stack(keys), torch.stack(values)


# -- the definition ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("int8", [False, True], ids=["dense", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_formula(shape, int8):
    w, (taps, positions) = make_weights(shape, bias=True, int8=int8), make_rows(shape, 9)
    for found, exact in zip(project_rows(taps, positions, w), formula(taps, positions, w), strict=True):
        # fp32 sums of K terms near 1, then a handful of roundings.
        torch.testing.assert_close(found.double(), exact, atol=1e-6 * math.sqrt(shape[1]), rtol=1e-5)


def test_rows_of_the_pool_are_written_and_no_others():
    shape = SHAPES[1]
    w, (taps, positions) = make_weights(shape), make_rows(shape, 3)
    keys, values = torch.full((2, 2, 8, 3, 6), NAN)
    context_rows(taps, positions, torch.tensor([6, 0, 3]), w, keys, values)
    for pool, expected in zip((keys, values), project_rows(taps, positions, w), strict=True):
        assert torch.equal(pool[:, [6, 0, 3]], expected)
        assert bool(pool[:, [1, 2, 4, 5, 7]].isnan().all())


def test_no_rows():
    shape = SHAPES[1]
    w, (taps, positions) = make_weights(shape), make_rows(shape, 0)
    assert [t.shape for t in project_rows(taps, positions, w)] == [(2, 0, 3, 6)] * 2


# -- the kernels -------------------------------------------------------------------------------------------------------


def hold_to_the_definition(shape, n, dtype, device, **kind):
    w, (taps, positions) = make_weights(shape, dtype, device, **kind), make_rows(shape, n, dtype, device)
    actual = project_rows(taps, positions, w, backend="triton")
    reference = project_rows(taps, positions, w, backend="torch")
    for found, expected, exact in zip(actual, reference, formula(taps, positions, w), strict=True):
        if kind.get("int8"):
            # The kernels take rows as 16-bit integers: 2^-16 of a group's largest value, in each of two products, which
            # a norm in between may magnify for rows that are nearly zero.
            scale = exact.abs().amax().clamp_min(1e-30) if exact.numel() else 1.0
            assert (((found.double() - exact) / scale).abs() < 2**-10 + 4 * torch.finfo(dtype).eps).all()
        else:
            assert_kernel_close(found, expected, exact, terms=shape[1])


def hold_to_the_same_bits(shape, n, splits, dtype, device, **kind):
    w, (taps, positions) = make_weights(shape, dtype, device, **kind), make_rows(shape, n, dtype, device)
    whole = project_rows(taps, positions, w, backend="triton")
    for split in splits:
        first = n - split if split < 64 else 0
        rows = slice(first, first + split)
        for part, expected in zip(project_rows(taps[rows], positions[rows], w, backend="triton"), whole, strict=True):
            assert torch.equal(part, expected[:, rows]), split


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # its interpreter multiplies no bfloat16
@pytest.mark.parametrize("kind", [{}, {"bias": True}, {"int8": True}, {"bias": True, "int8": True}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels(shape, kind, dtype, kernel_device):
    hold_to_the_definition(shape, 5, dtype, kernel_device, **kind)


@pytest.mark.triton
@pytest.mark.parametrize("n", [0, 1, 17])
def test_kernels_at_any_number_of_rows(n, kernel_device):
    hold_to_the_definition(SHAPES[1], n, torch.float32, kernel_device)


@pytest.mark.triton
def test_kernel_rows_do_not_depend_on_their_company(kernel_device):
    """Splits of a window of 32, and what surrounds it."""
    hold_to_the_same_bits((1, 1100, 7, 3, 6), 40, (1, 7, 16, 17, 31, 32, 33), torch.float32, kernel_device)


@pytest.mark.triton
@pytest.mark.parametrize("int8", [False, True], ids=["dense", "int8"])
def test_weights_that_are_asked_for_early_give_the_same_bits(int8, kernel_device):
    shape = (2, 256, 384, 2, 32)
    w = make_weights(shape, torch.float16, kernel_device, int8=int8)
    taps, positions = make_rows(shape, 5, torch.float16, kernel_device)
    features, rows, pools = context_features(taps, w, backend="triton"), torch.arange(5, device=kernel_device), []
    for settings in ({}, {"EARLY": 1}, {"EARLY": 1, "num_stages": 6}):
        pools.append(torch.zeros(2, 2, 5, 2, 32, dtype=torch.float16, device=kernel_device))
        with override("row_linear", settings):
            store_features(features, positions, rows, w, *pools[-1], settled=True, backend="triton")
    assert torch.equal(pools[0], pools[1])
    assert torch.equal(pools[0], pools[2])


@pytest.mark.triton
def test_kernels_write_their_rows_and_no_others(kernel_device):
    """NaN everywhere else, in memory and in the rows of others; taps that are columns of wider ones."""
    shape = SHAPES[1]
    w, (taps, positions) = make_weights(shape, device=kernel_device), make_rows(shape, 5, device=kernel_device)
    expected = project_rows(taps, positions, w, backend="triton")
    wide = torch.full((5, 40), NAN, device=kernel_device)
    wide[:, 8:22] = taps
    wide[1] = NAN
    keys, values = torch.full((2, 2, 8, 3, 6), NAN, device=kernel_device)
    rows = torch.tensor([6, 1, 0, 3, 7], device=kernel_device)
    context_rows(wide[:, 8:22], positions, rows, w, keys, values, backend="triton")
    for pool, right in zip((keys, values), expected, strict=True):
        assert torch.equal(pool[:, [6, 0, 3, 7]], right[:, [0, 2, 3, 4]])
        assert bool(pool[:, [1, 2, 4, 5]].isnan().all())


@pytest.mark.triton
def test_kernels_follow_weights_that_move(kernel_device):
    shape = SHAPES[1]
    w, (taps, positions) = make_weights(shape, device=kernel_device), make_rows(shape, 3, device=kernel_device)
    before = project_rows(taps, positions, w, backend="triton")
    w.values[1].weight.mul_(2.0)  # in place
    inside = project_rows(taps, positions, w, backend="triton")
    assert torch.equal(inside[1][1], 2 * before[1][1])
    moved = w.keys[0]._replace(weight=w.keys[0].weight.flip(0).contiguous())
    again = ContextWeights(**(vars(w) | {"keys": (moved, w.keys[1])}))
    found, expected = (project_rows(taps, positions, again, backend=b)[0] for b in ("triton", "torch"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.triton
def test_kernels_refuse_what_they_cannot_read(kernel_device):
    shape = SHAPES[1]
    w, (taps, positions) = make_weights(shape, device=kernel_device), make_rows(shape, 3, device=kernel_device)
    odd = torch.empty(18 * 7 + 1, device=kernel_device)[1:].view(18, 7)
    for bad, match in (
        (w.keys[0]._replace(weight=w.keys[0].weight.T.contiguous().T), "contiguous"),
        (w.keys[0]._replace(weight=odd.copy_(w.keys[0].weight)), "multiple of 16 bytes"),
        (w.keys[0]._replace(bias=torch.zeros(18, device=kernel_device)), "all with or without bias"),
    ):
        other = ContextWeights(**(vars(w) | {"keys": (bad, w.keys[1])}))
        with pytest.raises(ValueError, match=f"backend='triton' cannot run here: .*{match}"):
            project_rows(taps, positions, other, backend="triton")
        reference = project_rows(taps, positions, w, backend="torch")
        assert torch.equal(project_rows(taps, positions, other)[0], reference[0])  # auto


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [{}, {"bias": True}, {"int8": True}, {"bias": True, "int8": True}], ids=str)
@pytest.mark.parametrize("n", [1, 8, 300])
@pytest.mark.parametrize("shape", [*SHAPES, REAL[0]], ids=str)
def test_kernels_on_the_gpu(shape, n, kind, dtype):
    hold_to_the_definition(shape, n, dtype, "cuda", **kind)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("shape", REAL, ids=str)
@pytest.mark.parametrize("kind", [{}, {"int8": True}], ids=["dense", "int8"])
def test_kernel_rows_do_not_depend_on_their_company_on_the_gpu(shape, kind):
    """Row B10 on the shapes of production: W = 2048 and its neighbours, and all sizes of a decoding batch."""
    splits = (1, 7, 8, 16, 17, 32, 56, 64, 65, 128, 129, 256, 300, 2047, 2048, 2049)
    hold_to_the_same_bits(shape, 2100, splits, torch.bfloat16, "cuda", **kind)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("n", [8, 2080])
def test_kernels_at_the_production_shape(n):
    hold_to_the_definition(REAL[1], n, torch.bfloat16, "cuda")


# -- through append ----------------------------------------------------------------------------------------------------


def make_drafter(device, dtype=torch.float32) -> DFlash2Drafter:
    fields = {
        "architecture": "DFlash2DraftModel", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 37, "mask_token_id": 36,
        "target_layer_ids": (0, 2), "num_target_layers": 4, "rope_parameters": {"rope_theta": 1e4}, "block_size": 4,
        "layer_types": ("sliding_attention",) * 2, "sliding_window": 8, "conv_kernel_size": 2, "conv_group_size": 4,
        "selector_rank": 6, "selector_top_k": 5, "dtype": "float32",
    }  # fmt: skip
    drafter = DFlash2Drafter(DFlash2Config(**fields), device=device, dtype=dtype).requires_grad_(False)
    drafter.backend = "triton"
    g = torch.Generator(device).manual_seed(0)
    for linear in (m for m in drafter.modules() if isinstance(m, nn.Linear)):
        linear.weight.normal_(std=linear.in_features**-0.5, generator=g)
    return drafter


def append(drafter, kv, seqs, taps, starts, lengths, valid, on_device):
    """One append in the form asked for."""
    if not on_device:
        drafter.append(kv, seqs, taps, starts, lengths, valid)
        return
    kv.reserve(seqs, [s + n for s, n in zip(starts, lengths, strict=True)])
    integers = [torch.tensor(x, device=kv.device) for x in (starts, lengths, valid)]
    with cpu_as_device(), NoHostReads():
        drafter.append(kv, seqs, taps, *integers)


@pytest.mark.triton
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_append_by_kernels_is_append(on_device, kernel_device):
    """Ragged rounds with rejected suffixes, appends longer than the ring, an empty one."""
    drafter = make_drafter(kernel_device)
    kernels, modules = (drafter.new_kv(3, 512, 4) for _ in range(2))
    g = torch.Generator(kernel_device).manual_seed(1)
    at = [5, 0]
    a, b = ([kv.open(p) for p in at] for kv in (kernels, modules))
    for counts, rejected in (([3, 9], 0), ([1, 1], 1), ([18, 0], 0), ([2, 5], 3), ([0, 0], 0)):
        lengths = [n + rejected for n in counts]
        taps = torch.randn(sum(lengths), 32, generator=g, device=kernel_device)
        drafter.backend = "torch"
        append(drafter, modules, b, taps, at, lengths, counts, on_device)
        drafter.backend = "triton"
        append(drafter, kernels, a, taps, at, lengths, counts, on_device)
        at = [p + n for p, n in zip(at, counts, strict=True)]
        for x, y in zip(a, b, strict=True):
            assert kernels.spans(x) == modules.spans(y)
            left, right = kernels.export_state(x), modules.export_state(y)
            assert torch.equal(left.positions, right.positions)
            torch.testing.assert_close(left.keys, right.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(left.values, right.values, atol=1e-4, rtol=1e-4)
    assert kernels.faults.tolist() == [0, 0, 0]


@pytest.mark.triton
def test_append_by_kernels_stores_the_same_bits_in_any_form_and_split(kernel_device):
    drafter, states = make_drafter(kernel_device), []
    taps = torch.randn(23, 32, generator=torch.Generator(kernel_device).manual_seed(2), device=kernel_device)
    for on_device, step in ((False, 23), (True, 23), (False, 6), (True, 5), (False, 17)):
        kv = drafter.new_kv(1, 512, 4)
        seq = kv.open(3)
        for first in range(0, 23, step):
            n = min(step, 23 - first)
            append(drafter, kv, [seq], taps[first : first + n], [3 + first], [n], [n], on_device)
        states.append(kv.export_state(seq))
    for other in states[1:]:
        for name in ("positions", "keys", "values"):
            assert torch.equal(getattr(states[0], name), getattr(other, name)), name


@pytest.mark.triton
def test_a_misfit_by_kernels_changes_nothing_but_its_faults(kernel_device):
    drafter = make_drafter(kernel_device)
    kv = drafter.new_kv(2, 512, 4)
    seqs = [kv.open(), kv.open(20)]
    taps = torch.randn(4, 32, device=kernel_device)
    append(drafter, kv, seqs, taps, [0, 20], [2, 2], [2, 2], False)
    before = kv.export_state(seqs[0])
    kv.reserve(seqs, [9, 30])
    integers = [torch.tensor(x, device=kernel_device) for x in ([1, 22], [2, 2], [2, 2])]
    with cpu_as_device():
        drafter.append(kv, seqs, taps, *integers)
    after = kv.export_state(seqs[0])
    assert all(torch.equal(getattr(before, n), getattr(after, n)) for n in ("positions", "keys", "values"))
    assert kv.span(seqs[1]) == (20, 24)
    assert kv.faults[kv.slots(seqs)].tolist() == [1, 0]


@pytest.mark.triton
def test_with_a_store_the_kernels_publish_what_they_store(kernel_device):
    drafter = make_drafter(kernel_device)
    kv = drafter.new_kv(2, 512, 4, prefix_store_bytes=1 << 16)
    taps = torch.randn(30, 32, device=kernel_device)
    seq = kv.open()
    drafter.append(kv, [seq], taps, [0], [30], token_ids=list(range(30)))
    again = kv.open(28, list(range(28)))
    found, expected = kv.export_state(again), kv.export_state(seq)
    shared = [p for p in found.positions.tolist() if p in expected.positions.tolist()]
    assert len(shared) >= 8
    for name in ("keys", "values"):
        left, right = getattr(found, name), getattr(expected, name)
        i, j = ([s.positions.tolist().index(p) for p in shared] for s in (found, expected))
        assert torch.equal(left[:, i], right[:, j])


@pytest.mark.triton
def test_kernels_that_fail_before_the_first_write_change_nothing(monkeypatch, kernel_device):
    drafter = make_drafter(kernel_device)
    kv = drafter.new_kv(1, 512, 4)
    seq, taps = kv.open(), torch.randn(6, 32, device=kernel_device)
    append(drafter, kv, [seq], taps, [0], [6], [6], False)
    before, next_ = kv.export_state(seq), kv.next.clone()
    monkeypatch.setattr("dflash2.append.context_features", lambda *args, **kw: 1 / 0)
    for on_device in (False, True):
        with pytest.raises(ZeroDivisionError):
            append(drafter, kv, [seq], taps, [6], [6], [6], on_device)
    after = kv.export_state(seq)
    assert torch.equal(next_, kv.next)
    assert all(torch.equal(getattr(before, n), getattr(after, n)) for n in ("positions", "keys", "values"))


@pytest.mark.gpu
@pytest.mark.triton
def test_append_is_captured_and_replayed():
    """A CUDA graph over fixed memory: other rows, positions and lengths at every replay."""
    drafter = make_drafter("cuda", torch.bfloat16)
    eager, graphed = (drafter.new_kv(2, 512, 4) for _ in range(2))
    a, b = ([kv.open(), kv.open(9)] for kv in (eager, graphed))
    for kv, seqs in ((eager, a), (graphed, b)):
        kv.reserve(seqs, [100, 100])
    slots, taps = graphed.slots(b), torch.zeros(12, 32, dtype=torch.bfloat16, device="cuda")
    integers = [torch.tensor(x, device="cuda") for x in ([-7, -7], [6, 6], [0, 0])]  # fits nowhere
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        append_rows_on_device(drafter, graphed, slots, taps, *integers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        append_rows_on_device(drafter, graphed, slots, taps, *integers)
    at = [0, 9]
    for lengths, valid in (([6, 6], [6, 2]), ([4, 8], [1, 8]), ([12, 0], [12, 0])):
        new = torch.randn(12, 32, device="cuda").bfloat16()
        for tensor, value in zip((taps, *integers), (new, at, lengths, valid), strict=True):
            tensor.copy_(torch.as_tensor(value))
        graph.replay()
        graphed.advance_on_device(b)
        drafter.append(eager, a, new, *(torch.tensor(x, device="cuda") for x in (at, lengths, valid)))
        at = [p + v for p, v in zip(at, valid, strict=True)]
    for x, y in zip(a, b, strict=True):
        left, right = eager.export_state(x), graphed.export_state(y)
        assert all(torch.equal(getattr(left, n), getattr(right, n)) for n in ("positions", "keys", "values"))


def test_wrong_arguments_are_named():
    shape = SHAPES[1]
    w, (taps, positions) = make_weights(shape), make_rows(shape, 3)
    keys, values = torch.zeros(2, 2, 8, 3, 6)
    with pytest.raises(ValueError, match=r"taps \[3, 13\].*rows \[N, 14\]"):
        context_features(taps[:, 1:], w)
    with pytest.raises(ValueError, match=r"expected each int64 \[3\], one for each token"):
        context_rows(taps, positions[:2], positions, w, keys, values)
    with pytest.raises(ValueError, match=r"keys_out \[2, 8, 6, 3\].*expected contiguous \[2, P, 3, 6\]"):
        context_rows(taps, positions, positions, w, keys.transpose(2, 3), values)
    with pytest.raises(ValueError, match=r"values_out \[2, 7, 3, 6\].*expected contiguous \[2, P, 3, 6\]"):
        context_rows(taps, positions, positions, w, keys, values[:, 1:])
    with pytest.raises(ValueError, match="values_out .*float16"):
        context_rows(taps, positions, positions, w, keys, values.half())
    with pytest.raises(ValueError, match="several devices"):
        store_features(context_features(taps, w), positions.to("meta"), positions, w, keys, values)
