"""One path through the candidates, from the anchor to the last row."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw", "finite", "one_hot", "selector_walk", "tempered"]


def one_hot(index: Tensor, like: Tensor) -> Tensor:
    """1 at ``index [...]``, 0 elsewhere: shape and dtype of ``like [..., C]``. torch's reads values on some devices."""
    return (index[..., None] == torch.arange(like.shape[-1], device=like.device)).to(like.dtype)


def finite(scores: Tensor) -> Tensor:
    """Scores that can be compared and subtracted: NaN and -inf become the least fp32 number, +inf the largest."""
    lowest = torch.finfo(torch.float32).min
    return scores.nan_to_num(nan=lowest, neginf=lowest)


def tempered(scores: Tensor, temperature: Tensor) -> Tensor:
    """``softmax(scores / T)`` of finite ``scores [..., C]``; ``T [...]`` > 0 may be tiny, as the best is taken off."""
    return torch.softmax((scores - scores.amax(-1, keepdim=True)) / temperature[..., None], -1)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF draw: ``probabilities [..., C]`` (need not sum to exactly 1), ``uniforms [...]`` in [0, 1).

    Returns int64 ``[...]``, never an entry of probability 0 while another has more.
    """
    cumulative = probabilities.double().cumsum(-1)
    target = uniforms.double()[..., None] * cumulative[..., -1:]
    return (cumulative <= target).sum(-1).clamp_max(probabilities.shape[-1] - 1)


def selector_walk(
    first: Tensor, edges: Tensor, temperature: Tensor | None, uniforms: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Follow the best edge of each row, or one drawn from ``softmax(score / T)``, from the token chosen before.

    Args:
        first: fp32 ``[R, C]``, scores of row 1 given the anchor.
        edges: fp32 ``[R, k-1, C, C]``, scores of row i+1 (last axis) given each candidate of row i.
        temperature: ``[R]``; rows with T <= 0 are greedy. None: all are.
        uniforms: ``[R, k]`` in [0, 1); needed with a temperature.

    Returns:
        index of the chosen candidate per row, int64 ``[R, k]``, and q fp32 ``[R, k, C]``, the distribution each was
        really drawn from (one-hot for greedy rows); None without a temperature.
    """
    chosen: list[Tensor] = []
    q_rows: list[Tensor] = []
    scores = first
    for i in range(edges.shape[1] + 1):
        if i:
            scores = edges[:, i - 1].gather(1, chosen[-1][:, None, None].expand(-1, 1, edges.shape[-1]))[:, 0]
        scores = finite(scores)
        index = scores.argmax(-1)
        if temperature is not None and uniforms is not None:
            greedy = temperature <= 0
            q = tempered(scores, torch.where(greedy, 1.0, temperature))
            q = torch.where(greedy[:, None], one_hot(index, q), q)
            index = torch.where(greedy, index, draw(q, uniforms[:, i]))
            q_rows.append(q)
        chosen.append(index)
    return torch.stack(chosen, 1), torch.stack(q_rows, 1) if q_rows else None
