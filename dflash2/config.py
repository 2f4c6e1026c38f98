"""Every field of a DFlash drafter: its published spellings, its rule, and nothing about tensors.

Legend used in the whole project: H hidden, I intermediate, L draft layers, T tapped target layers, V vocabulary,
B block rows, k drafts, K convolution taps, G convolution group, C candidates, r selector rank, W window.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from dflash2.config_files import read_fields
from dflash2.errors import ConfigError

__all__ = ["DFlash2Config", "default_target_layer_ids"]

V1 = "DFlashDraftModel"
V2 = "DFlash2DraftModel"
SLIDING = "sliding_attention"
FULL = "full_attention"
#: Rotary tables that are implemented, each with the fields it reads besides ``rope_theta`` and ``rope_type``.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
DTYPES = ("bfloat16", "float16", "float32", "float64")
#: A target's tables may have rows beyond the vocabulary, to a multiple that suits kernels or shards. More than this is
#: another vocabulary.
MAX_PADDED_ROWS = 1024
V2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Tapped layers when a file names none: spread from layer 1 to N-3, banker's rounding (SPEC 1.3 of the method).

    Args:
        num_target_layers: N, decoder layers of the target.
        num_draft_layers: L, layers of the drafter; also the number of taps.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


@dataclass(frozen=True, kw_only=True)
class DFlash2Config:
    """A drafter's shape and rules. Built directly, or read from a published file with `from_pretrained`.

    Attributes:
        architecture: ``DFlash2DraftModel`` (convolutions and selector) or ``DFlashDraftModel`` (neither).
        hidden_size: H, shared with the target, whose embedding and head the drafter borrows.
        rope_parameters: at least ``rope_theta``; ``rope_type`` is default, linear or yarn. Never taken from the target.
        target_layer_ids: decoder layers whose *output* is tapped, in concatenation order.
        mask_token_id: id fed to the rows that are to be predicted.
        block_size: B, rows per block, the anchor included: at most B-1 drafts.
        layer_types: ``full_attention`` or ``sliding_attention`` per layer.
        sliding_window: W, keys a sliding query sees on its left, itself included.
        is_causal: visibility inside the block; None means causal on sliding layers and bidirectional on full ones.
        output_multiplier: factor on the head's output, before the softcap.
        final_logit_softcapping: c of ``c * tanh(x / c)``; None or <= 0 is off.
        conv_kernel_size: K taps of the grouped convolution, 0 without.
        selector_top_k: C candidates a row keeps, 0 without a selector.

    Raises:
        ConfigError: naming field, value, rule and remedy.
    """

    architecture: str = V2
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    rope_parameters: dict[str, Any]
    block_size: int = 16
    num_target_layers: int | None = None
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int | None = None
    attention_bias: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    dtype: str = "bfloat16"
    extra: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        _check_whole("num_hidden_layers", self.num_hidden_layers)
        object.__setattr__(self, "layer_types", tuple(self.layer_types) or (FULL,) * self.num_hidden_layers)
        _check_sizes(self)
        _check_numbers(self)
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            object.__setattr__(self, "final_logit_softcapping", None)
        _check_attention(self)
        _check_rope(self.rope_parameters)
        _check_target(self)
        _check_v2(self)

    @classmethod
    def from_pretrained(cls, source: str | Path | dict[str, Any]) -> DFlash2Config:
        """Read a published configuration.

        Args:
            source: a folder holding ``config.json``, the file itself, a hub id, or the parsed dictionary. Layouts: v2
                (`DFlash2DraftModel`), v1 (`DFlashDraftModel`), and the flat export of the speculators trainer.

        Raises:
            ConfigError: naming field, value, rule and remedy.
            CheckpointError: the file cannot be found or is not JSON.
        """
        if isinstance(source, dict):
            raw = source
        else:
            from dflash2.checkpoint_files import config_file

            raw = config_file(source)
        return cls(**read_fields(raw))

    def to_dict(self) -> dict[str, Any]:
        """The published layout, as other engines read it. Inverse of `from_pretrained`."""
        method: dict[str, Any] = {"block_size": self.block_size, "mask_token_id": self.mask_token_id}
        method["target_layer_ids"] = list(self.target_layer_ids)
        method |= {name: getattr(self, name) for name in V2_FIELDS if getattr(self, name)}
        for name, off in (
            ("input_embedding_scale", 1.0),
            ("output_multiplier", 1.0),
            ("final_logit_softcapping", None),
        ):
            if getattr(self, name) != off:
                method[name] = getattr(self, name)
        slides = SLIDING in self.layer_types
        out: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "use_sliding_window": slides,
            "max_window_layers": self.num_hidden_layers,
            "rope_theta": self.rope_parameters["rope_theta"],
            "dflash_config": method,
        }
        names: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads",)
        names += ("head_dim", "vocab_size", "rms_norm_eps", "attention_bias", "sliding_window", "dtype")
        out |= {name: getattr(self, name) for name in names}
        out |= {"layer_types": list(self.layer_types), "rope_parameters": dict(self.rope_parameters)}
        for name in ("is_causal", "num_target_layers", "max_position_embeddings"):
            if getattr(self, name) is not None:
                out[name] = getattr(self, name)
        return {**self.extra, **out}

    def to_json(self) -> str:
        """`to_dict` as the text of a ``config.json``."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @property
    def max_draft_tokens(self) -> int:
        """B-1: row 0 is the anchor and drafts nothing."""
        return self.block_size - 1

    @property
    def has_conv(self) -> bool:
        """Whether sublayers are wrapped in grouped convolutions."""
        return self.conv_kernel_size > 0

    @property
    def has_selector(self) -> bool:
        """Whether candidates are chosen along a path."""
        return self.selector_top_k > 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """W per layer; None where the layer attends to everything."""
        return tuple(self.sliding_window if t == SLIDING else None for t in self.layer_types)

    @property
    def causal(self) -> tuple[bool, ...]:
        """Whether rows of the block are hidden from earlier rows, per layer."""
        return tuple(t == SLIDING if self.is_causal is None else self.is_causal for t in self.layer_types)

    @property
    def retention(self) -> int | None:
        """Context rows before the anchor that some layer can see (W-1), or None when a layer sees all of them."""
        windows = self.windows
        return None if None in windows else max(w for w in windows if w is not None) - 1

    def window_pages(self, page_size: int) -> int | None:
        """The most pages of ``page_size`` rows that a sequence owns, ceil(W/page_size) + 2; None: it grows."""
        return None if self.retention is None else -(-(self.retention + 1) // page_size) + 2


def _refuse(name: str, value: object, rule: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{name}={value!r}: {rule}. {remedy}")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_whole(name: str, value: object) -> None:
    if not (_is_whole(value) and value >= 1):
        _refuse(name, value, "must be a whole number of at least 1", f"Set {name} in config.json.")


def _check_sizes(c: DFlash2Config) -> None:
    if c.architecture not in (V1, V2):
        _refuse("architecture", c.architecture, f"must be {V2} or {V1}", "Other drafters need their own package.")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for name in (*names, "head_dim", "vocab_size", "block_size"):
        _check_whole(name, getattr(c, name))
    if c.num_attention_heads % c.num_key_value_heads:
        rule = f"must divide num_attention_heads={c.num_attention_heads}"
        _refuse("num_key_value_heads", c.num_key_value_heads, rule, "Correct one of the two.")
    if c.head_dim % 2:
        _refuse("head_dim", c.head_dim, "must be even, rotary halves need it", "Correct head_dim.")


def _check_numbers(c: DFlash2Config) -> None:
    for name in ("output_multiplier", "input_embedding_scale", "rms_norm_eps"):
        value = getattr(c, name)
        if not (_is_number(value) and value > 0):
            _refuse(name, value, "must be a finite number > 0", "Copy the value the drafter was trained with.")
    cap = c.final_logit_softcapping
    if cap is not None and not _is_number(cap):
        _refuse("final_logit_softcapping", cap, "must be a finite number or null", "Remove it to switch it off.")
    for name, remedy in (("attention_bias", "Remove it for false."), ("is_causal", "Absent: causal where it slides.")):
        value = getattr(c, name)
        if not isinstance(value, bool) and not (value is None and name == "is_causal"):
            _refuse(name, value, "must be true or false", remedy)
    if c.dtype not in DTYPES:
        _refuse("dtype", c.dtype, f"only {', '.join(DTYPES)} are implemented", "Correct it.")
    if c.max_position_embeddings is not None:
        _check_whole("max_position_embeddings", c.max_position_embeddings)


def _check_attention(c: DFlash2Config) -> None:
    if len(c.layer_types) != c.num_hidden_layers:
        rule = f"needs one entry for each of num_hidden_layers={c.num_hidden_layers}"
        _refuse("layer_types", list(c.layer_types), rule, "List a type per layer.")
    unknown = [t for t in c.layer_types if t not in (FULL, SLIDING)]
    if unknown:
        _refuse("layer_types", unknown, f"only {FULL} and {SLIDING} are implemented", "Use another engine for these.")
    w = c.sliding_window
    if SLIDING in c.layer_types and not (_is_whole(w) and w >= 1):
        rule = "a sliding layer needs a window of at least 1 (and use_sliding_window not false)"
        _refuse("sliding_window", w, rule, "Set sliding_window to the width the drafter was trained with.")


def _check_rope(rope: dict[str, Any]) -> None:
    theta = rope.get("rope_theta")
    if not (_is_number(theta) and theta > 1):
        remedy = "Copy the value the drafter was trained with; there is no safe default."
        _refuse("rope_theta", theta, "must be given, finite and > 1", remedy)
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        _refuse("rope_type", kind, f"only {', '.join(ROPE_TYPES)} are implemented", "Use another engine for it.")
    unknown = sorted(set(rope) - {"rope_theta", "rope_type"} - set(ROPE_TYPES[kind]))
    if unknown:
        rule = f"rope_type {kind} has no {', '.join(unknown)}"
        _refuse("rope_parameters", rope, rule, "Correct rope_type, or remove what does not belong.")
    for name in rope.keys() & {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}:
        if not (_is_number(rope[name]) and rope[name] >= 0):
            _refuse(f"rope_parameters.{name}", rope[name], "must be a finite number >= 0", "Correct it.")
    if not isinstance(rope.get("truncate", True), bool):
        _refuse("rope_parameters.truncate", rope["truncate"], "must be true or false", "Correct it.")
    if kind == "default":
        return
    factor = rope.get("factor")
    if not (_is_number(factor) and factor >= 1):
        _refuse("rope_parameters.factor", factor, f"rope_type {kind} needs a factor >= 1", "Add it.")
    length = rope.get("original_max_position_embeddings")
    if kind == "yarn" and not (_is_whole(length) and length >= 1):
        name = "rope_parameters.original_max_position_embeddings"
        _refuse(name, length, "yarn needs the length it extends", "Add it.")


def _check_target(c: DFlash2Config) -> None:
    m = c.mask_token_id
    if not (_is_whole(m) and 0 <= m < c.vocab_size):
        rule = f"must be an id in [0, vocab_size={c.vocab_size})"
        _refuse("mask_token_id", m, rule, "Use the id the drafter was trained with; no tokenizer can supply it.")
    n = c.num_target_layers
    if n is not None:
        _check_whole("num_target_layers", n)
    ids = c.target_layer_ids
    bad = [i for i in ids if not _is_whole(i) or i < 0 or (_is_whole(n) and i >= n)]
    if bad or not ids:
        rule = f"needs layers in [0, num_target_layers={n}), at least one; wrong: {bad}"
        _refuse("target_layer_ids", list(ids), rule, "Layer id L means the output of decoder layer L, from 0.")


def _check_v2(c: DFlash2Config) -> None:
    have = {name: getattr(c, name) for name in V2_FIELDS}
    for name, value in have.items():
        if not _is_whole(value) or value < 0:
            _refuse(name, value, "must be a whole number >= 0", "0 or absent switches the part off.")
    missing = [name for name, value in have.items() if not value]
    if c.architecture == V2 and missing:
        rule = f"a {V2} needs all of {', '.join(V2_FIELDS)}; missing or 0: {', '.join(missing)}"
        _refuse("dflash_config", have, rule, f"Complete the file, or name the architecture {V1}.")
    if c.architecture == V1 and len(missing) < len(V2_FIELDS):
        _refuse("dflash_config", have, f"a {V1} has no convolution or selector", f"Name the architecture {V2}.")
    if c.has_conv and c.hidden_size % c.conv_group_size:
        _refuse("conv_group_size", c.conv_group_size, f"must divide hidden_size={c.hidden_size}", "Correct it.")
    if c.conv_kernel_size > c.block_size:
        _refuse("conv_kernel_size", c.conv_kernel_size, f"must not exceed block_size={c.block_size}", "Correct it.")
    if c.selector_top_k > c.vocab_size:
        _refuse("selector_top_k", c.selector_top_k, f"must not exceed vocab_size={c.vocab_size}", "Correct it.")
