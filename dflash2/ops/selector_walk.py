"""One path through the candidates, from the anchor to the last row, by the selector's scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.ops.backend import Backend, choose_backend
from dflash2.ops.launch import launch_settings

__all__ = [
    "Walk",
    "draw",
    "finite",
    "one_hot",
    "pair_scores",
    "selector_walk",
    "selector_walk_reference",
    "shape_logits",
    "tempered",
]


@dataclass(frozen=True)
class Walk:
    """Where `selector_walk` went.

    Attributes:
        tokens: int64 ``[R, k]``, the chosen candidates.
        index: int64 ``[R, k]``, which of the C each was.
        q: fp32 ``[R, k, C]``, the distribution each was really drawn from, one-hot for greedy rows; None without a
            temperature.
        meaningful: bool ``[R]``, whether the best raw logit of every row is a number: not NaN, not infinite.
    """

    tokens: Tensor
    index: Tensor
    q: Tensor | None
    meaningful: Tensor


def selector_walk(
    gate: Tensor,
    anchors: Tensor,
    candidates: Tensor,
    logits: Tensor,
    predecessor_codebook: Tensor,
    successor_codebook: Tensor,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    temperature: Tensor | None = None,
    uniforms: Tensor | None = None,
    backend: Backend = "auto",
) -> Walk:
    """Follow the best edge of each row, or one drawn from ``softmax(score / T)``, from the token chosen before.

        score_i(p -> c) = finite(finite(shaped_i[c]) + sum_r A[p]_r * gate_i,r * B[c]_r)    in fp32

    with A and B the codebooks, p the anchor or the token chosen before, `shape_logits` and `finite` as below. Equal
    scores go to the lowest candidate index.

    Args:
        gate: ``[R, k, r]`` floating point; or ``[S, R, k, r]``, parts that add up to it, as `block_linear` gives them.
        anchors: int64 ``[R]``, the token before the first row.
        candidates: int64 ``[R, k, C]``, best first. Ids outside the codebooks read the nearest row there is.
        logits: ``[R, k, C]``, the head's raw logits of the candidates.
        predecessor_codebook, successor_codebook: A and B, ``[V, r]``.
        multiplier, softcap: see `shape_logits`.
        temperature: fp32 ``[R]``; rows with T <= 0 are greedy. None: all are.
        uniforms: fp64 ``[R, k]`` in [0, 1); needed with a temperature.
        backend: ``"auto"`` (the kernel on a GPU when no gradient is needed and the edges fit), ``"torch"`` or
            ``"triton"``.

    Raises:
        ValueError: shapes do not fit, or the backend cannot run here.
    """
    parts = gate if gate.dim() == 4 else gate[None]
    _check(parts[0], anchors, candidates, logits, predecessor_codebook, successor_codebook, temperature, uniforms)
    tensors = (anchors, candidates, logits, predecessor_codebook, successor_codebook)
    if 0 in candidates.shape[:2]:
        none = anchors.new_zeros(candidates.shape[:2])
        q = None if temperature is None else candidates.float()
        return Walk(none, none, q, torch.ones_like(anchors, dtype=torch.bool))
    if choose_backend(backend, gate, logits, predecessor_codebook, successor_codebook) == "triton":
        from dflash2.kernels import selector_walk as kernel

        k, count = candidates.shape[1:]
        if kernel.fits(k, count):
            shape = {"k": k, "candidates": count, "rank": gate.shape[-1]}
            settings = launch_settings("selector_walk", kernel.DEFAULTS, gate.device, **shape)
            return Walk(*kernel.selector_walk(parts, *tensors, multiplier, softcap, temperature, uniforms, settings))
        if backend == "triton":
            raise ValueError(
                f"backend='triton' cannot hold the edges of {k} rows of {count} candidates (at most "
                f"{kernel.MOST_EDGES}, sizes rounded up to powers of two); use backend='auto' or 'torch'."
            )
    gate = gate.sum(0) if gate.dim() == 4 else gate
    return selector_walk_reference(gate, *tensors, multiplier, softcap, temperature, uniforms)


def selector_walk_reference(
    gate: Tensor,
    anchors: Tensor,
    candidates: Tensor,
    logits: Tensor,
    predecessor_codebook: Tensor,
    successor_codebook: Tensor,
    multiplier: float,
    softcap: float | None,
    temperature: Tensor | None,
    uniforms: Tensor | None,
) -> Walk:
    """The definition, in torch. Arguments as in `selector_walk`, unchecked; ``k >= 1``."""
    (requests, k, count), last = candidates.shape, predecessor_codebook.shape[0] - 1
    ids = candidates.clamp(0, last)
    # All edges at once: the anchor as every candidate before row 0, so that the walk may start at any.
    before = torch.cat((anchors.clamp(0, last)[:, None, None].expand(-1, 1, count), ids[:, :-1]), 1)
    pairs = pair_scores(gate, before, ids, predecessor_codebook, successor_codebook)
    edges = finite(finite(shape_logits(logits, multiplier, softcap))[:, :, None] + pairs)
    index = anchors.new_zeros(requests)
    chosen: list[Tensor] = []
    q_rows: list[Tensor] = []
    for i in range(k):
        scores = edges[:, i].gather(1, index[:, None, None].expand(-1, 1, count))[:, 0]
        index = scores.argmax(-1)
        if temperature is not None and uniforms is not None:
            greedy = temperature <= 0
            q = tempered(scores, torch.where(greedy, 1.0, temperature))
            q = torch.where(greedy[:, None], one_hot(index, q), q)
            index = torch.where(greedy, index, draw(q, uniforms[:, i]))
            q_rows.append(q)
        chosen.append(index)
    path = torch.stack(chosen, 1)
    tokens = candidates.gather(-1, path[..., None])[..., 0]
    return Walk(tokens, path, torch.stack(q_rows, 1) if q_rows else None, logits[..., 0].isfinite().all(1))


def pair_scores(
    gate: Tensor, predecessors: Tensor, candidates: Tensor, predecessor_codebook: Tensor, successor_codebook: Tensor
) -> Tensor:
    """``sum_r A[p]_r * g_r * B[c]_r`` in fp32; differentiable.

    Args:
        gate: ``[..., r]``.
        predecessors: int64 ``[..., P]``, token ids before this row.
        candidates: int64 ``[..., C]``, token ids of this row.
        predecessor_codebook, successor_codebook: A and B, ``[V, r]``.

    Returns:
        fp32 ``[..., P, C]``.
    """
    # `embedding`: the gradient of plain indexing adds up a token's rows one after the other, and in training common
    # tokens are candidates of most rows.
    before = F.embedding(predecessors, predecessor_codebook).float() * gate.float().unsqueeze(-2)
    return before @ F.embedding(candidates, successor_codebook).float().transpose(-1, -2)


def shape_logits(logits: Tensor, multiplier: float = 1.0, softcap: float | None = None) -> Tensor:
    """``softcap * tanh(multiplier * logit / softcap)`` in fp32. Monotone, so the best tokens are known before.

    -inf stays ruled out.
    """
    logits = logits.float() * multiplier
    if softcap is None:
        return logits
    return torch.where(logits.isneginf(), logits, softcap * torch.tanh(logits / softcap))


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


def _check(
    gate: Tensor,
    anchors: Tensor,
    candidates: Tensor,
    logits: Tensor,
    predecessor_codebook: Tensor,
    successor_codebook: Tensor,
    temperature: Tensor | None,
    uniforms: Tensor | None,
) -> None:
    got = (
        f"selector_walk got gate {list(gate.shape)}, anchors {list(anchors.shape)}, candidates "
        f"{list(candidates.shape)}, logits {list(logits.shape)}, codebooks {list(predecessor_codebook.shape)} and "
        f"{list(successor_codebook.shape)}"
    )
    if gate.dim() != 3 or candidates.dim() != 3 or candidates.shape[-1] == 0 or predecessor_codebook.dim() != 2:
        raise ValueError(f"{got}; expected gate [R, k, r], candidates [R, k, C >= 1], codebooks [V, r].")
    if gate.shape[:2] != candidates.shape[:2] or logits.shape != candidates.shape or anchors.shape != gate.shape[:1]:
        raise ValueError(f"{got}; expected anchors [R] and logits like the candidates, for the same R and k.")
    table = predecessor_codebook.shape
    if successor_codebook.shape != table or table[1] != gate.shape[-1] or 0 in table:
        raise ValueError(f"{got}; expected two codebooks [V >= 1, r] of the gate's rank.")
    if (temperature is None) != (uniforms is None):
        raise ValueError("selector_walk needs temperature and uniforms, or neither: one was left out.")
    if temperature is None or uniforms is None:
        return
    if temperature.shape != anchors.shape or uniforms.shape != gate.shape[:2]:
        raise ValueError(
            f"{got}, temperature {list(temperature.shape)}, uniforms {list(uniforms.shape)}; expected [R], [R, k]."
        )
