"""Bytes that must move, so that a time can be held against the memory's speed.

Every tensor that a call needs whole counts once per call: weights, the visible context rows, what comes in and goes
out. Activations between kernels do not: they are small and stay in the cache. Nothing that a better implementation
could avoid is counted, with one exception that the interface fixes: `append` and `propose` are two calls, and both
read the key and value projections (105 MB of 5.0 GB at the 27B drafter; they do not survive in 50 MB of L2 cache).

Sizes are those of `DFlash2Config`; activations, rows and 16-bit weights take 2 bytes an element, int8 weights take 1
and 4 for the scale of each output row.
"""

from __future__ import annotations

from dflash2.config import DFlash2Config

__all__ = ["append_bytes", "context_bytes", "head_bytes", "matrix_bytes", "propose_bytes", "round_bytes"]

HALF, ID, FLOAT = 2, 8, 4


def head_bytes(vocab: int, hidden: int, rows: int, candidates: int, *, int8: bool) -> int:
    """Fused top-C of ``rows`` hidden states: the head once, the rows in, ids and values out. No logits."""
    return matrix_bytes(vocab, hidden, int8) + rows * (HALF * hidden + candidates * (ID + FLOAT))


def context_bytes(c: DFlash2Config, start: int) -> int:
    """Stored rows that one sequence's block at ``start`` looks at, over all layers."""
    rows = [start if window is None else min(start, window - 1) for window in c.windows]
    return sum(rows) * _row(c)


def append_bytes(c: DFlash2Config, rows: int, stored: int, *, int8: bool = False) -> int:
    """Context rows of ``rows`` tokens that must be projected, ``stored`` of them kept; of all sequences together."""
    taps = len(c.target_layer_ids) * c.hidden_size
    kv = c.num_key_value_heads * c.head_dim
    weights = matrix_bytes(c.hidden_size, taps, int8) + HALF * c.hidden_size
    weights += c.num_hidden_layers * (2 * matrix_bytes(kv, c.hidden_size, int8) + HALF * c.head_dim)
    return weights + rows * HALF * taps + stored * c.num_hidden_layers * _row(c)


def propose_bytes(c: DFlash2Config, sequences: int, start: int, *, int8_head: bool, int8_linears: bool = False) -> int:
    """One block of k drafts for each sequence: layers, head, visible context, gathered rows, drafts out."""
    k, r, candidates = c.max_draft_tokens, c.selector_rank, c.selector_top_k
    weights = c.num_hidden_layers * _layer(c, int8_linears) + HALF * c.hidden_size + HALF * r * c.hidden_size
    embedded = (sequences + 1) * HALF * c.hidden_size  # the anchors' rows, and one for all masks
    codebooks = sequences * k * candidates * 2 * r * HALF  # of both tables, as SPEC 6.2 counts
    out = sequences * k * (1 + candidates) * ID
    head = head_bytes(c.vocab_size, c.hidden_size, 0, candidates, int8=int8_head)
    return weights + head + sequences * context_bytes(c, start) + embedded + codebooks + out


def round_bytes(
    c: DFlash2Config, sequences: int, start: int, rows: int, stored: int, *, int8_head: bool, int8_linears: bool = False
) -> int:
    """One decoding round of the drafter: `append` of ``rows`` tokens a sequence, ``stored`` of them kept, and `propose`
    at ``start``.
    """
    appended = append_bytes(c, sequences * rows, sequences * stored, int8=int8_linears)
    return appended + propose_bytes(c, sequences, start, int8_head=int8_head, int8_linears=int8_linears)


def matrix_bytes(out: int, inner: int, int8: bool) -> int:
    """A weight ``[out, inner]``, and its scales."""
    return out * inner + FLOAT * out if int8 else HALF * out * inner


def _row(c: DFlash2Config) -> int:
    """Key and value of one position in one layer."""
    return 2 * c.num_key_value_heads * c.head_dim * HALF


def _layer(c: DFlash2Config, int8: bool) -> int:
    """All weights of a draft layer: products, two convolutions, norms."""
    h, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    products = [(q, h), (kv, h), (kv, h), (h, q), *[(c.intermediate_size, h)] * 2, (h, c.intermediate_size)]
    vectors = 2 * h + 2 * c.head_dim
    if c.has_conv:
        taps = 2 * c.conv_kernel_size
        products += 2 * [(taps * (h // c.conv_group_size), h)]
        vectors += 2 * taps * h
    return sum(matrix_bytes(out, inner, int8) for out, inner in products) + HALF * vectors
