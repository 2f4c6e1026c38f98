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
    "draft_ffn_type": (None, "dense"),  # speculators: a mixture of experts instead of the MLP
    "shift_label": (None, False),  # speculators: rows predict the token after theirs
    "pure_draft_prefix_len": (None, 1),
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
#: Top-level keys that are not kept as `extra`: `DFlash2Config` re-creates them, or they describe the file's own layout.
DERIVED = {"architectures", "model_type", "tie_word_embeddings", "dflash_config", "transformer_layer_config"}
DERIVED |= {"auto_map", "speculators_config", "speculators_model_type", "speculators_version"}


class _Fields:
    """Looks a name up in every place a file may keep it. Two different values are a contradiction."""

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
        layer = raw.get("transformer_layer_config") or {}
        if not isinstance(layer, dict):
            raise ConfigError(f"transformer_layer_config={layer!r}: must be an object. Correct config.json.")
        self.places = {"dflash_config": nested, "the top level": raw, "transformer_layer_config": layer}

    def get(self, name: str, default: Any = None) -> Any:
        found = [(where, fields[name]) for where, fields in self.places.items() if fields.get(name) is not None]
        for where, value in found[1:]:
            if value != found[0][1]:
                raise ConfigError(
                    f"{name}: {found[0][0]} says {found[0][1]!r} and {where} says {value!r}, which contradict each "
                    "other. Remove the wrong one (engines read dflash_config first)."
                )
        return found[0][1] if found else default

    def get_list(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, list | tuple):
            raise ConfigError(f"{name}={value!r}: must be a list. Correct config.json.")
        return None if value is None else list(value)

    def first(self, *names: str) -> Any:
        """The first of several spellings, in the first place that has one; others may differ."""
        values = [fields.get(name) for fields in self.places.values() for name in names]
        return next((v for v in values if v is not None), None)

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
    out["dtype"] = str(f.first("dtype", "torch_dtype") or "bfloat16").removeprefix("torch.")
    out["extra"] = {k: v for k, v in raw.items() if k not in DERIVED and k not in KNOWN_NESTED}
    return out


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    known = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] in ARCHITECTURES
    if not known:
        raise ConfigError(f"architectures={names!r}: expected exactly one of {sorted(ARCHITECTURES)}. Check the file.")
    return ARCHITECTURES[names[0]]


def _whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}: must be a whole number of at least 1. Correct config.json.")


def _shape(f: _Fields, out: dict[str, Any]) -> None:
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        _whole(name, f.require(name, "the drafter's shape needs it."))
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
            "the drafter borrows the target's embedding and head, so the two must be equal. Correct one of them."
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
    types = f.get_list("layer_types")
    if types is None and f.get("use_sliding_window"):
        types = _by_max_window_layers(f, layers)
    if types is None and window is not None and f.get("use_sliding_window") is None and not f.get("use_swa"):
        raise ConfigError(
            f"sliding_window={window!r} but nothing says which layers slide: ignoring the window would silently attend "
            "to everything. Set layer_types, or use_sliding_window to false."
        )
    types = types or ["full_attention"] * layers
    causal = _causal(f, out, speculators)
    if "sliding_attention" in types:
        if f.get("use_sliding_window") is False:
            raise ConfigError(
                "use_sliding_window=false while layer_types names sliding layers: a sliding layer without its window "
                "would silently attend to everything. Set use_sliding_window to true or the layers to full_attention."
            )
    elif f.get("use_swa"):
        if causal:
            raise ConfigError("use_swa=true and is_causal=true: use_swa files are bidirectional. Set layer_types.")
        types, causal, window = ["sliding_attention"] * layers, False, f.require("swa_window_size", "use_swa needs it.")
    out |= {"layer_types": tuple(types), "is_causal": causal}
    out["sliding_window"] = window if "sliding_attention" in types else None


def _causal(f: _Fields, out: dict[str, Any], speculators: bool) -> bool | None:
    """None is the rule for an undeclared is_causal: sliding layers causal, full layers bidirectional."""
    declared = {name: f.get(name) for name in ("is_causal", "causal") if f.get(name) is not None}
    if len(set(map(repr, declared.values()))) > 1:
        raise ConfigError(f"{declared} contradict each other. Remove the wrong one (engines read is_causal first).")
    if declared or not speculators:
        return next(iter(declared.values()), None)
    return False if f.get("sliding_window_non_causal", out["architecture"].startswith("DFlash2")) else None


def _by_max_window_layers(f: _Fields, layers: int) -> list[str]:
    """Transformers' rule for Qwen files without layer_types: layers from ``max_window_layers`` on slide."""
    first = f.require(
        "max_window_layers", "use_sliding_window is true but layer_types does not say which layers slide."
    )
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise ConfigError(f"max_window_layers={first!r}: must be a whole number. Correct config.json.")
    return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]


def _rope(f: _Fields) -> dict[str, Any]:
    tables = [_rope_table(name, f.get(name)) for name in ("rope_parameters", "rope_scaling") if f.get(name)]
    if len(tables) == 2 and any(tables[0].get(k, v) != v for k, v in tables[1].items()):
        raise ConfigError(
            f"rope_parameters={tables[0]} and rope_scaling={tables[1]} contradict each other. Remove the wrong one."
        )
    rope: dict[str, Any] = {k: v for table in reversed(tables) for k, v in table.items()}
    theta = f.get("rope_theta")
    if theta is not None and rope.setdefault("rope_theta", theta) != theta:
        raise ConfigError(
            f"rope_theta: the top level says {theta!r} and rope_parameters says {rope['rope_theta']!r}, which "
            "contradict each other. Remove the wrong one."
        )
    for name in ("partial_rotary_factor", "mrope_section"):
        if rope.get(name) not in REFUSED[name]:
            raise ConfigError(
                f"rope_parameters.{name}={rope[name]!r} is not implemented: the drafter rotates whole heads, by "
                "halves. Use another engine."
            )
        rope.pop(name, None)
    if "rope_theta" not in rope:
        raise ConfigError(
            "rope_theta is missing: engines default to 1e4, 1e6 or 1e7, and a wrong one silently costs acceptance. "
            "Set rope_parameters.rope_theta to the drafter's own value."
        )
    return rope


def _rope_table(name: str, rope: Any) -> dict[str, Any]:
    if not isinstance(rope, dict):
        raise ConfigError(f"{name}={rope!r}: must be an object. Correct config.json.")
    if all(isinstance(v, dict) for v in rope.values()):
        if any(v != next(iter(rope.values())) for v in rope.values()):
            raise ConfigError(
                f"{name}={rope!r}: one rotary table per layer type is not implemented. Use another engine."
            )
        rope = next(iter(rope.values()))
    spellings = {"type": "rope_type"}
    return {spellings.get(k, k): v for k, v in rope.items() if v is not None}


def _taps(f: _Fields, out: dict[str, Any]) -> tuple[int, ...]:
    from dflash2.config import default_target_layer_ids

    ids, shifted = f.get_list("target_layer_ids"), f.get_list("aux_hidden_state_layer_ids")
    if shifted is not None:  # numbered by the stream entering a layer: one more than the layer whose output it is
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in shifted):
            raise ConfigError(f"aux_hidden_state_layer_ids={shifted}: must be whole numbers. Correct config.json.")
        unshifted = [i - 1 for i in shifted]
        if ids is not None and ids != unshifted:
            raise ConfigError(
                f"target_layer_ids={ids} and aux_hidden_state_layer_ids={shifted} contradict each other: "
                "the second must be the first plus one. Remove the wrong one."
            )
        ids = unshifted
    if ids is not None:
        return tuple(ids)
    n = out.get("num_target_layers")
    if n is None:
        raise ConfigError("target_layer_ids is missing, and so is num_target_layers to derive it. Set either.")
    _whole("num_target_layers", n)
    return default_target_layer_ids(n, out["num_hidden_layers"])
