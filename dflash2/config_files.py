"""From the spellings found in published ``config.json`` files to the fields of `DFlash2Config`."""

from __future__ import annotations

from typing import Any

from dflash2.errors import ConfigError

__all__ = ["read_fields"]

ARCHITECTURES = {
    "DFlash2DraftModel": "DFlash2DraftModel",
    "MiniMaxDFlash2DraftModel": "DFlash2DraftModel",
    "DFlashDraftModel": "DFlashDraftModel",
    "DFlashSpeculator": "DFlashDraftModel",
}
#: Fields of the method. They stand in ``dflash_config`` or at the top level; in both they must agree.
METHOD = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)
#: Fields of the transformer, normally at the top level, accepted in ``dflash_config`` too.
SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_target_layers",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
)
#: What is not implemented, with the values that mean "off". Ignoring one would cost acceptance and no test sees it.
REFUSED: dict[str, tuple[object, ...]] = {
    "attention_sink_bias": (None, False, 0),
    "add_swa_attention_sink_bias": (None, False),
    "add_full_attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "partial_rotary_factor": (None, 1, 1.0),
    "attention_mode": (None, "gqa", "mha"),
    "mrope_section": (None,),
    "is_neox_style": (None, True),
    "sample_from_anchor": (None, False),
    "hidden_act": (None, "silu"),
    "sliding_window_pattern": (None,),
    "quantization_config": (None,),
}
OTHER = (
    "causal",
    "is_causal",
    "use_swa",
    "swa_window_size",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "aux_hidden_state_layer_ids",
    "draft_vocab_size",
    "mask_token",
    "sliding_window_non_causal",
    "dtype",
    "torch_dtype",
)
KNOWN_NESTED = {*METHOD, *SHAPE, *REFUSED, *OTHER}
#: Top-level keys that `DFlash2Config` re-creates, so they are not kept as `extra`.
DERIVED = {"architectures", "model_type", "tie_word_embeddings", "dflash_config", "transformer_layer_config"}


class _Fields:
    """Looks a name up in ``dflash_config``, then at the top level. Two different values are a contradiction."""

    def __init__(self, raw: dict[str, Any]):
        nested = raw.get("dflash_config") or {}
        if not isinstance(nested, dict):
            raise ConfigError(f"dflash_config={nested!r}: must be an object. Correct config.json.")
        unknown = sorted(set(nested) - KNOWN_NESTED)
        if unknown:
            raise ConfigError(
                f"dflash_config has unknown fields {unknown}: what they mean is not implemented, and ignoring them "
                f"could silently cost acceptance. Known: {sorted(KNOWN_NESTED)}."
            )
        # The speculators export keeps the transformer's fields in an object of their own.
        self.top = {**(raw.get("transformer_layer_config") or {}), **raw}
        self.nested = nested

    def get(self, name: str, default: Any = None) -> Any:
        in_nested, in_top = self.nested.get(name), self.top.get(name)
        if in_nested is not None and in_top is not None and in_nested != in_top:
            raise ConfigError(
                f"{name}: dflash_config says {in_nested!r} and the top level says {in_top!r}, which contradict each "
                "other. Remove the wrong one (engines read dflash_config first)."
            )
        value = in_nested if in_nested is not None else in_top
        return default if value is None else value

    def require(self, name: str, why: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ConfigError(f"{name} is missing: {why} Set {name} in config.json.")
        return value


def read_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `DFlash2Config` from a parsed ``config.json``.

    Raises:
        ConfigError: a field is missing, contradictory or not implemented.
    """
    f = _Fields(raw)
    for name, off in REFUSED.items():
        if f.get(name) not in off:
            expected = " or ".join(repr(v) for v in off if v is not None) or "absent"
            raise ConfigError(f"{name}={f.get(name)!r} is not implemented (expected {expected}). Use another engine.")
    out: dict[str, Any] = {"architecture": _architecture(raw)}
    for name in (*METHOD, *SHAPE):
        if f.get(name) is not None:
            out[name] = f.get(name)
    _shape(f, out)
    _mask_and_vocabulary(f, out)
    _attention(f, out, bool(raw.get("transformer_layer_config")) or f.get("sliding_window_non_causal") is not None)
    out["rope_parameters"] = _rope(f)
    out["target_layer_ids"] = _taps(f, out)
    out["dtype"] = str(f.get("dtype") or f.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    out["extra"] = {k: v for k, v in raw.items() if k not in DERIVED and k not in KNOWN_NESTED}
    return out


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    found = [ARCHITECTURES[n] for n in names if n in ARCHITECTURES]
    if len(names) != 1 or not found:
        raise ConfigError(f"architectures={names!r}: expected exactly one of {sorted(ARCHITECTURES)}. Check the file.")
    return found[0]


def _shape(f: _Fields, out: dict[str, Any]) -> None:
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        f.require(name, "the drafter's shape needs it.")
    out.setdefault("num_key_value_heads", out["num_attention_heads"])
    if "head_dim" not in out:
        if out["hidden_size"] % out["num_attention_heads"]:
            raise ConfigError(
                f"head_dim is missing and hidden_size={out['hidden_size']} is no multiple of "
                f"num_attention_heads={out['num_attention_heads']}. Set head_dim in config.json."
            )
        out["head_dim"] = out["hidden_size"] // out["num_attention_heads"]
    if f.get("target_hidden_size") not in (None, out["hidden_size"]):
        raise ConfigError(
            f"target_hidden_size={f.get('target_hidden_size')} differs from hidden_size={out['hidden_size']}: "
            "the drafter borrows the target's embedding and head, so the two must be equal."
        )


def _mask_and_vocabulary(f: _Fields, out: dict[str, Any]) -> None:
    if "mask_token_id" not in out:
        hint = " mask_token names a string; write its id." if f.get("mask_token") else ""
        raise ConfigError(
            "mask_token_id is missing: rows to predict are fed this id, and a pad or end id in its place silently "
            f"costs acceptance. Set dflash_config.mask_token_id in config.json.{hint}"
        )
    reduced = f.get("draft_vocab_size")
    if reduced not in (None, 0, out["vocab_size"]):
        raise ConfigError(
            f"draft_vocab_size={reduced} differs from vocab_size={out['vocab_size']}: reduced draft vocabularies "
            "(d2t/t2d maps) are not implemented. Use the checkpoint with the full vocabulary."
        )


def _attention(f: _Fields, out: dict[str, Any], speculators: bool) -> None:
    layers, window = out["num_hidden_layers"], f.get("sliding_window")
    types = f.get("layer_types")
    if types is None and f.get("use_sliding_window"):
        types = _by_max_window_layers(f, layers)
    types = list(types or ["full_attention"] * layers)
    causal = f.top.get("is_causal")
    causal = f.get("causal") if causal is None else causal
    if speculators and causal is None and not f.get("sliding_window_non_causal", out["architecture"][6] == "2"):
        causal = None  # sliding layers causal, full layers bidirectional: the rule for an undeclared is_causal
    elif speculators and causal is None:
        causal = False
    if "sliding_attention" in types:
        if f.get("use_sliding_window") is False:
            raise ConfigError(
                "use_sliding_window=false while layer_types names sliding layers: a sliding layer without its window "
                "would silently attend to everything. Set use_sliding_window to true or the layers to full_attention."
            )
    elif f.get("use_swa"):
        types, causal, window = ["sliding_attention"] * layers, False, f.require("swa_window_size", "use_swa needs it.")
    out |= {"layer_types": tuple(types), "is_causal": causal}
    out["sliding_window"] = window if "sliding_attention" in types else None


def _by_max_window_layers(f: _Fields, layers: int) -> list[str]:
    """Transformers' rule for Qwen files without layer_types: layers from ``max_window_layers`` on slide."""
    first = f.require(
        "max_window_layers", "use_sliding_window is true but layer_types does not say which layers slide."
    )
    return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]


def _rope(f: _Fields) -> dict[str, Any]:
    rope = f.get("rope_parameters") or f.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"rope_parameters={rope!r}: must be an object. Correct config.json.")
    if rope and all(isinstance(v, dict) for v in rope.values()):
        if len({str(sorted(v.items())) for v in rope.values()}) > 1:
            raise ConfigError(f"rope_parameters={rope!r}: one rotary table per layer type is not implemented.")
        rope = next(iter(rope.values()))
    rope = {("rope_type" if k == "type" else k): v for k, v in rope.items() if v is not None}
    theta = f.get("rope_theta")
    if theta is not None and rope.setdefault("rope_theta", theta) != theta:
        raise ConfigError(
            f"rope_theta: the top level says {theta} and rope_parameters says {rope['rope_theta']}, which contradict "
            "each other. Remove the wrong one."
        )
    for name in ("partial_rotary_factor", "mrope_section"):
        if rope.pop(name, None) not in REFUSED[name]:
            raise ConfigError(f"rope_parameters.{name} is not implemented: the drafter rotates whole heads, by halves.")
    if "rope_theta" not in rope:
        raise ConfigError(
            "rope_theta is missing: engines default to 1e4, 1e6 or 1e7, and a wrong one silently costs acceptance. "
            "Set rope_parameters.rope_theta to the drafter's own value."
        )
    return rope


def _taps(f: _Fields, out: dict[str, Any]) -> tuple[int, ...]:
    from dflash2.config import default_target_layer_ids

    ids, shifted = out.get("target_layer_ids"), f.get("aux_hidden_state_layer_ids")
    if shifted is not None:  # numbered by the stream entering a layer: one more than the layer whose output it is
        unshifted = [i - 1 for i in shifted]
        if ids is not None and list(ids) != unshifted:
            raise ConfigError(
                f"target_layer_ids={list(ids)} and aux_hidden_state_layer_ids={list(shifted)} contradict each other: "
                "the second must be the first plus one. Remove the wrong one."
            )
        ids = unshifted
    if ids is not None:
        return tuple(ids)
    n = out.get("num_target_layers")
    if n is None:
        raise ConfigError("target_layer_ids is missing, and so is num_target_layers to derive it. Set either.")
    return default_target_layer_ids(n, out["num_hidden_layers"])
