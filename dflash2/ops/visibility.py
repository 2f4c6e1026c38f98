"""Which keys a query may see. The one definition that inference, training and the kernels share."""

from __future__ import annotations

from torch import Tensor

__all__ = ["block_visible", "context_visible"]


def _within(query: Tensor, key: Tensor, window: int | None, causal: bool) -> Tensor:
    """``causal: key <= query``; ``window: |query - key| < W``, the right side only when not causal."""
    distance = query - key
    visible = distance == distance  # all true, whatever kind of tensor flex attention passes in
    if causal:
        visible = visible & (distance >= 0)
    if window is not None:
        visible = visible & (distance < window) & (-distance < window)
    return visible


def context_visible(query: Tensor, key: Tensor, start: Tensor, *, window: int | None) -> Tensor:
    """Context rows are those before the anchor; a sliding layer adds ``query - key < W`` *per query*.

    Args:
        query: absolute position of a block row, int, broadcastable.
        key: absolute position of a context row, int, broadcastable.
        start: position of the block's anchor, int, broadcastable.
        window: W, counting the query itself, or None for full attention.

    Returns:
        bool, broadcast shape. Causality is moot here: the context lies before every block row.
    """
    return (key < start) & _within(query, key, window, causal=False)


def block_visible(query: Tensor, key: Tensor, *, window: int | None, causal: bool) -> Tensor:
    """Rows of the same block: all of them, or those up to the query when causal, within the window on both sides."""
    return _within(query, key, window, causal)
