"""P9: every kind of head gives the same candidates; padding is never drafted; int8 rows do not depend on the batch."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Toy, tiny_config
from torch import Tensor, nn

from dflash2 import ConfigError, DFlash2Drafter, Int8LMHead
from dflash2.lm_head import DenseLMHead, OpaqueLMHead, as_lm_head
from dflash2.ops.top_candidates import top_candidates

V, H = 37, 16


def brute_force(row: list[float], count: int) -> list[int]:
    clean = [-math.inf if math.isnan(v) else v for v in row]
    return sorted(range(len(row)), key=lambda i: (-clean[i], i))[:count]


def hidden(rows: int = 5, width: int = H, seed: int = 1) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def weight(rows: int = V, seed: int = 0) -> Tensor:
    return torch.randn(rows, H, generator=torch.Generator().manual_seed(seed))


# -- top_candidates -------------------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 65504.0]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(SPECIAL) | st.floats(width=16), min_size=1, max_size=40),
    st.data(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_top_candidates_is_a_stable_sort(row, data, dtype):
    count = data.draw(st.integers(1, len(row)))
    logits = torch.tensor([row, row[::-1]]).to(dtype)
    ids, values = top_candidates(logits, count)
    assert ids.dtype == torch.int64
    assert values.dtype == torch.float32
    for given_row, found, at in zip(logits.float().tolist(), ids.tolist(), values.tolist(), strict=True):
        assert found == brute_force(given_row, count)
        assert at == [-math.inf if math.isnan(given_row[i]) else given_row[i] for i in found]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("count", [1, 2, 16, 257])
def test_equal_rows_take_the_lowest_ids(value, count):
    """B155, B156: a row of nothing but NaN gives ids in range, never V."""
    ids, _ = top_candidates(torch.full((2, 3, 257), value), count)
    assert ids.tolist() == [[list(range(count))] * 3] * 2


def test_top_candidates_of_a_wide_vocabulary():
    logits = torch.randn(3, 248_320).bfloat16()  # many equal values
    ids, _ = top_candidates(logits, 16)
    for row, found in zip(logits.float().tolist(), ids.tolist(), strict=True):
        assert found == brute_force(row, 16)


# -- kinds of heads -------------------------------------------------------------------------------------------------


class Gemma(nn.Embedding):
    """A table whose module scales what it looks up."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 100


class Packed:
    """No weight, only a way to apply it."""

    def __init__(self, w: Tensor, padding: int = 0):
        self.w = torch.cat((w, torch.full((padding, w.shape[1]), 1e3)))

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.w.T


def linear(w: Tensor, bias: Tensor | None = None) -> nn.Linear:
    module = nn.Linear(w.shape[1], w.shape[0], bias=bias is not None)
    module.weight = nn.Parameter(w.clone())
    if bias is not None:
        module.bias = nn.Parameter(bias.clone())
    return module


def embedding(w: Tensor, kind: type[nn.Embedding] = nn.Embedding) -> nn.Embedding:
    module = kind(*w.shape)
    module.weight = nn.Parameter(w.clone())
    return module


KINDS = {
    "weight": lambda w: w,
    "parameter": nn.Parameter,
    "linear": linear,
    "tied embedding (B127)": embedding,
    "tied scaled embedding": lambda w: embedding(w, Gemma),
    "callable (B124, B125)": Packed,
    "wrapped linear": lambda w: nn.Sequential(linear(w)),
    "padded callable": lambda w: Packed(w, 27),
    "padded weight": lambda w: torch.cat((w, torch.full((27, H), 1e3))),
    "padded linear": lambda w: linear(torch.cat((w, torch.full((27, H), -1e3)))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 5, V])
def test_kinds_agree(kind, count):
    w, x = weight(), hidden()
    with torch.no_grad():
        ids, values = as_lm_head(KINDS[kind](w)).top(x, V, count)
    dense = x @ w.T
    torch.testing.assert_close(values, dense.gather(1, ids))
    assert ids.tolist() == [brute_force(row, count) for row in dense.tolist()]
    assert int(ids.max()) < V


def test_bias_counts():
    bias = torch.zeros(V + 3)
    bias[11], bias[V] = 1e3, 1e6
    head = as_lm_head(linear(weight(V + 3), bias))
    ids, _ = head.top(hidden(), V, 1)
    assert ids.flatten().tolist() == [11] * 5
    int8 = Int8LMHead.from_linear(linear(weight(V + 3), bias))
    assert int8.top(hidden(), V, 1)[0].flatten().tolist() == [11] * 5
    torch.testing.assert_close(int8.logits(hidden(), V)[:, 11], head.logits(hidden(), V)[:, 11], rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_in_the_weights_dtype(dtype):
    w, x = weight().to(dtype), hidden().to(dtype)
    assert as_lm_head(w).logits(x, V).dtype == dtype
    assert as_lm_head(w.float()).logits(x, V).dtype == torch.float32


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 17])
def test_dense_product_of_few_and_many_rows(rows):
    """Either order of the factors: sums of 16 products of fp32, against fp64."""
    weight, hidden = torch.randn(50, 16), torch.randn(rows, 16)
    logits = as_lm_head(weight).logits(hidden, 47)
    assert logits.shape == (rows, 47)
    assert logits.is_contiguous()
    exact, sizes = hidden.double() @ weight[:47].double().T, hidden.abs().double() @ weight[:47].abs().double().T
    assert bool(((logits - exact).abs() <= 16 * torch.finfo(torch.float32).eps * sizes).all())


@pytest.mark.parametrize(
    "zero", [lambda: torch.zeros(V, H), lambda: linear(torch.zeros(V, H)), lambda: embedding(torch.zeros(V, H))]
)
def test_zero_head_is_refused(zero):
    """B129: a head that was never loaded."""
    drafter = DFlash2Drafter(tiny_config())
    with pytest.raises(ConfigError, match=r"all zeros.*never loaded"):
        drafter.bind_target(weight(), zero())
    assert not drafter.is_bound
    with pytest.raises(ConfigError, match="all zeros"):
        Int8LMHead.from_linear(linear(torch.zeros(V, H)))


def test_not_a_head():
    with pytest.raises(ConfigError, match="lm_head is a str: expected a weight, a module or a callable"):
        as_lm_head("lm_head.weight")


def test_an_opaque_head_of_another_target():
    head = OpaqueLMHead(Packed(weight(V - 1)))
    with pytest.raises(ConfigError, match=r"\[5, 36\].*vocab_size=37"):
        head.top(hidden(), V, 3)
    with pytest.raises(ConfigError, match="another target"):
        OpaqueLMHead(lambda x: x.flatten()).logits(hidden(), 3)


# -- binding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [V, V + 1, V + 27, V + 1023])
def test_padding_is_tolerated(rows):
    """B138."""
    DFlash2Drafter(tiny_config()).bind_target(weight(rows), weight(rows)).bind_target(weight(), weight(rows))


@pytest.mark.parametrize("shape", [(V - 1, H), (V + 1024, H), (V, H + 1), (V, H, 1), (V * H,)])
@pytest.mark.parametrize("which", ["embed_weight", "lm_head"])
def test_other_shapes_are_refused(shape, which):
    drafter = DFlash2Drafter(tiny_config())
    tables = {"embed_weight": weight(), "lm_head": weight()} | {which: torch.ones(shape)}
    with pytest.raises(ConfigError, match=f"{which} has shape.*{V}, {H}.*another target"):
        drafter.bind_target(**tables)
    assert not drafter.is_bound


@pytest.mark.parametrize("which", ["embed_weight", "lm_head"])
def test_other_device_is_refused(which):
    tables = {"embed_weight": weight(), "lm_head": weight()} | {which: torch.ones(V, H, device="meta")}
    with pytest.raises(ConfigError, match=f"{which} is on meta and the drafter on cpu"):
        DFlash2Drafter(tiny_config()).bind_target(**tables)


def test_failed_binding_keeps_the_old_one():
    drafter = DFlash2Drafter(tiny_config()).bind_target(weight(), weight())
    head = drafter._head[0]
    with pytest.raises(ConfigError):
        drafter.bind_target(weight(), weight(V - 1))
    assert drafter._head[0] is head


def test_bound_tables_are_shared_and_not_saved():
    table, head = embedding(weight()), linear(weight(seed=1))
    drafter = DFlash2Drafter(tiny_config()).bind_target(table, head)
    assert drafter._embedding[0] is table.weight
    assert drafter._head[0].weight is head.weight
    assert not {id(p) for p in drafter.parameters()} & {id(table.weight), id(head.weight)}
    assert not [name for name in drafter.state_dict() if "embed" in name or "head" in name]


def test_unbound_drafter_says_so():
    drafter = DFlash2Drafter(tiny_config())
    kv = drafter.new_kv(1)
    with pytest.raises(ConfigError, match="bind_target"):
        drafter.propose(kv, [kv.open()], [1], [0])


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_raw_embedding_rows(scale):
    """B132: the target's embedding scales or norms what it looks up; the drafter reads the rows themselves."""
    table = embedding(weight(), Gemma)
    drafter = DFlash2Drafter(tiny_config(input_embedding_scale=scale)).bind_target(table, table)
    rows = drafter.embed(torch.tensor([4]), 3)
    assert torch.equal(rows[0], table.weight[[4, 36, 36, 36]] * scale)


# -- through the drafter --------------------------------------------------------------------------------------------


def proposal(toy: Toy, n: int = 9, **kw):
    kv = toy.drafter.new_kv(1)
    seq = kv.open()
    toy.append(kv, seq, 0, n)
    return toy.hidden(lambda: toy.drafter.propose(kv, [seq], [3], [n], **kw))


HEADS = {
    "weight": lambda w: w,
    "linear": linear,
    "tied": embedding,
    "callable": lambda w: lambda x: x @ w.T,
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("changes", [{}, {"architecture": "DFlashDraftModel"}], ids=["v2", "v1"])
def test_padded_ids_are_never_drafted(kind, changes):
    toy = Toy(tiny_config(**changes), padded_rows=27)  # a hundred times larger than the real ones
    reference, _ = proposal(toy)
    toy.drafter.bind_target(toy.embed, HEADS[kind](toy.head))
    for temperature in (0.0, 5.0):
        with torch.no_grad():
            prop, _ = proposal(toy, temperature=temperature)
        assert int(prop.tokens.max()) < V
        if prop.candidates is not None:
            assert int(prop.candidates.max()) < V
        if prop.q is not None:
            assert prop.q.shape[-1] == (5 if prop.candidates is not None else V)
        if temperature == 0:
            assert torch.equal(prop.tokens, reference.tokens)


@pytest.mark.parametrize(("multiplier", "cap"), [(1.0, None), (0.2, None), (1.0, 3.0), (0.2, 3.0), (0.2, 0.5)])
def test_multiplier_then_softcap(multiplier, cap):
    """SPEC 2.6: on the survivors it must give what the whole row of logits gives."""
    toy = Toy(tiny_config(output_multiplier=multiplier, final_logit_softcapping=cap))
    toy.drafter.candidate_selector.successor_codebook.zero_()  # pair scores 0: q is the unary alone
    prop, z = proposal(toy, temperature=1.0)
    logits = z[0, 1:].double() @ toy.head[:V].double().T
    assert prop.candidates[0].tolist() == [brute_force(row, 5) for row in logits.tolist()]
    logits = logits * multiplier
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    q = torch.softmax(logits.gather(1, prop.candidates[0]), -1)
    torch.testing.assert_close(prop.q[0].double(), q, rtol=1e-5, atol=1e-6)


def test_nan_hidden_rows_are_flagged_and_in_range():
    """B155, B156."""
    toy = Toy(tiny_config())
    toy.drafter.norm.weight[3] = math.nan
    for temperature in (0.0, 1.0):
        prop, _ = proposal(toy, temperature=temperature)
        assert prop.valid.tolist() == [False]
        assert int(prop.tokens.min()) >= 0
        assert int(prop.tokens.max()) < V
        assert prop.q is None or bool(prop.q.isfinite().all())


# -- int8 -----------------------------------------------------------------------------------------------------------


def test_int8_error_bound():
    """Symmetric rounding: each weight is off by at most half a step, so a logit by that times the 1-norm of x."""
    w, x = weight(500), hidden(9)
    w[7] = 0  # a row of zeros has no scale to divide by
    w[8] *= 1e-6
    w[9, 0] = 1e4
    head = Int8LMHead.from_linear(linear(w))
    assert head.weight.dtype == torch.int8
    assert head.scale.dtype == torch.float32
    assert int(head.weight.abs().max()) <= 127, "symmetric: -128 is not used"
    exact = x.double() @ w.double().T
    bound = 0.5 * (w.abs().amax(1) / 127).double() * x.double().abs().sum(1, keepdim=True)
    error = (head.logits(x, 500).double() - exact).abs()
    assert bool((error <= bound * 1.001 + 1e-6 * exact.abs()).all())
    assert bool((head.logits(x, 500)[:, 7] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [V, 2**20 // 64 + 13])
def test_int8_rows_do_not_depend_on_the_batch(dtype, vocab):
    """B133: bit-equal for any number of rows."""
    width = 64
    w = torch.randn(vocab, width, generator=torch.Generator().manual_seed(3))
    head = Int8LMHead.from_linear(linear(w))
    x = hidden(64, width).to(dtype)
    whole = head.logits(x, vocab)
    assert whole.dtype == torch.float32
    assert torch.equal(head(x), whole.to(dtype))
    for rows in (1, 2, 7, 8, 56, 64):
        for i in (0, 64 - rows):
            assert torch.equal(head.logits(x[i : i + rows], vocab), whole[i : i + rows]), rows
            ids, values = head.top(x[i : i + rows], vocab, 5)
            assert torch.equal(values, whole[i : i + rows].gather(1, ids))


def test_int8_of_16_bit_weights():
    w = weight(100).bfloat16()
    head = Int8LMHead.from_linear(linear(w))
    step = w.float().abs().amax(1) / 127
    assert bool(((head.weight.float() * head.scale[:, None] - w.float()).abs() <= 0.5001 * step[:, None]).all())


def test_int8_takes_the_heads_place():
    module = linear(weight(), torch.randn(V)).bfloat16()
    head = Int8LMHead.from_linear(module)
    x = torch.randn(2, 3, H).bfloat16()
    assert head(x).shape == (2, 3, V)
    assert head(x).dtype == torch.bfloat16
    torch.testing.assert_close(head(x), module(x), rtol=0.05, atol=0.2)
    assert not list(head.parameters())


def test_int8_drafts():
    toy = Toy(tiny_config())
    toy.drafter.bind_target(toy.embed, Int8LMHead.from_linear(linear(toy.head)))
    prop, z = proposal(toy)
    logits = toy.drafter._head[0].logits(z[0, 1:], V)
    assert prop.candidates[0].tolist() == [brute_force(row, 5) for row in logits.tolist()]
    with pytest.raises(ConfigError, match="lm_head has shape"):
        toy.drafter.bind_target(toy.embed, Int8LMHead.from_linear(linear(weight(V - 1))))


def test_free_source(caplog):
    module = linear(weight(), torch.randn(V))
    memory = weakref.ref(module.weight)
    caplog.set_level("INFO", logger="dflash2")
    head = Int8LMHead.from_linear(module, free_source=True)
    gc.collect()
    assert head.freed_bytes == 4 * V * H
    assert "float32 freed" in caplog.text
    assert str(head) == f"Int8LMHead({V} x {H}, {V * H + 4 * V} bytes, {4 * V * H:,} freed)"
    assert memory() is None, "the 16-bit weight is gone"
    assert module.weight.numel() == 0
    assert head.logits(hidden(), V).shape == (5, V)


def test_not_freed_by_default():
    module = linear(weight())
    head = Int8LMHead.from_linear(module)
    assert torch.equal(module.weight, weight())
    assert head.freed_bytes == 0
    assert "freed" not in str(head)


def test_target_and_drafter_read_one_int8_weight():
    target = nn.ModuleDict({"lm_head": linear(weight())})
    target["lm_head"] = Int8LMHead.from_linear(target["lm_head"], free_source=True)
    drafter = DFlash2Drafter(tiny_config()).bind_target(weight(), target["lm_head"])
    assert drafter._head[0] is target["lm_head"]
    x = hidden()
    ids, values = drafter._head[0].top(x, V, 3)
    assert torch.equal(values, target["lm_head"](x).gather(1, ids))


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_memory_before_and_after(bias):
    """The 16-bit copy is gone, the integers and scales are there, and what target and drafter hold is counted once."""
    vocab, width = 100_003, 1024
    gc.collect()  # else what earlier tests left goes in the middle of the count
    empty = torch.cuda.memory_allocated()
    target = nn.ModuleDict({"lm_head": nn.Linear(width, vocab, bias, device="cuda", dtype=torch.bfloat16)})
    before = torch.cuda.memory_allocated()
    x = torch.randn(7, width, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        dense = target["lm_head"](x)
    free = torch.cuda.memory_allocated() - before
    target["lm_head"] = Int8LMHead.from_linear(target["lm_head"], free_source=True)
    config = tiny_config(hidden_size=width, vocab_size=vocab)
    drafter = DFlash2Drafter(config).to("cuda", torch.bfloat16)
    own = torch.cuda.memory_allocated()
    table = torch.ones(vocab, width, device="cuda", dtype=torch.bfloat16)
    drafter.bind_target(table, target["lm_head"])
    table_bytes = 2 * vocab * width
    slack = 1 << 20  # the allocator's rounding, what other tests left, and the small tensors of the drafter
    kept = vocab * width + 4 * vocab + (2 * vocab if bias else 0)
    drafter_bytes = sum(t.untyped_storage().nbytes() for t in (*drafter.parameters(), *drafter.buffers()))
    assert abs(before - empty - (2 * vocab * width + (2 * vocab if bias else 0))) < slack
    assert abs(own - empty - free - kept - drafter_bytes) < slack + 512 * len(list(drafter.parameters()))
    assert torch.cuda.memory_allocated() - own == pytest.approx(table_bytes, abs=slack)
    assert target["lm_head"].freed_bytes == 2 * vocab * width
    ids, values = drafter._head[0].top(x, vocab, 16)
    assert torch.equal(values, target["lm_head"].logits(x, vocab).gather(1, ids))
    assert (values[:, :1] - dense.float().amax(1, keepdim=True)).abs().max() < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dense_head_on_a_gpu(dtype):
    w, x = weight(V + 27).to("cuda", dtype), hidden().to("cuda", dtype)
    w[V:] *= 1000
    bias = torch.zeros(V + 27, device="cuda", dtype=dtype)
    bias[11], bias[V] = 100, 10_000
    ids, values = DenseLMHead(w, bias).top(x, V, 5)
    exact = x.double() @ w[:V].double().T + bias[:V].double()
    torch.testing.assert_close(values.double(), exact.gather(1, ids), rtol=1e-4, atol=1e-4)
    assert ids.tolist() == [brute_force(row, 5) for row in exact.tolist()]


def tied_module():
    head, table = linear(weight()), nn.Embedding(V, H)
    table.weight = head.weight
    return head, table


def tied_memory():
    head, table = linear(weight()), nn.Embedding(V, H)
    table.weight = nn.Parameter(head.weight.data)
    return head, table


def bound_drafter():
    head = linear(weight())
    return head, DFlash2Drafter(tiny_config()).bind_target(weight(), head)


def bound_embedding():
    head = linear(weight())
    return head, DFlash2Drafter(tiny_config()).bind_target(head.weight, weight())


def bias_in_the_same_memory():
    memory = torch.randn(V * H + V)
    head = nn.Linear(H, V)
    head.weight, head.bias = nn.Parameter(memory[: V * H].view(V, H)), nn.Parameter(memory[V * H :])
    head.weight.data.copy_(weight())
    return head, None


def closure():
    weight_of = (head := linear(weight())).weight
    return head, lambda x: x @ weight_of.T


@pytest.mark.parametrize(
    "make", [tied_module, tied_memory, bound_drafter, bound_embedding, bias_in_the_same_memory, closure]
)
def test_free_source_refuses_what_others_read(make):
    head, _other = make()
    with pytest.raises(ConfigError, match=r"free_source=True.*free_source=False"):
        Int8LMHead.from_linear(head, free_source=True)
    assert torch.equal(head.weight, weight())


def test_free_source_in_a_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    shape["num_attention_heads"] = 4
    tied = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
    with pytest.raises(ConfigError, match="a tied embedding"):
        Int8LMHead.from_linear(tied.lm_head, free_source=True)
    own = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).eval()
    ids = torch.arange(9)[None]
    before = own(ids).logits
    own.set_output_embeddings(Int8LMHead.from_linear(own.lm_head, free_source=True))
    torch.testing.assert_close(own(ids).logits, before, rtol=0, atol=0.05 * float(before.detach().abs().max()))


def test_dense_head_keeps_the_weight():
    w = weight()
    assert DenseLMHead(w).weight is w
