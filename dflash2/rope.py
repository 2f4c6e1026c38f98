"""Rotary positions of the drafter: whole heads, by halves, absolute positions, fp32 tables."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["RotaryTable", "apply_rope", "inverse_frequencies"]


def inverse_frequencies(head_dim: int, rope: dict[str, Any]) -> tuple[Tensor, float]:
    """Angle per position for each pair of channels, and the factor on cos and sin.

    Args:
        head_dim: hd, even.
        rope: `DFlash2Config.rope_parameters`.

    Returns:
        fp32 ``[hd/2]`` on the CPU, and a float. ``default`` is RoFormer (arXiv 2104.09864), ``linear`` divides the
        positions by ``factor``, ``yarn`` is arXiv 2309.00071 section 3.
    """
    theta, kind = float(rope["rope_theta"]), rope.get("rope_type", "default")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / theta**exponents
    if kind == "default":
        return base, 1.0
    factor = float(rope["factor"])
    if kind == "linear":
        return base / factor, 1.0
    length = float(rope["original_max_position_embeddings"])

    def channel(rotations: float) -> float:
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(float(rope.get("beta_fast") or 32)), channel(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    interpolate = ramp.clamp(0, 1)
    return base / factor * interpolate + base * (1 - interpolate), _attention_factor(rope, factor)


def _attention_factor(rope: dict[str, Any], factor: float) -> float:
    """Section 3.4 of the paper; the two mscale fields are DeepSeek's, their quotient as in Transformers."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    grow = 0.1 * math.log(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return (grow * float(rope["mscale"]) + 1.0) / (grow * float(rope["mscale_all_dim"]) + 1.0)
    return grow + 1.0


class RotaryTable:
    """cos and sin of absolute positions. Not a module: its fp32 frequencies must survive ``module.to(bfloat16)``."""

    def __init__(self, head_dim: int, rope: dict[str, Any]):
        self._frequencies, self.scale = inverse_frequencies(head_dim, rope)
        self._on: dict[torch.device, Tensor] = {}

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int ``[...]`` -> (cos, sin), each fp32 ``[..., hd/2]``."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self.frequencies(positions.device)
        return angles.cos() * self.scale, angles.sin() * self.scale

    def frequencies(self, device: torch.device) -> Tensor:
        """Angle per position for each pair of channels, fp32 ``[hd/2]``; one copy is kept on each device."""
        if device not in self._on:
            self._on[device] = self._frequencies.to(device)
        return self._on[device]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [..., heads, hd]`` by ``cos, sin [..., hd/2]``; fp32 inside, one rounding to x's dtype."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
