"""A drafter with int8 linears: close to its dequantised self, as reproducible as in 16 bits, refused when it is not."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tiny import FULL, SLIDING, Toy, tiny_config
from torch import nn

import dflash2
from dflash2 import ConfigError, DFlash2Drafter, int8_linear
from dflash2.int8_linear import Int8Linear, has_int8_linears

LARGE = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "kernel_projection", "fc"}
CONFIGS = {
    "v2": {},
    "v1": {"architecture": "DFlashDraftModel", "layer_types": (FULL, SLIDING)},
    "biased": {"attention_bias": True, "hidden_size": 24, "intermediate_size": 48},
}


def dequantised(toy: Toy) -> Toy:
    """The same drafter with every large weight on its int8 grid, in floating point."""
    twin = copy.copy(toy)
    twin.drafter = copy.deepcopy(toy.drafter)
    for name, module in twin.drafter.named_modules():
        if name.rpartition(".")[2] in LARGE:
            step = module.weight.data.double().abs().amax(1, keepdim=True) / 127
            module.weight.data = (step * (module.weight.data.double() / step).round()).to(module.weight.dtype)
    return twin


def drafted(toy: Toy, temperature: float = 0.0) -> tuple:
    kv = toy.drafter.new_kv(2, 64, 4)
    seq = kv.open()
    toy.append(kv, seq, 0, 20)
    generator = torch.Generator().manual_seed(3)
    call = lambda: toy.drafter.propose(kv, [seq], [3], [20], temperature=temperature, generator=generator)  # noqa: E731
    prop, hidden = toy.hidden(call)
    state = kv.export_state(seq)
    return prop, hidden, state.keys, state.values


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_it_computes_what_its_dequantised_weights_say(changes):
    """Row B150. Two fp32 drafters over the same numbers part by the order of sums only."""
    toy = Toy(tiny_config(**changes))
    expected, reference, keys, values = drafted(dequantised(toy))
    assert toy.drafter.quantize_linears() is toy.drafter
    prop, hidden, *rows = drafted(toy)
    for got, exact in ((hidden, reference), (rows[0], keys), (rows[1], values)):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)
    assert torch.equal(prop.tokens, expected.tokens)
    assert bool(prop.valid.all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_rows_bits_do_not_depend_on_the_split(dtype):
    """P2, as in 16 bits."""
    toy = Toy(tiny_config(attention_bias=True, sliding_window=64), dtype=dtype)
    toy.drafter.quantize_linears()
    taps, positions = toy.taps(0, 70), torch.arange(70)
    keys, values = toy.drafter.context_rows(taps, positions)
    assert keys.dtype == values.dtype == dtype
    for step in (1, 7, 16, 33):
        parts = [toy.drafter.context_rows(t, p) for t, p in zip(taps.split(step), positions.split(step), strict=True)]
        assert torch.equal(torch.cat([k for k, _ in parts], 1), keys)
        assert torch.equal(torch.cat([v for _, v in parts], 1), values)


def test_what_becomes_int8_and_what_does_not():
    toy = Toy(tiny_config(attention_bias=True), dtype=torch.bfloat16)
    before = dict(toy.drafter.named_modules())
    toy.drafter.quantize_linears()
    for name, module in toy.drafter.named_modules():
        if name.rpartition(".")[2] in LARGE:
            assert isinstance(module, Int8Linear), name
            assert (module.weight.dtype, module.scale.dtype) == (torch.int8, torch.float32)
            assert module.weight.shape == before[name].weight.shape
            assert f"in_features={module.weight.shape[1]}" in repr(module)
        else:
            assert module is before[name]
    assert type(toy.drafter.candidate_selector.hidden_projection) is nn.Linear
    assert {p.dtype for p in toy.drafter.parameters()} == {torch.bfloat16}
    assert (toy.drafter.dtype, toy.drafter.device.type) == (torch.bfloat16, "cpu")
    assert toy.drafter.new_kv(1, 16).keys.dtype == torch.bfloat16
    assert has_int8_linears(toy.drafter)


def test_again_changes_nothing():
    toy = Toy(tiny_config())
    toy.drafter.quantize_linears()
    before = dict(toy.drafter.named_modules())
    toy.drafter.quantize_linears()
    assert dict(toy.drafter.named_modules()) == before


def test_a_cast_leaves_the_numbers_alone():
    toy = Toy(tiny_config(attention_bias=True))
    toy.drafter.quantize_linears()
    fc, q = toy.drafter.fc, toy.drafter.layers[0].self_attn.q_proj
    weight, scale = fc.weight.clone(), fc.scale.clone()
    for cast in (lambda d: d.to(torch.bfloat16), lambda d: d.half(), lambda d: d.float()):
        cast(toy.drafter)
        assert torch.equal(fc.weight, weight)
        assert torch.equal(fc.scale, scale)
        assert q.bias.dtype == toy.drafter.dtype
    toy.drafter.to("meta")
    assert fc.scale.device.type == toy.drafter.device.type == "meta"


def test_copies_and_pickles():
    toy = Toy(tiny_config())
    toy.drafter.quantize_linears()
    expected = drafted(toy)[1]
    for twin in (copy.deepcopy(toy.drafter), pickle.loads(pickle.dumps(toy.drafter))):
        other = copy.copy(toy)
        other.drafter = twin.bind_target(toy.embed, toy.head)
        assert torch.equal(drafted(other)[1], expected)


def test_it_is_not_saved(tmp_path):
    toy = Toy(tiny_config())
    toy.drafter.save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=r"linears are int8 and published checkpoints are 16-bit: save it before"):
        toy.drafter.quantize_linears().save_pretrained(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert not has_int8_linears(DFlash2Drafter.from_pretrained(tmp_path))


def test_a_fresh_drafter_whose_projections_are_zero():
    """kernel_projection starts at zero: rows of scale 0, and still the identity."""
    made = DFlash2Drafter(tiny_config()).quantize_linears()
    assert not made.layers[0].attention_conv.kernel_projection.scale.any()


def layers(drafter: DFlash2Drafter) -> list[str]:
    return [name for name, m in drafter.named_modules() if isinstance(m, nn.Linear | Int8Linear)]


def refused(toy: Toy, match: str) -> None:
    """It raises, and every linear is what it was."""
    before = dict(toy.drafter.named_modules())
    with pytest.raises(ConfigError, match=match):
        toy.drafter.quantize_linears()
    assert dict(toy.drafter.named_modules()) == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damaged_weights_are_refused(bad):
    toy = Toy(tiny_config())
    toy.drafter.layers[1].mlp.down_proj.weight.data[3, 5] = bad
    refused(toy, r"layers\.1\.mlp\.down_proj cannot be int8: the weight holds NaN or infinity")


def test_weights_that_one_scale_cannot_hold_are_refused():
    """A weight of 300 beside 9999 of about 1 has a step of 2.4: their roundings come to a quarter of the output."""
    linear = nn.Linear(10_000, 3, bias=False).requires_grad_(False)
    linear.weight.normal_(generator=torch.Generator().manual_seed(0))
    int8_linear._check(linear, Int8Linear.from_linear(linear))
    linear.weight[:, 0] = 300
    with pytest.raises(ConfigError, match=r"outputs would change by \d+%, the limit is 10%.*keep this drafter in 16"):
        int8_linear._check(linear, Int8Linear.from_linear(linear))


@pytest.mark.parametrize("fault", ["scale", "order", "nan", "offset"])
def test_a_product_that_is_wrong_is_refused(fault, monkeypatch):
    """Rows B150, B151: whatever a kernel gets wrong shows before the first draft, with the layer's name."""
    right = int8_linear.int8_linear

    def wrong(x, weight, scale, bias):
        y = right(x, weight, scale, bias)
        return {"scale": 1.2 * y, "order": y.flip(-1), "nan": y.where(y < 1, float("nan")), "offset": y + 1}[fault]

    monkeypatch.setattr(int8_linear, "int8_linear", wrong)
    refused(Toy(tiny_config()), r"^fc cannot be int8: its product differs from the 16-bit one by up to .* kernel is at")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activation_dtypes_agree(dtype):
    """Row B151: 16-bit activations cost their own rounding and no more."""
    exact = Toy(tiny_config(), dtype=torch.float64)
    toy = Toy(tiny_config(), dtype=dtype)
    for p, q in zip(exact.drafter.parameters(), toy.drafter.parameters(), strict=True):
        p.data.copy_(q.data)
    dense = drafted(toy)[2].double() - drafted(exact)[2]
    exact.drafter.quantize_linears()
    toy.drafter.quantize_linears()
    error = (drafted(toy)[2].double() - drafted(exact)[2]).abs().max()
    assert error <= 2 * dense.abs().max()


def test_generated_text_is_the_targets_own():
    from test_generate import drafter, prompt, reference, target

    made = drafter().quantize_linears()
    out = dflash2.generate(target(), made, prompt(0, 9)[None], max_new_tokens=48)
    assert tuple(out.sequences[0, 9:].tolist()) == reference("llama", 0, 9)


@pytest.mark.gpu
def test_memory_and_rows_on_the_gpu():
    """Half the bytes of the linears are free again, and rows do not depend on the split."""
    config = tiny_config(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, head_dim=128)
    drafter = DFlash2Drafter(config, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    large = sum(m.weight.numel() for n, m in drafter.named_modules() if n.rpartition(".")[2] in LARGE)
    x, positions = torch.randn(40, 2048, device="cuda", dtype=torch.bfloat16), torch.arange(40, device="cuda")
    drafter.context_rows(x, positions)  # cuBLAS keeps its workspace: one for 16 bits, one for fp32
    copy.deepcopy(drafter).quantize_linears().context_rows(x, positions)
    before = torch.cuda.memory_allocated()
    drafter.quantize_linears()
    freed = before - torch.cuda.memory_allocated()
    assert 0.98 * large <= freed <= large
    keys, values = drafter.context_rows(x, positions)
    parts = [drafter.context_rows(t, p) for t, p in zip(x.split(7), positions.split(7), strict=True)]
    assert torch.equal(torch.cat([k for k, _ in parts], 1), keys)
    assert torch.equal(torch.cat([v for _, v in parts], 1), values)
