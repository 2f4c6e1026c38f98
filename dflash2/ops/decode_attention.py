"""One decoding step of a layer's attention: a new token per row against a static cache of many sequences.

    k[slot, length] = rope(norm(k_new)),  v[slot, length] = v_new
    out = softmax over p <= length of (rope(norm(q)) . k[slot, p] / sqrt(hd)) . v[slot, p]

Every row reads as many cached positions as its sequence has, not as many as the longest has or as there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.ops.backend import Backend, check_devices, choose_backend
from dflash2.ops.launch import launch_settings
from dflash2.ops.residual_norm import rms_norm
from dflash2.rope import apply_rope

__all__ = ["HeadNorm", "decode_attention", "decode_attention_reference"]


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm of each query and key head before the rotation: weights ``[hd]`` in the dtype of the rows."""

    q: Tensor
    k: Tensor
    eps: float


def decode_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    norm: HeadNorm | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Store the new keys and values, and attend.

    Args:
        qkv: ``[R, (nq + 2 nkv) hd]``: queries, keys and values of the new tokens.
        keys, values: the cache of one layer, ``[slots, nkv, tokens, hd]``, contiguous. Position ``lengths[r]`` of slot
            ``slots[r]`` is written. Two rows of one slot may write either one's; what they return is unspecified.
        slots: int64 ``[R]``.
        lengths: int64 ``[R]``, cached tokens of each row's slot, below ``tokens``. Not checked: they are on the device.
        cos, sin: fp32 ``[R, hd/2]`` of the new positions.
        norm: of the heads, or None.
        backend: ``"auto"`` (the kernel on a GPU), ``"torch"`` (waits for the device, to know the longest row) or
            ``"triton"``.

    Returns:
        ``[R, nq hd]`` in the dtype of ``qkv``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend cannot run here.
    """
    heads = _check(qkv, keys, values, slots, lengths, cos, sin)
    norms = () if norm is None else (norm.q, norm.k)
    if choose_backend(backend, qkv, keys, values, *norms, dots=True) == "torch":
        return decode_attention_reference(qkv, keys, values, slots, lengths, cos, sin, norm)
    from dflash2.kernels import decode_attention as kernel

    rows, (_, kv_heads, tokens, head_dim) = max(1, qkv.shape[0]), keys.shape
    shape = {"rows": rows, "heads": kv_heads, "queries": heads // kv_heads, "head_dim": head_dim, "tokens": tokens}
    settings = launch_settings("decode_attention", kernel.DEFAULTS, qkv.device, **shape)
    weights = None if norm is None else (norm.q, norm.k, norm.eps)
    return kernel.decode_attention(qkv, keys, values, slots, lengths, cos, sin, weights, settings)


def decode_attention_reference(
    qkv: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor,
    norm: HeadNorm | None,
) -> Tensor:  # fmt: skip
    """The definition, in torch."""
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    if not len(qkv):
        return qkv.new_empty(0, qkv.shape[1] - 2 * kv_heads * head_dim)
    heads = qkv.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if norm is not None:
        q, k = rms_norm(q, norm.q, norm.eps), rms_norm(k, norm.k, norm.eps)
    q = apply_rope(q, cos, sin)
    keys[slots, :, lengths], values[slots, :, lengths] = apply_rope(k, cos, sin), v
    longest = int(lengths.max()) + 1
    seen = torch.arange(longest, device=lengths.device) <= lengths[:, None]
    # Copies, in which what was never written is nulled: a NaN there would survive a weight of zero.
    read_k, read_v = (x[slots, :, :longest].masked_fill_(~seen[:, None, :, None], 0) for x in (keys, values))
    out = F.scaled_dot_product_attention(q.unflatten(1, (kv_heads, -1)), read_k, read_v, seen[:, None, None])
    return out.flatten(1)


def _check(qkv: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor) -> int:
    """The number of query heads."""
    shapes = (
        f"decode_attention got qkv {list(qkv.shape)}, keys {list(keys.shape)}, values {list(values.shape)}, slots "
        f"{list(slots.shape)}, lengths {list(lengths.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
    )
    if keys.dim() != 4 or keys.shape != values.shape or not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError(f"{shapes}; expected contiguous keys and values [slots, nkv, tokens, hd].")
    _, kv_heads, _, head_dim = keys.shape
    heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    if qkv.dim() != 2 or heads < kv_heads or heads % kv_heads or qkv.shape[1] != (heads + 2 * kv_heads) * head_dim:
        raise ValueError(f"{shapes}; expected qkv [R, (nq + 2 nkv) hd] with nq a multiple of nkv={kv_heads}.")
    rows, half = qkv.shape[0], (qkv.shape[0], head_dim // 2)
    if slots.shape != (rows,) or lengths.shape != (rows,) or cos.shape != half or sin.shape != half or head_dim % 2:
        raise ValueError(f"{shapes}; expected slots and lengths [R], cos and sin [R, hd/2] with hd even.")
    if (
        keys.dtype != qkv.dtype
        or values.dtype != qkv.dtype
        or slots.dtype != lengths.dtype
        or slots.dtype != torch.int64
    ):
        raise ValueError(
            f"decode_attention got qkv {qkv.dtype}, keys {keys.dtype}, values {values.dtype}, slots {slots.dtype}, "
            f"lengths {lengths.dtype}; expected one floating-point dtype, and int64."
        )
    check_devices("decode_attention", qkv, keys, values, slots, lengths, cos, sin)
    return heads
