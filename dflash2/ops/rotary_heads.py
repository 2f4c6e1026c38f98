"""Queries, keys and values of block rows from their products: bias, norm per head, rotation by absolute position."""

from __future__ import annotations

from torch import Tensor

from dflash2.ops.backend import Backend, choose_backend
from dflash2.ops.residual_norm import rms_norm
from dflash2.rope import apply_rope

__all__ = ["rotary_heads", "rotary_heads_reference"]


def rotary_heads(
    qkv: Tensor, biases: tuple[Tensor, Tensor, Tensor] | None, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor,
    sin: Tensor, heads: tuple[int, int], *, backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Split the products into heads; norm and rotate queries and keys.

    Args:
        qkv: ``[S, N, (nq + 2 nkv) hd]`` from `block_linear`.
        biases: of q, k and v, or None.
        q_norm, k_norm: weights ``[hd]``; their dtype is the result's.
        eps: of the norms.
        cos, sin: fp32 ``[N, hd/2]``.
        heads: (nq, nkv).
        backend: ``"auto"`` (the kernel on a GPU), ``"torch"`` or ``"triton"``.

    Returns:
        q ``[N, nq, hd]``, k and v ``[N, nkv, hd]``.

    Raises:
        ValueError: the backend cannot run here.
    """
    if choose_backend(backend, q_norm) == "torch":
        return rotary_heads_reference(qkv, biases, q_norm, k_norm, eps, cos, sin, heads)
    from dflash2.kernels import rotary_heads as kernel

    return kernel.rotary_heads(qkv, biases, q_norm, k_norm, eps, cos, sin, *heads)


def rotary_heads_reference(
    qkv: Tensor, biases: tuple[Tensor, Tensor, Tensor] | None, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor,
    sin: Tensor, heads: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The definition, in torch; rounds where the network's modules round."""
    (nq, nkv), head_dim = heads, q_norm.shape[0]
    parts = qkv.sum(0).split((nq * head_dim, nkv * head_dim, nkv * head_dim), -1)
    if biases is not None:
        parts = [p + b.to(p.dtype) for p, b in zip(parts, biases, strict=True)]
    q, k, v = (p.to(q_norm.dtype).unflatten(-1, (-1, head_dim)) for p in parts)
    return apply_rope(rms_norm(q, q_norm, eps), cos, sin), apply_rope(rms_norm(k, k_norm, eps), cos, sin), v
