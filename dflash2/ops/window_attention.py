"""Attention of block rows over paged, window-bounded context rows and the block itself.

    out[i] = softmax over visible p of (q[i] . k[p] / sqrt(hd)) . v[p],   query i at position start + i

A context row p < start is visible when it is really there (its tag is p) and ``start + i - p < W`` on a sliding layer;
the rows of the block are visible as `dflash2.ops.visibility.block_visible` says. What no query sees is never read into
a result: it may be evicted, stale, another sequence's or never written, NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.ops.backend import Backend, choose_backend
from dflash2.ops.launch import launch_settings
from dflash2.ops.visibility import block_visible, context_visible

__all__ = ["PagedContext", "masked_attention", "stored_rows_reference", "window_attention"]


@dataclass(frozen=True, eq=False)
class PagedContext:
    """Where the context rows of R sequences lie. One object serves all layers of a pass: what they share is kept.

    The row of position p is ``page_table[slot, p // page_size % ring_pages] * page_size + p % page_size``; it is there
    if that page is owned and ``tags`` at the row is p.

    Args:
        tags: int64 ``[rows]``, the position that each row was written for.
        page_table: int64 ``[slots, ring_pages]``, -1 where no page is owned.
        slots: int64 ``[R]``.
        starts: int64 ``[R]``, position of each block's first row. Context lies before it.
        page_size: rows per page.
        length: how many positions before each start are worth looking at. Rows further back are not seen.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """

    tags: Tensor
    page_table: Tensor
    slots: Tensor
    starts: Tensor
    page_size: int
    length: int
    _kept: dict[object, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        tensors = (self.tags, self.page_table, self.slots, self.starts)
        if [t.dim() for t in tensors] != [1, 2, 1, 1] or self.slots.shape != self.starts.shape:
            raise ValueError(
                f"PagedContext got tags {list(self.tags.shape)}, page_table {list(self.page_table.shape)}, slots "
                f"{list(self.slots.shape)}, starts {list(self.starts.shape)}; expected [rows], [slots, ring_pages], "
                "[R], [R]."
            )
        if any(t.dtype != torch.int64 or t.device != self.tags.device for t in tensors):
            raise ValueError(
                f"PagedContext got {[f'{t.dtype} on {t.device}' for t in tensors]}; expected int64 on one device."
            )
        if self.page_size < 1 or self.length < 0:
            raise ValueError(f"PagedContext got page_size={self.page_size}, length={self.length}; expected >= 1, >= 0.")

    def rows(self, backend: str = "torch") -> Tensor:
        """Row of each of the ``length`` positions before the start, ascending, ``[R, length]``; -1 where none is."""
        if "rows" not in self._kept:
            if backend == "triton":
                from dflash2.kernels import window_attention as kernel

                self._kept["rows"] = kernel.stored_rows(
                    self.tags, self.page_table, self.slots, self.starts, page_size=self.page_size, length=self.length,
                )  # fmt: skip
            else:
                self._kept["rows"] = stored_rows_reference(self)
        return self._kept["rows"]

    @property
    def there(self) -> Tensor:
        """Whether the row of each of those positions is really there, bool ``[R, length]``."""
        return self.rows() >= 0

    def visible(self, n: int, *, window: int | None, causal: bool) -> Tensor:
        """What n block rows see of `rows` and of themselves, bool ``[R, n, length + n]``."""
        rule = (n, window, causal)
        if rule not in self._kept:
            start, offsets = self.starts[:, None], torch.arange(-self.length, n, device=self.starts.device)
            key, query = start + offsets[: self.length], start + offsets[self.length :]
            context = context_visible(query[..., None], key[:, None], start[..., None], window=window)
            block = block_visible(query[..., None], query[:, None], window=window, causal=causal)
            self._kept[rule] = torch.cat((context & self.there[:, None], block), -1)
        return self._kept[rule]


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    context: PagedContext,
    *,
    window: int | None,
    causal: bool,
    backend: Backend = "auto",
) -> Tensor:
    """Attend from every row of R blocks.

    Args:
        q: ``[R, n, nq, hd]``, normed and rotated.
        k, v: rows of the block ``[R, n, nkv, hd]``, nkv a divisor of nq.
        context_keys, context_values: one layer of the pool, ``[rows, nkv, hd]``.
        context: which of their rows belong to the sequences.
        window: W, counting the query itself, or None for full attention.
        causal: whether a row sees only those of its block up to itself.
        backend: ``"auto"`` (the kernel on a GPU when no gradient is needed), ``"torch"`` or ``"triton"``.

    Returns:
        ``[R, n, nq, hd]`` in the dtype of ``q``. Every row sees at least itself.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend cannot run here.
    """
    _check(q, k, v, context_keys, context_values, context, window)
    if choose_backend(backend, q, k, v, context_keys, context_values, dots=True) == "torch":
        rows = context.rows().clamp_min(0)
        visible = context.visible(q.shape[1], window=window, causal=causal)
        return masked_attention(q, k, v, context_keys[rows], context_values[rows], visible)
    from dflash2.kernels import window_attention as kernel

    requests, n, heads, head_dim = q.shape
    shape = {"requests": requests, "queries": n * heads // k.shape[2], "heads": k.shape[2], "head_dim": head_dim}
    settings = launch_settings("window_attention", kernel.DEFAULTS, q.device, **shape, context=context.length + 1)
    return kernel.window_attention(
        q, k, v, context_keys, context_values, context.rows("triton"),
        window=window, causal=causal, settings=settings,
    )  # fmt: skip


def masked_attention(q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, visible: Tensor) -> Tensor:
    """The definition once rows and masks are known: softmax attention, scale 1/sqrt(hd), grouped heads.

    Args:
        q: ``[R, n, nq, hd]``.
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


def stored_rows_reference(context: PagedContext) -> Tensor:
    """The definition of `PagedContext.rows`, int64."""
    c = context
    position = c.starts[:, None] + torch.arange(-c.length, 0, device=c.starts.device)
    place = position.clamp_min(0) // c.page_size % c.page_table.shape[1]
    page = c.page_table[c.slots[:, None], place]
    row = page.clamp_min(0) * c.page_size + position.clamp_min(0) % c.page_size
    return torch.where((page >= 0) & (position >= 0) & (c.tags[row] == position), row, -1)


def _check(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, context: PagedContext, window: int | None
) -> None:
    shapes = (
        f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, context_keys {list(keys.shape)}, context_values "
        f"{list(values.shape)} and a context of {len(context.slots)} sequences and {len(context.tags)} rows"
    )
    if q.dim() != 4 or k.dim() != 4 or keys.dim() != 3 or k.shape != v.shape or keys.shape != values.shape:
        raise ValueError(
            f"window_attention got {shapes}; expected q [R, n, nq, hd], k and v [R, n, nkv, hd], context_keys and "
            "context_values [rows, nkv, hd]."
        )
    requests, n, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if k.shape != (requests, n, kv_heads, head_dim) or keys.shape[1:] != (kv_heads, head_dim):
        raise ValueError(f"window_attention got {shapes}; R, n, nkv and hd must agree.")
    if len(context.slots) != requests or len(context.tags) != len(keys):
        raise ValueError(f"window_attention got {shapes}; the context must have R sequences and a tag for each row.")
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"window_attention got {shapes}; the {kv_heads} key heads must divide the {heads} heads.")
    if window is not None and window < 1:
        raise ValueError(f"window_attention got window={window}; a window counts the query itself: at least 1.")
    tensors = (q, k, v, keys, values)
    if any(t.dtype != q.dtype or t.device != context.tags.device for t in tensors):
        found = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        raise ValueError(
            f"window_attention got {found} and a context on {context.tags.device}; expected one dtype on one device."
        )
