"""Every setting of a training run, and the drafter that it makes for a target."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from dflash2.config import SLIDING, V1, V2_FIELDS, DFlash2Config, default_target_layer_ids
from dflash2.errors import ConfigError

__all__ = ["TrainConfig", "drafter_config"]

CHOICES: dict[str, tuple[Any, ...]] = {
    "gold": ("argmax", "token"),
    "selector_miss": ("exclude", "inject"),
    "selector_mean": ("hits", "rows"),
    "dtype": ("bfloat16", "float32"),
    "sharding": ("none", "fsdp"),
    "fast": (True, False),
}


@dataclass(kw_only=True)
class TrainConfig:
    """Settings of a run.

    Attributes:
        target: name, folder or hub id of the frozen target.
        shards: token shards (``.npz``) as ``dflash2 synth`` writes them, paths or glob patterns.
        out: folder for weights, config.json, metrics.jsonl and the resume state.
        drafter: fields of `DFlash2Config` that differ from what `drafter_config` derives from the target. Required:
            drafter.mask_token_id, an id that the target's text does not contain.
        row_tokens: S, tokens per packed row; longer documents are left out.
        rows_per_step: packed rows per step, of all processes together.
        anchors_per_row: blocks drawn from the answers in each row; a multiple of tile.
        accumulate: parts that a process's rows of one step are worked off in, one after the other, to save memory.
        tile: neighbouring anchors that share one slab of context where attention runs by tiles.
        gamma: decay of the rows' weights, row i weighs exp(-(i-1)/gamma); about B/2.
        hard_weight: factor of the cross-entropy against gold.
        soft_weight: factor of the cross-entropy against the target's distribution p; its gradient is that of the KL
            divergence from p to the drafter's q.
        tv_weight: factor of the total variation distance, 1 - A with A = sum min(p, q): the chance that sampling
            rejects a draft.
        lk_weight: factor of -log A, which pulls harder where little is accepted.
        gold: ``argmax`` of the target, or the document's ``token``: label of the hard loss and of the selector.
        selector_weight: factor of the selector's loss; cross-entropy among the C candidates after the true token.
        selector_miss: rows whose gold is no candidate: ``exclude`` them, or ``inject`` gold in place of the last.
        selector_mean: the selector's loss is a mean over ``hits``, the rows it is judged on (with accumulate: of each
            part), or over all supervised ``rows``.
        selector_detach: keep the selector's gradient from the layers.
        lr: peak learning rate.
        betas: AdamW's.
        weight_decay: on matrices.
        warmup: share of the run spent warming up.
        lr_floor: learning rate at the end, as a share of the peak.
        clip: bound on the gradients' norm.
        ema: decay of the average that is saved and evaluated; 0 saves the weights themselves.
        init_layers: start the layers from the target's last ones.
        frozen: parts of parameters' names; those stay as they start. ["conv"] trains without convolutions, which start
            as the identity; selector_weight=0 trains without the selector, which starts neutral.
        init_from: folder, name or hub id of a drafter of the same configuration to start from instead; empty for none.
        max_steps: end of the run, and of the schedule; 0 for none. This or max_seconds is required.
        max_seconds: the same by the clock, training time only (resumed runs count on); 0 for none. With both, whichever
            is further along sets the schedule.
        pause_seconds: save and end this process after so long; the same command goes on. 0 for none.
        seed: of data order, anchors and initial weights.
        device: as torch names it; auto takes a GPU if there is one. Several processes get theirs from accelerate.
        dtype: of target and working weights, ``bfloat16`` or ``float32``. Masters are fp32.
        sharding: with several processes, ``none`` (all hold all weights) or ``fsdp`` (weights, masters and optimizer
            state are split).
        head_chunk: rows of logits in memory at a time.
        fast: flex attention and compiled modules: ``auto`` on GPUs, true, or false for the plain forms.
        tensorboard: write scalars for TensorBoard, too, to the folder tensorboard in out.
        log_seconds: a line of metrics that often; 0 for every step.
        eval_seconds: an evaluation by replay that often (and at the end); 0 for the end only.
        eval_steps: the same by steps, so that learning curves have the same points on any machine; 0 for none.
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
    anchors_per_row: int = 512
    accumulate: int = 1
    tile: int = 16
    gamma: float = 4.0
    hard_weight: float = 0.5
    soft_weight: float = 0.5
    tv_weight: float = 0.0
    lk_weight: float = 0.0
    gold: str = "argmax"
    selector_weight: float = 1.0
    selector_miss: str = "exclude"
    selector_mean: str = "hits"
    selector_detach: bool = False
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    warmup: float = 0.04
    lr_floor: float = 0.1
    clip: float = 1.0
    ema: float = 0.0
    init_layers: bool = True
    frozen: list[str] = field(default_factory=list)
    init_from: str = ""
    max_steps: int = 0
    max_seconds: float = 0.0
    pause_seconds: float = 0.0
    seed: int = 0
    device: str = "auto"
    dtype: str = "bfloat16"
    sharding: str = "none"
    head_chunk: int = 8192
    fast: str | bool = "auto"
    tensorboard: bool = False
    log_seconds: float = 20.0
    eval_seconds: float = 180.0
    eval_steps: int = 0
    save_seconds: float = 180.0
    save_steps: int = 0
    val_permille: int = 10
    val_documents: int = 200

    def __post_init__(self) -> None:
        from dflash2.loading import pick_device

        for f in fields(self):
            setattr(self, f.name, _typed(f.name, f.default, getattr(self, f.name)))
        self.device = str(pick_device(self.device)[0])
        self.betas = (float(self.betas[0]), float(self.betas[1]))
        self.fast = self.device.startswith("cuda") if self.fast == "auto" else self.fast
        if not self.max_steps and not self.max_seconds:
            raise ConfigError("max_steps=0 and max_seconds=0: the run would never end. Set one of them.")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be {' or '.join(map(repr, allowed))}.")
        if self.fast and not self.device.startswith("cuda"):
            raise ConfigError(f"fast=true on {self.device}: flex attention has a backward pass on GPUs only. Set auto.")
        weights = {f"{name}_weight": getattr(self, f"{name}_weight") for name in ("hard", "soft", "tv", "lk")}
        if min(*weights.values(), self.selector_weight) < 0 or not any(weights.values()):
            raise ConfigError(f"{weights}: must not be negative, and one of them above 0.")
        if self.anchors_per_row < 1 or self.tile < 1 or self.anchors_per_row % self.tile:
            raise ConfigError(f"anchors_per_row={self.anchors_per_row}: must be a multiple of tile={self.tile}.")
        if self.accumulate < 1 or self.rows_per_step % self.accumulate:
            raise ConfigError(
                f"rows_per_step={self.rows_per_step}: must be a multiple of accumulate={self.accumulate}."
            )


def _typed(name: str, default: Any, value: Any) -> Any:
    """Numbers as numbers: YAML takes 1e-3 for text."""
    kind = type(default)
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif kind not in (int, bool, float) or type(value) is kind:
        return value
    raise ConfigError(f"{name}={value!r}: expected a {'number' if kind is float else kind.__name__}.")


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
    if overrides.get("architecture") == V1:
        values |= dict.fromkeys(V2_FIELDS, 0)
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
