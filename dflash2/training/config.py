"""Every setting of a training run, from a file and the command line; an unknown name is an error."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dflash2.config import SLIDING, DFlash2Config, default_target_layer_ids
from dflash2.errors import ConfigError

__all__ = ["TrainConfig", "drafter_config", "help_text", "load_config"]

PROVENANCE = "provenance"


@dataclass(kw_only=True)
class TrainConfig:
    """Settings of a run.

    Attributes:
        target: name, folder or hub id of the frozen target.
        shards: token shards (``.npz``) as dflash2.training.synth writes them, paths or glob patterns.
        out: folder for weights, config.json, metrics.jsonl and the resume state.
        drafter: fields of `DFlash2Config` that differ from what `drafter_config` derives from the target. Required:
            drafter.mask_token_id, an id that the target's text does not contain.
        row_tokens: S, tokens per packed row; longer documents are left out.
        rows_per_step: packed rows per step.
        anchors_per_step: blocks per step, drawn from the answers in these rows; a multiple of tile.
        tile: neighbouring anchors that share one slab of context.
        gamma: decay of the rows' weights; about B/2.
        hard_weight: share of the loss against the gold token, the rest against the target's distribution.
        gold: ``argmax`` of the target, or the document's ``token``: label of the hard loss and of the selector.
        selector_weight: factor on the selector's loss.
        lr: peak learning rate.
        betas: AdamW's.
        weight_decay: on matrices.
        warmup: share of the run spent warming up.
        lr_floor: learning rate at the end, as a share of the peak.
        clip: bound on the gradients' norm.
        ema: decay of the average that is saved and evaluated; 0 saves the weights themselves.
        init_layers: start the layers from the target's last ones.
        init_from: folder, name or hub id of a drafter of the same configuration to start from instead; empty for none.
        max_steps: end of the run, and of the schedule; 0 for none. This or max_seconds is required.
        max_seconds: the same by the clock, training time only (resumed runs count on); 0 for none. With both, whichever
            is further along sets the schedule.
        pause_seconds: save and end this process after so long; the same command goes on. 0 for none.
        seed: of data order, anchors and initial weights.
        device: as torch names it; auto takes a GPU if there is one.
        dtype: of target and working weights, ``bfloat16`` or ``float32``. Masters are fp32.
        head_chunk: rows of logits in memory at a time.
        compile: run norms, MLPs and convolutions through torch.compile.
        log_seconds: a line of metrics that often; 0 for every step.
        eval_seconds: an evaluation by replay that often (and at the end); 0 for the end only.
        save_seconds: weights and resume state that often (and at the end); 0 for the end only.
        save_steps: the same by steps; 0 for none.
        val_permille: share of prompts held out, in thousandths.
        val_documents: greedy documents of these that an evaluation replays.
    """

    target: str
    shards: list[str]
    out: str
    drafter: dict[str, Any] = field(default_factory=dict)
    row_tokens: int = 2048
    rows_per_step: int = 16
    anchors_per_step: int = 8192
    tile: int = 16
    gamma: float = 4.0
    hard_weight: float = 0.5
    gold: str = "argmax"
    selector_weight: float = 1.0
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    warmup: float = 0.04
    lr_floor: float = 0.1
    clip: float = 1.0
    ema: float = 0.0
    init_layers: bool = True
    init_from: str = ""
    max_steps: int = 0
    max_seconds: float = 0.0
    pause_seconds: float = 0.0
    seed: int = 0
    device: str = "auto"
    dtype: str = "bfloat16"
    head_chunk: int = 8192
    compile: bool = False
    log_seconds: float = 20.0
    eval_seconds: float = 180.0
    save_seconds: float = 180.0
    save_steps: int = 0
    val_permille: int = 10
    val_documents: int = 200

    def __post_init__(self) -> None:
        from dflash2.loading import pick_device

        self.device = str(pick_device(self.device)[0])
        self.betas = (self.betas[0], self.betas[1])
        if not self.max_steps and not self.max_seconds:
            raise ConfigError("max_steps=0 and max_seconds=0: the run would never end. Set one of them.")
        if self.gold not in ("argmax", "token"):
            raise ConfigError(f"gold={self.gold!r}: must be 'argmax' or 'token'.")
        if self.dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"dtype={self.dtype!r}: must be 'bfloat16' or 'float32'.")
        if not 0 <= self.hard_weight <= 1:
            raise ConfigError(f"hard_weight={self.hard_weight}: must be a share in [0, 1].")
        if self.anchors_per_step < 1 or self.tile < 1 or self.anchors_per_step % self.tile:
            raise ConfigError(f"anchors_per_step={self.anchors_per_step}: must be a multiple of tile={self.tile}.")


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """A JSON or YAML file (the ``train.json`` of a run, too), then ``key=value``; values are JSON or bare words.

    Raises:
        ConfigError: an unknown or missing key, or a value out of its range.
    """
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            text = Path(path).read_text()
        except OSError as e:
            raise ConfigError(f"--config {path} cannot be read: {e.strerror}.") from e
        if Path(path).suffix == ".json":
            raw = json.loads(text)
        else:
            import yaml

            raw = yaml.safe_load(text) or {}
    for setting in overrides:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r}: expected key=value.")
        outer, _, inner = key.partition(".")
        if inner:
            raw.setdefault(outer, {})[inner] = _value(value)
        else:
            raw[key] = _value(value)
    raw.pop(PROVENANCE, None)  # of a train.json: how that run was made, not how this one is to be
    known = {f.name for f in fields(TrainConfig)}
    if unknown := sorted(set(raw) - known):
        raise ConfigError(f"unknown training settings {unknown}. Known: {sorted(known)}.")
    if missing := sorted({"target", "shards", "out"} - set(raw)):
        raise ConfigError(f"training settings {missing} are missing. Set them in the file or with --set.")
    if isinstance(raw["shards"], str):
        raw["shards"] = [raw["shards"]]
    return TrainConfig(**raw)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def to_json(config: TrainConfig, provenance: dict[str, Any]) -> str:
    """All settings, and what the run was made with, as the text of a ``train.json``, which `load_config` reads back."""
    return json.dumps({**asdict(config), PROVENANCE: provenance}, indent=2) + "\n"


def help_text() -> str:
    """Every setting with its default and what the docstring of `TrainConfig` says of it."""
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.cleandoc(TrainConfig.__doc__ or ""), re.MULTILINE)
    meaning = {name: " ".join(text.replace("``", "").replace("`", "").split()) for name, text in entries}
    lines = []
    for f in fields(TrainConfig):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        shown = "required" if default is MISSING else json.dumps(default)
        lines += textwrap.wrap(f"{f.name} ({shown}): {meaning.get(f.name, '')}", 110, subsequent_indent="    ")
    return "\n".join(lines)


def drafter_config(target: Any, overrides: dict[str, Any]) -> DFlash2Config:
    """A drafter for a target: its shape, four layers, block 8, a window of 512 and five taps.

    Args:
        target: the target's Transformers configuration.
        overrides: fields of `DFlash2Config` to set otherwise. ``mask_token_id`` has no default that suits all
            tokenizers: any id that ordinary text does not contain will do.
    """
    n, layers = target.num_hidden_layers, overrides.get("num_hidden_layers", 4)
    rope = getattr(target, "rope_parameters", None) or {"rope_theta": target.rope_theta}
    values: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
        "vocab_size": target.vocab_size,
        "num_target_layers": n,
        "target_layer_ids": tuple(dict.fromkeys(default_target_layer_ids(n, 5))),  # small targets have fewer
        "rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
        "rms_norm_eps": float(f"{target.rms_norm_eps:.6g}"),  # GGUF files bring 1e-5 as an fp32
        "max_position_embeddings": target.max_position_embeddings,
        "block_size": 8,
        "layer_types": (SLIDING,) * layers,
        "sliding_window": 512,
        "is_causal": False,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 64,
        "selector_top_k": 16,
    }
    unknown = sorted(set(overrides) - {f.name for f in fields(DFlash2Config)})
    if unknown:
        raise ConfigError(f"drafter: unknown fields {unknown}.")
    values |= overrides
    if "mask_token_id" not in values:
        raise ConfigError(
            "drafter.mask_token_id is missing: choose an id that the target's text does not contain, and set it with "
            "--set drafter.mask_token_id=ID."
        )
    return DFlash2Config(**values)
