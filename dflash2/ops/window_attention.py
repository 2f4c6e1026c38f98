"""Attention of block rows over gathered context rows and the block itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["window_attention"]


def window_attention(q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention, scale 1/sqrt(hd), grouped heads.

    Args:
        q: block queries ``[R, n, nq, hd]``.
        k, v: block rows ``[R, n, nkv, hd]``.
        context_k, context_v: context rows ``[R, S, nkv, hd]``. Rows no query sees may hold anything, NaN included.
        visible: bool ``[R, n, S + n]``, context first. Every query sees at least itself.

    Returns:
        ``[R, n, nq, hd]`` in q's dtype.
    """
    read = visible[..., : context_k.shape[1]].any(1)[..., None, None]
    k = torch.cat((context_k.masked_fill(~read, 0), k), 1).transpose(1, 2)
    v = torch.cat((context_v.masked_fill(~read, 0), v), 1).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=visible[:, None], enable_gqa=q.shape[2] != k.shape[1]
    )
    return out.transpose(1, 2)
