"""P7: every field at the top level, nested, in both, missing and zero; what is published; what is refused, and how."""

from __future__ import annotations

import copy
import json
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2 import CheckpointError, ConfigError, DFlash2Config
from dflash2.config import default_target_layer_ids
from dflash2.rope import RotaryTable, inverse_frequencies

S, F = "sliding_attention", "full_attention"


def published(hidden, inner, eps, theta, positions, vocab, layers, method) -> dict:
    """SPEC 1.2: what the two published v2 files share."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "is_causal": False,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_types": [S] * 5,
        "sliding_window": 2048,
        "use_sliding_window": True,
        "max_window_layers": 5,
        "rms_norm_eps": eps,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "max_position_embeddings": positions,
        "vocab_size": vocab,
        "num_target_layers": layers,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dflash_config": {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
            **method,
        },
    }


QWEN = published(
    5120, 17408, 1e-6, 1e7, 262144, 248320, 64,
    {"block_size": 8, "mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61]},
)  # fmt: skip
MUSE = published(
    6656, 19968, 1e-5, 5e5, 131072, 202048, 52,
    {
        "block_size": 16, "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49],
        "output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20.0,
    },
)  # fmt: skip


def changed(file: dict, changes: dict) -> dict:
    """``d_NAME`` is a field of ``dflash_config``; None removes it."""
    for name, value in changes.items():
        place, name = (file["dflash_config"], name[2:]) if name.startswith("d_") else (file, name)
        if value is None:
            place.pop(name, None)
        else:
            place[name] = value
    return file


def raw(**changes) -> dict:
    """A small valid v2 file; None removes a field. ``d_name`` changes ``dflash_config``."""
    file = copy.deepcopy(QWEN)
    file |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "layer_types": [S, S]}
    file |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 100,
        "max_window_layers": 2,
    }
    file |= {"num_target_layers": 8}
    file["dflash_config"] |= {"mask_token_id": 7, "target_layer_ids": [1, 5], "selector_rank": 4, "selector_top_k": 4}
    return changed(file, changes)


def v1(**changes) -> dict:
    file = raw(architectures=["DFlashDraftModel"], is_causal=None)
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        del file["dflash_config"][name]
    return changed(file, changes)


def read(file: dict) -> DFlash2Config:
    before = copy.deepcopy(file)
    config = DFlash2Config.from_pretrained(file)
    assert file == before, "reading changed the caller's dictionary"
    return config


def refused(file: dict, *words: str) -> str:
    """The message names field, value, rule and remedy: all of ``words``, and an imperative sentence at its end."""
    with pytest.raises(ConfigError) as e:
        read(file)
    message = str(e.value)
    for word in words:
        assert word in message, (word, message)
    assert re.search(
        r"(?:^|[.:] )(?:Set|Use|Copy|Correct|Remove|Add|Complete|Name|Check|List|Layer id|Absent|0 or|Known)", message
    )
    assert "\n" not in message
    return message


# -- published files ------------------------------------------------------------------------------------------------


def test_qwen_published():
    c = read(QWEN)
    assert (c.architecture, c.hidden_size, c.intermediate_size, c.num_hidden_layers) == (
        "DFlash2DraftModel",
        5120,
        17408,
        5,
    )
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.vocab_size) == (32, 8, 128, 248320)
    assert c.block_size == 8
    assert c.max_draft_tokens == 7
    assert c.mask_token_id == 248070
    assert c.target_layer_ids == (5, 19, 33, 47, 61)
    assert c.windows == (2048,) * 5
    assert c.causal == (False,) * 5
    assert c.retention == 2047
    assert c.rope_parameters["rope_theta"] == 1e7
    assert c.rms_norm_eps == 1e-6
    assert (c.conv_kernel_size, c.conv_group_size, c.selector_rank, c.selector_top_k) == (2, 16, 256, 16)
    assert (c.input_embedding_scale, c.output_multiplier, c.final_logit_softcapping) == (1.0, 1.0, None)
    assert c.dtype == "bfloat16"
    assert c.num_target_layers == 64
    assert c.max_position_embeddings == 262144


def test_muse_published():
    c = read(MUSE)
    assert c.output_multiplier == 0.19611613513818404
    assert math.isclose(c.output_multiplier, math.sqrt(256 / 6656))
    assert c.final_logit_softcapping == 20.0
    assert c.rms_norm_eps == 1e-5
    assert c.rope_parameters["rope_theta"] == 5e5
    assert c.target_layer_ids == default_target_layer_ids(52, 5)  # SPEC 1.2: Muse's taps are the default rule
    assert read(QWEN).target_layer_ids != default_target_layer_ids(64, 5) == (1, 16, 31, 46, 61)


@pytest.mark.parametrize("file", [QWEN, MUSE, raw(), v1(), v1(layer_types=[F, F], use_sliding_window=False)])
def test_round_trip(file):
    config = read(file)
    written = json.loads(config.to_json())
    assert DFlash2Config.from_pretrained(written) == config
    assert DFlash2Config.from_pretrained(written).extra == config.extra
    assert written["attention_dropout"] == 0.0  # what is not ours is passed on
    assert written["dflash_config"]["block_size"] == config.block_size
    assert written["num_target_layers"]
    assert written["rope_parameters"]["rope_theta"] == config.rope_parameters["rope_theta"]


def test_round_trip_keeps_every_field():
    rope = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = DFlash2Config(
        hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=50, mask_token_id=0, target_layer_ids=(2, 0, 1), rope_parameters=rope, block_size=5,
        num_target_layers=3, layer_types=(S, F, S), sliding_window=7, is_causal=True, rms_norm_eps=1e-5,
        max_position_embeddings=999, attention_bias=True, input_embedding_scale=2.5, output_multiplier=0.5,
        final_logit_softcapping=3.0, conv_kernel_size=3, conv_group_size=4, selector_rank=6, selector_top_k=9,
        dtype="float32",
    )  # fmt: skip
    assert DFlash2Config.from_pretrained(json.loads(config.to_json())) == config
    assert DFlash2Config.from_pretrained(config.to_dict()).target_layer_ids == (2, 0, 1)  # concatenation order


def test_v1_file():
    """Top-level block_size, mixed layers, is_causal absent: causal on the sliding layers only (B54, B60)."""
    c = read(v1(d_block_size=None, block_size=16, layer_types=[S, F]))
    assert c.block_size == 16
    assert c.windows == (2048, None)
    assert c.causal == (True, False)
    assert c.retention is None
    assert not c.has_conv
    assert not c.has_selector
    assert read(v1(d_block_size=None)).block_size == 16  # the published default


def test_use_swa_spelling():
    """The older spelling: all layers slide and are bidirectional (B56)."""
    c = read(v1(layer_types=None, sliding_window=None, use_sliding_window=None, d_use_swa=True, d_swa_window_size=33))
    assert c.windows == (33, 33)
    assert c.causal == (False, False)
    c = read(v1(layer_types=[F, F], sliding_window=None, use_sliding_window=False, use_swa=True, swa_window_size=33))
    assert c.windows == (33, 33)
    # It counts only where layer_types names no sliding layer.
    c = read(v1(layer_types=[S, F], sliding_window=9, use_swa=True, swa_window_size=33))
    assert c.windows == (9, None)
    assert c.causal == (True, False)
    refused(v1(layer_types=None, sliding_window=None, use_sliding_window=None, use_swa=True), "swa_window_size")
    refused(
        v1(
            layer_types=None,
            sliding_window=None,
            use_sliding_window=None,
            use_swa=True,
            swa_window_size=8,
            is_causal=True,
        ),
        "use_swa",
        "is_causal",
    )


def speculators(**changes) -> dict:
    file = raw()
    layer_names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    layer_names += ("head_dim", "layer_types", "sliding_window", "use_sliding_window", "rope_parameters", "vocab_size")
    layer_names += ("rms_norm_eps", "max_position_embeddings", "hidden_act", "attention_bias", "max_window_layers")
    layer = {name: file[name] for name in layer_names}
    flat = {k: v for k, v in file["dflash_config"].items() if k != "target_layer_ids"}
    flat |= {
        "architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [2, 6], "draft_vocab_size": 100, "target_hidden_size": None, "max_anchors": 3072,
        "sliding_window_non_causal": True, "draft_ffn_type": "dense", "sample_from_anchor": False,
        "transformer_layer_config": {**layer, "dtype": "bfloat16"},
        "speculators_config": {"algorithm": "dflash2", "verifier": {"name_or_path": "x"}}, "dtype": "float32",
    }  # fmt: skip
    for name, value in changes.items():
        flat[name] = value
    return flat


def test_speculators_export():
    c = read(speculators())
    assert c.target_layer_ids == (1, 5), "aux ids count the stream entering a layer: one more (B92-B94)"
    assert c.causal == (False, False)
    assert c.windows == (2048, 2048)
    assert c.hidden_size == 64
    assert c.dtype == "float32"
    assert DFlash2Config.from_pretrained(json.loads(c.to_json())) == c
    assert not [k for k in c.to_dict() if k.startswith("speculators")], "saved in the published layout, not that one"
    assert "auto_map" not in read(raw(auto_map={"AutoModel": "dflash.DFlashDraftModel"})).to_dict(), (
        "its code stays behind"
    )
    assert read(speculators(sliding_window_non_causal=False)).causal == (True, True)
    flat = speculators()
    del flat["sliding_window_non_causal"]
    assert read(flat).causal == (False, False), "default of the v2 export"
    assert read(speculators(target_layer_ids=[1, 5])).target_layer_ids == (1, 5)
    refused(speculators(target_layer_ids=[2, 6]), "target_layer_ids", "aux_hidden_state_layer_ids", "plus one")
    refused(speculators(aux_hidden_state_layer_ids=[0, 6]), "target_layer_ids", "-1")
    refused(speculators(target_hidden_size=32), "target_hidden_size=32", "hidden_size=64")
    refused(speculators(draft_ffn_type="moe"), "draft_ffn_type='moe'", "not implemented")
    refused(speculators(sample_from_anchor=True), "sample_from_anchor=True")  # B115, B117, B119
    refused(speculators(shift_label=True), "shift_label")
    refused(speculators(hidden_size=32), "hidden_size", "transformer_layer_config", "64", "32")


@pytest.mark.parametrize("name", ["DFlashDraftModel", "DFlashSpeculator"])
def test_speculators_v1_is_causal_unless_said(name):
    flat = speculators(architectures=[name])
    for field in (
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
        "sliding_window_non_causal",
    ):
        del flat[field]
    assert read(flat).causal == (True, True)


# -- P7: the matrix of places ---------------------------------------------------------------------------------------

PLACES = {
    "block_size": (8, 6),
    "mask_token_id": (7, 8),
    "target_layer_ids": ([1, 5], [5, 1]),
    "output_multiplier": (0.5, 0.25),
    "final_logit_softcapping": (20.0, 30.0),
    "input_embedding_scale": (2.0, 3.0),
    "conv_kernel_size": (2, 3),
    "conv_group_size": (16, 8),
    "selector_rank": (4, 5),
    "selector_top_k": (4, 5),
    "layer_types": ([S, F], [F, S]),
    "sliding_window": (32, 64),
    "is_causal": (True, False),
    "hidden_size": (64, 128),
    "num_target_layers": (8, 9),
    "vocab_size": (100, 101),
    "head_dim": (16, 32),
    "rms_norm_eps": (1e-6, 1e-5),
    "rope_theta": (1e6, 1e5),
    "draft_vocab_size": (100, 0),
}


@pytest.mark.parametrize("name", PLACES)
def test_places(name):
    """Top level, nested and both equal mean the same; both different is a contradiction."""
    value, other = PLACES[name]
    plain = {name: None, f"d_{name}": None} | ({"rope_parameters": None} if name == "rope_theta" else {})

    def at(**places):
        return raw(**(plain | places))

    top, nested, both = (
        read(at(**p)) for p in ({name: value}, {f"d_{name}": value}, {name: value, f"d_{name}": value})
    )
    assert top == nested == both
    expected = tuple(value) if isinstance(value, list) else value
    if name == "rope_theta":
        assert top.rope_parameters == {"rope_theta": value}
    elif name != "draft_vocab_size":
        assert getattr(top, name) == expected
    refused(at(**{name: value, f"d_{name}": other}), name, repr(value), repr(other), "contradict", "dflash_config")
    refused(at(**{name: other, f"d_{name}": value}), name, "contradict")


MISSING = {
    "hidden_size": "hidden_size is missing",
    "intermediate_size": "intermediate_size is missing",
    "num_hidden_layers": "num_hidden_layers is missing",
    "num_attention_heads": "num_attention_heads is missing",
    "vocab_size": "vocab_size is missing",
    "d_mask_token_id": "mask_token_id is missing",
    "rope_parameters": "rope_theta is missing",
    "sliding_window": "sliding_window=None",
    "d_conv_kernel_size": "missing or 0: conv_kernel_size",
    "d_conv_group_size": "missing or 0: conv_group_size",
    "d_selector_rank": "missing or 0: selector_rank",
    "d_selector_top_k": "missing or 0: selector_top_k",
    "architectures": "architectures=[]",
}


@pytest.mark.parametrize("name", MISSING)
def test_missing(name):
    """B108, B194: no pad id for the mask, no theta, no window, no half of a v2 file."""
    refused(raw(**{name: None}), MISSING[name])


@pytest.mark.parametrize(
    "name",
    [
        "d_block_size",
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "sliding_window",
        "d_selector_top_k",
        "d_conv_kernel_size",
        "num_target_layers",
        "intermediate_size",
    ],
)
def test_zero_is_refused(name):
    file = raw()
    (file["dflash_config"] if name.startswith("d_") else file)[name.removeprefix("d_")] = 0
    refused(file, name.removeprefix("d_"), "0")


@pytest.mark.parametrize(
    "name", ["d_block_size", "d_output_multiplier", "head_dim", "rms_norm_eps", "num_target_layers"]
)
def test_null_is_absent(name):
    file = raw()
    (file["dflash_config"] if name.startswith("d_") else file)[name.removeprefix("d_")] = None
    assert read(file) == read(raw(**{name: None}))


def test_zero_is_a_token_and_a_layer():
    c = read(raw(d_mask_token_id=0, d_target_layer_ids=[0]))
    assert c.mask_token_id == 0
    assert c.target_layer_ids == (0,)
    refused(raw(d_mask_token_id=0, mask_token_id=1), "mask_token_id", "contradict")


# -- refusals -------------------------------------------------------------------------------------------------------

REFUSALS = {
    "mask id = vocab (B111)": (raw(d_mask_token_id=100), ["mask_token_id=100", "vocab_size=100"]),
    "mask id -1": (raw(d_mask_token_id=-1), ["mask_token_id=-1"]),
    "mask id a bool": (raw(d_mask_token_id=True), ["mask_token_id=True"]),
    "mask token by name only (B110)": (
        raw(d_mask_token_id=None, d_mask_token="<|MASK|>"),
        ["mask_token_id is missing", "mask_token names a string"],
    ),
    "theta 0": (raw(rope_parameters={"rope_theta": 0}), ["rope_theta=0"]),
    "theta a string": (raw(rope_parameters={"rope_theta": "1e6"}), ["rope_theta='1e6'"]),
    "theta infinite": (raw(rope_parameters={"rope_theta": math.inf}), ["rope_theta=inf"]),
    "two thetas": (raw(rope_theta=1e4), ["rope_theta", "10000", "contradict"]),
    "rope types": (raw(rope_parameters={"rope_theta": 1e4, "rope_type": "llama3"}), ["rope_type='llama3'", "yarn"]),
    "longrope": (raw(rope_parameters={"rope_theta": 1e4, "type": "longrope"}), ["rope_type='longrope'"]),
    "factor missing": (
        raw(rope_parameters={"rope_theta": 1e4, "rope_type": "linear"}),
        ["rope_parameters.factor=None"],
    ),
    "factor < 1": (
        raw(rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 0.5}),
        ["rope_parameters.factor=0.5"],
    ),
    "factor a string": (raw(rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": "x"}), ["factor='x'"]),
    "factor without a type": (
        raw(rope_parameters={"rope_theta": 1e4, "factor": 4.0}),
        ["rope_type default has no factor"],
    ),
    "yarn's length": (
        raw(rope_parameters={"rope_theta": 1e4, "rope_type": "yarn", "factor": 2}),
        ["original_max_position_embeddings"],
    ),
    "two tables": (
        raw(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 9}),
        ["rope_scaling", "contradict"],
    ),
    "a table per layer type (B61)": (
        raw(rope_parameters={S: {"rope_theta": 1e4}, F: {"rope_theta": 1e6}}),
        ["one rotary table per layer type"],
    ),
    "partial rotary": (raw(partial_rotary_factor=0.25), ["partial_rotary_factor=0.25", "not implemented"]),
    "partial rotary in rope": (
        raw(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        ["partial_rotary_factor=0.25"],
    ),
    "M-RoPE": (raw(rope_parameters={"rope_theta": 1e4, "mrope_section": [1, 2, 3]}), ["mrope_section=[1, 2, 3]"]),
    "rope layout (B102)": (raw(d_is_neox_style=False), ["is_neox_style=False", "True"]),
    "sinks": (raw(attention_sink_bias=True), ["attention_sink_bias=True"]),
    "sinks nested": (raw(d_attention_sink_bias=True), ["attention_sink_bias=True"]),
    "value scale": (raw(d_attention_value_scale=0.5), ["attention_value_scale=0.5"]),
    "MLA": (raw(d_attention_mode="mla"), ["attention_mode='mla'", "gqa"]),
    "activation": (raw(hidden_act="gelu"), ["hidden_act='gelu'", "silu"]),
    "quantised": (raw(quantization_config={"quant_method": "fp8"}), ["quantization_config", "fp8"]),
    "window pattern int (B80)": (raw(sliding_window_pattern=4), ["sliding_window_pattern=4"]),
    "window pattern list (B80)": (
        raw(d_sliding_window_pattern=[True, False]),
        ["sliding_window_pattern=[True, False]"],
    ),
    "window an array (B80)": (raw(sliding_window=[2048, 2048]), ["sliding_window=[2048, 2048]"]),
    "window off": (raw(use_sliding_window=False), ["use_sliding_window=false", "attend to everything"]),
    "window of nobody": (raw(layer_types=None, use_sliding_window=None), ["sliding_window=2048", "layer_types"]),
    "window 0": (raw(sliding_window=0), ["sliding_window=0"]),
    "layer types": (raw(layer_types=[S, "chunked_attention"]), ["chunked_attention", F]),
    "layer types short": (raw(layer_types=[S]), ["layer_types", "num_hidden_layers=2"]),
    "layer types a string": (raw(layer_types=S), ["layer_types='sliding_attention'", "list"]),
    "causal twice": (raw(is_causal=False, d_causal=True), ["is_causal", "causal", "contradict"]),
    "causal a number": (raw(is_causal=1), ["is_causal=1"]),
    "taps outside": (raw(d_target_layer_ids=[1, 8]), ["target_layer_ids=[1, 8]", "num_target_layers=8", "wrong: [8]"]),
    "taps negative": (raw(d_target_layer_ids=[-1]), ["target_layer_ids=[-1]"]),
    "taps empty": (raw(d_target_layer_ids=[]), ["target_layer_ids=[]", "at least one"]),
    "taps not a list": (raw(d_target_layer_ids=5), ["target_layer_ids=5", "list"]),
    "no taps, no depth": (
        raw(d_target_layer_ids=None, num_target_layers=None),
        ["target_layer_ids is missing", "num_target_layers"],
    ),
    "draft vocabulary (B139)": (raw(draft_vocab_size=50), ["draft_vocab_size=50", "vocab_size=100"]),
    "conv group": (raw(d_conv_group_size=5), ["conv_group_size=5", "hidden_size=64"]),
    "conv wider than block": (raw(d_conv_kernel_size=9), ["conv_kernel_size=9", "block_size=8"]),
    "more candidates than tokens": (raw(d_selector_top_k=101), ["selector_top_k=101", "vocab_size=100"]),
    "v1 with a selector": (raw(architectures=["DFlashDraftModel"]), ["DFlashDraftModel", "DFlash2DraftModel"]),
    "architecture (B193)": (raw(architectures=["EagleModel"]), ["EagleModel", "DFlash2DraftModel", "DFlashDraftModel"]),
    "two architectures": (raw(architectures=["DFlashDraftModel", "DFlash2DraftModel"]), ["exactly one"]),
    "unknown field": (raw(d_blocksize=8), ["blocksize", "block_size"]),
    "multiplier": (raw(d_output_multiplier=-1.0), ["output_multiplier=-1.0"]),
    "multiplier nan": (raw(d_output_multiplier=math.nan), ["output_multiplier=nan"]),
    "softcap a string": (raw(d_final_logit_softcapping="20"), ["final_logit_softcapping='20'"]),
    "embedding scale": (raw(d_input_embedding_scale=0), ["input_embedding_scale=0"]),
    "dtype": (raw(dtype="float8_e4m3fn"), ["dtype='float8_e4m3fn'", "bfloat16"]),
    "heads": (raw(num_key_value_heads=3), ["num_key_value_heads=3", "num_attention_heads=4"]),
    "odd head": (raw(head_dim=15), ["head_dim=15", "even"]),
    "no head_dim": (
        raw(head_dim=None, num_attention_heads=7, num_key_value_heads=7),
        ["head_dim is missing", "hidden_size=64"],
    ),
    "dflash_config a list": (raw() | {"dflash_config": []} | {"dflash_config": [1]}, ["dflash_config=[1]"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
    file, words = REFUSALS[case]
    refused(file, *words)


@pytest.mark.parametrize("field", ["DFlash2Config", "propose"])
def test_unknown_keyword_is_an_error(field):
    with pytest.raises(TypeError):
        DFlash2Config(**{**vars(read(raw())), field: 1})


def test_off_values_are_accepted():
    off = {
        "attention_sink_bias": False, "attention_value_scale": 1.0, "partial_rotary_factor": 1.0, "use_swa": False,
        "attention_mode": "gqa", "is_neox_style": True, "sample_from_anchor": False, "final_logit_softcapping": 0,
    }  # fmt: skip
    assert read(raw(**{f"d_{k}": v for k, v in off.items()})) == read(raw())
    assert read(raw(d_final_logit_softcapping=-1.0)).final_logit_softcapping is None
    assert read(raw(draft_vocab_size=0)) == read(raw(draft_vocab_size=100)) == read(raw())  # B139


def test_causality_table():
    """B54: undeclared means causal on sliding layers and bidirectional on full ones; declared holds for all."""
    for said, expected in ((None, (True, False)), (True, (True, True)), (False, (False, False))):
        assert read(raw(layer_types=[S, F], is_causal=said)).causal == expected
        assert read(raw(layer_types=[S, F], is_causal=None, d_causal=said)).causal == expected
        assert read(raw(layer_types=[S, F], is_causal=None, d_is_causal=said)).causal == expected


def test_max_window_layers_rule():
    c = read(raw(layer_types=None, max_window_layers=1))
    assert c.layer_types == (F, S), "Transformers' rule for Qwen files: layers from max_window_layers on slide"
    refused(raw(layer_types=None, max_window_layers=None), "max_window_layers is missing")


def test_old_rope_spelling():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    c = read(raw(rope_parameters=None, rope_theta=1e6, rope_scaling=yarn))
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    assert c.rope_parameters == expected
    same = {S: {"rope_theta": 1e4}, F: {"rope_theta": 1e4}}
    assert read(raw(rope_parameters=same)).rope_parameters == {"rope_theta": 1e4}


# -- taps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "layers", "expected"),
    [(64, 5, (1, 16, 31, 46, 61)), (52, 5, (1, 13, 25, 37, 49)), (36, 5, (1, 9, 17, 25, 33)), (30, 3, (1, 14, 27)),
     (30, 1, (15,)), (9, 3, (1, 4, 6)), (7, 3, (1, 2, 4)), (28, 2, (1, 25))],
)  # fmt: skip
def test_default_taps(n, layers, expected):
    """Banker's rounding: (9, 3) has 1 + 2.5 = 3.5 -> 4, (7, 3) has 1 + 1.5 = 2.5 -> 2."""
    assert default_target_layer_ids(n, layers) == expected
    types = [S] * layers
    c = read(raw(d_target_layer_ids=None, num_target_layers=n, num_hidden_layers=layers, layer_types=types))
    assert c.target_layer_ids == expected


def test_default_taps_of_a_shallow_target():
    refused(raw(d_target_layer_ids=None, num_target_layers=2), "target_layer_ids")


# -- rotary tables --------------------------------------------------------------------------------------------------

ROPES = [
    {"rope_theta": 1e4},
    {"rope_theta": 1e7, "rope_type": "default"},
    {"rope_theta": 1e4, "rope_type": "linear", "factor": 8.0},
    {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {"rope_theta": 1e6, "rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64},
    {"rope_theta": 1e4, "rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "truncate": False},
    {"rope_theta": 1e4, "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048,
     "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5},
    {"rope_theta": 1e4, "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
     "mscale": 0.707, "mscale_all_dim": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_rotary_tables_equal_transformers(rope, head_dim):
    """B107: scaling reaches the table."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    read(raw(rope_parameters=rope))
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=64,
            head_dim=head_dim,
            rope_parameters={"rope_type": "default", **rope},
            max_position_embeddings=4096,
        )
    )
    frequencies, scale = inverse_frequencies(head_dim, rope)
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-12)
    positions = torch.tensor([[0, 1, 7, 100, 5000]])
    cos, sin = theirs(torch.zeros(1), positions)
    ours = RotaryTable(head_dim, rope)(positions)
    torch.testing.assert_close(torch.cat((ours[0], ours[0]), -1), cos, rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(torch.cat((ours[1], ours[1]), -1), sin, rtol=1e-3, atol=2e-3)


def test_scaling_reaches_the_drafter():
    from dflash2 import DFlash2Drafter

    yarn = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    plain, scaled = (
        DFlash2Drafter(read(raw(rope_parameters=r, d_selector_rank=1)), device="meta").rope(torch.tensor([100]))
        for r in ({"rope_theta": 1e4}, yarn)
    )
    assert not torch.allclose(plain[0], scaled[0])
    assert scaled[0].abs().max() > 1.0


# -- no crash, whatever a file holds --------------------------------------------------------------------------------

JUNK = st.sampled_from(
    [
        0,
        1,
        -1,
        2,
        3,
        1.5,
        True,
        False,
        None,
        "",
        "x",
        "8",
        [],
        [1],
        [S],
        {},
        {"a": 1},
        math.nan,
        math.inf,
        -0.5,
        [None],
        10**12,
    ]
)
FIELDS = sorted(
    {
        *QWEN,
        *(f"d_{k}" for k in MUSE["dflash_config"]),
        "rope_theta",
        "rope_scaling",
        "use_swa",
        "d_causal",
        "swa_window_size",
        "aux_hidden_state_layer_ids",
        "transformer_layer_config",
        "draft_vocab_size",
        "sliding_window_non_causal",
        "target_hidden_size",
        "torch_dtype",
        "partial_rotary_factor",
    }
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JUNK, min_size=1, max_size=3), st.booleans())
def test_junk_is_refused_or_read(junk, old):
    """Any wrong type is a ConfigError, never another exception; what is read survives a round trip."""
    file = (v1 if old else raw)()
    for name, value in junk.items():
        place = file["dflash_config"] if name.startswith("d_") and isinstance(file["dflash_config"], dict) else file
        place[name.removeprefix("d_")] = value
    try:
        config = DFlash2Config.from_pretrained(file)
    except ConfigError:
        return
    assert DFlash2Config.from_pretrained(config.to_dict()) == config


# -- from files -----------------------------------------------------------------------------------------------------


def test_from_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw()))
    assert (
        DFlash2Config.from_pretrained(tmp_path)
        == DFlash2Config.from_pretrained(tmp_path / "config.json")
        == read(raw())
    )
    assert DFlash2Config.from_pretrained(str(tmp_path)) == read(raw())


@pytest.mark.parametrize(
    ("text", "words"), [("{", "cannot be read as JSON"), ("[]", "expected an object"), (None, "config.json is missing")]
)
def test_broken_files(tmp_path, text, words):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        DFlash2Config.from_pretrained(tmp_path)
