"""The published drafters' shapes (SPEC 6.1 of the method): what production runs, with random weights."""

from __future__ import annotations

from typing import Any

from dflash2.config import SLIDING, DFlash2Config

__all__ = ["SHAPES", "WINDOW"]

WINDOW = 2048


def _shape(hidden: int, intermediate: int, vocab: int, block: int, taps: tuple[int, ...], **rest: Any) -> DFlash2Config:
    """What the three have in common: five sliding layers of 32/8/128 heads, two taps, 16 candidates of rank 256."""
    return DFlash2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=vocab,
        block_size=block,
        target_layer_ids=taps,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        layer_types=(SLIDING,) * 5,
        sliding_window=WINDOW,
        is_causal=False,
        conv_kernel_size=2,
        conv_group_size=16,
        selector_rank=256,
        selector_top_k=16,
        **rest,
    )


#: By the size of the target: Qwen3.8-27B, Muse-Glimmer-30B, GLM-5.3-Flash. Of the last only shapes are known: its
#: rotary base is a stand-in, which costs the same time.
SHAPES = {
    "27b": _shape(
        5120, 17408, 248320, 8, (5, 19, 33, 47, 61), num_target_layers=64, mask_token_id=248070,
        rope_parameters={"rope_theta": 1e7}, max_position_embeddings=262144,
    ),
    "30b": _shape(
        6656, 19968, 202048, 16, (1, 13, 25, 37, 49), num_target_layers=52, mask_token_id=201818,
        rope_parameters={"rope_theta": 5e5}, max_position_embeddings=131072, rms_norm_eps=1e-5,
        output_multiplier=0.19611613513818404, final_logit_softcapping=20.0,
    ),
    "flash": _shape(
        4096, 12288, 154880, 8, (5, 14, 24, 33, 42), num_target_layers=45, mask_token_id=154856,
        rope_parameters={"rope_theta": 1e6},
    ),
}  # fmt: skip
