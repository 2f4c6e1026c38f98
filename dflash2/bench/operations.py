"""Operations one by one, on a drafter's shapes: for their time, their launch settings, and a check of their kernels.

An operation is made with fresh inputs as often as it takes to fill the L2 cache several times over, and the calls
alternate. Those of a few hundred kilobytes find their inputs in the cache all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dflash2.bench.traffic import FLOAT, HALF, ID, head_bytes, matrix_bytes
from dflash2.config import DFlash2Config
from dflash2.ops.backend import Backend
from dflash2.ops.block_linear import block_linear, gated_linear
from dflash2.ops.dense_topk import dense_topk
from dflash2.ops.grouped_conv import grouped_conv
from dflash2.ops.int8_head import int8_head_top
from dflash2.ops.int8_rows import quantize_rows
from dflash2.ops.row_linear import row_linear
from dflash2.ops.selector_walk import selector_walk
from dflash2.ops.verify import verify
from dflash2.ops.window_attention import PagedContext, window_attention

__all__ = ["Inputs", "Operation", "operations", "prefill_operations"]

#: Several times the L2 cache of any GPU so far.
COLD_BYTES = 256 << 20
MOST_COPIES = 24

#: ``call(backend)``.
Call = Callable[[Backend], Any]


@dataclass(frozen=True)
class Inputs:
    """Random tensors where and in what they are wanted."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        """Of mean 0."""
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_(std=std)

    def ids(self, below: int, *shape: int) -> Tensor:
        """int64 in [0, below)."""
        return torch.randint(below, shape, device=self.device)

    def weight(self, out: int, inner: int, int8: bool) -> tuple[Tensor, Tensor | None]:
        """``[out, inner]``, and its scale where it is int8."""
        weight = self.normal(out, inner, std=0.02)
        return quantize_rows(weight) if int8 else (weight, None)


@dataclass(frozen=True)
class Operation:
    """One operation on one shape.

    Attributes:
        name: what is unique about it.
        op: as launch settings know it.
        num_bytes: that a call must move.
        make: a call on fresh inputs.
    """

    name: str
    op: str
    num_bytes: int
    make: Callable[[Inputs], Call]

    def calls(self, inputs: Inputs, backend: Backend = "auto") -> list[Callable[[], Any]]:
        """As many, each on inputs of its own, as keep a cache from holding them all."""
        copies = min(MOST_COPIES, math.ceil(COLD_BYTES / self.num_bytes))
        return [partial(self.make(inputs), backend) for _ in range(copies)]


def operations(c: DFlash2Config, sequences: int, label: str) -> list[Operation]:
    """All of a round of ``sequences`` sequences with a full window; names end in ``label``."""
    found = [
        *_context_products(c, sequences * c.block_size),
        *_linears(c, sequences * c.block_size),
        *_heads(c, sequences * c.max_draft_tokens),
        _attention(c, sequences),
        _walk(c, sequences),
        _verify(c, sequences),
        _conv(c, sequences),
    ]
    return [replace(o, name=f"{o.name}.{label}") for o in found]


def prefill_operations(c: DFlash2Config, rows: int, label: str) -> list[Operation]:
    """The products behind the context rows of ``rows`` tokens: features, then keys and values of all layers."""
    return [replace(o, name=f"{o.name}.{label}") for o in _context_products(c, rows)]


def _context_products(c: DFlash2Config, rows: int) -> list[Operation]:
    kv = c.num_key_value_heads * c.head_dim
    return [
        _row_linear("row_linear.fc", rows, len(c.target_layer_ids) * c.hidden_size, c.hidden_size),
        _row_linear("row_linear.kv", rows, c.hidden_size, 2 * c.num_hidden_layers * kv),
    ]


def _linears(c: DFlash2Config, rows: int) -> Iterator[Operation]:
    h, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    products = {"qkv": (h, [q, kv, kv]), "o": (q, [h]), "down": (c.intermediate_size, [h])}
    if c.has_conv:
        products["conv"] = (h, [2 * c.conv_kernel_size * (h // c.conv_group_size)])
    for int8 in (False, True):
        form = "int8" if int8 else "bf16"
        for part, (inner, outs) in products.items():
            moved = _product_bytes(rows, inner, sum(outs), int8)
            product = partial(_block_linear, rows, inner, outs, int8)
            yield Operation(f"block_linear.{part}.{form}", "block_linear", moved, product)
        moved = _product_bytes(rows, h, 2 * c.intermediate_size, int8)
        yield Operation(
            f"gated_linear.{form}", "gated_linear", moved, partial(_gated, rows, h, c.intermediate_size, int8)
        )


def _product_bytes(rows: int, inner: int, outs: int, int8: bool) -> int:
    return matrix_bytes(outs, inner, int8) + HALF * rows * (inner + outs)


def _row_linear(name: str, rows: int, inner: int, outs: int) -> Operation:
    def make(inputs: Inputs) -> Call:
        x, weight = inputs.normal(rows, inner), inputs.normal(outs, inner, std=0.02)
        return lambda backend: row_linear(x, weight, backend=backend)

    return Operation(name, "row_linear", _product_bytes(rows, inner, outs, False), make)


def _block_linear(rows: int, inner: int, outs: list[int], int8: bool, inputs: Inputs) -> Call:
    x = inputs.normal(rows, inner)
    weights, scales = zip(*(inputs.weight(out, inner, int8) for out in outs), strict=True)
    return lambda backend: block_linear(x, weights, scales, settled=True, backend=backend)


def _gated(rows: int, inner: int, outs: int, int8: bool, inputs: Inputs) -> Call:
    x = inputs.normal(rows, inner)
    (gate, gate_scale), (up, up_scale) = (inputs.weight(outs, inner, int8) for _ in range(2))
    return lambda backend: gated_linear(x, gate, up, (gate_scale, up_scale), settled=True, backend=backend)


def _heads(c: DFlash2Config, rows: int) -> Iterator[Operation]:
    def int8_head(inputs: Inputs) -> Call:
        x = inputs.normal(rows, c.hidden_size)
        weight, scale = quantize_rows(inputs.normal(c.vocab_size, c.hidden_size, std=0.02))
        return lambda backend: int8_head_top(x, weight, scale, count=c.selector_top_k, backend=backend)

    def dense_head(inputs: Inputs) -> Call:
        x, weight = inputs.normal(rows, c.hidden_size), inputs.normal(c.vocab_size, c.hidden_size, std=0.02)
        return lambda backend: dense_topk(x, weight, count=c.selector_top_k, backend=backend)

    sizes = (c.vocab_size, c.hidden_size, rows, c.selector_top_k)
    yield Operation("int8_head", "int8_head", head_bytes(*sizes, int8=True), int8_head)
    yield Operation("dense_topk", "dense_topk", head_bytes(*sizes, int8=False), dense_head)


def _attention(c: DFlash2Config, sequences: int) -> Operation:
    """The first layer's, over a full window of pages that lie in no order."""
    window, causal = c.windows[0], c.causal[0]
    length, page, n = (window or 2049) - 1, 16, c.block_size
    pages = -(-length // page) + 2

    def make(inputs: Inputs) -> Call:
        start = 2 * pages * page
        table = torch.randperm(sequences * pages, device=inputs.device).view(sequences, pages)
        tags = torch.full((sequences * pages * page,), -1, device=inputs.device)
        position = torch.arange(start - length, start, device=inputs.device)
        tags[table[:, position // page % pages] * page + position % page] = position
        slots = torch.arange(sequences, device=inputs.device)
        context = PagedContext(tags, table, slots, torch.full_like(slots, start), page, length)
        q = inputs.normal(sequences, n, c.num_attention_heads, c.head_dim)
        k, v = (inputs.normal(sequences, n, c.num_key_value_heads, c.head_dim) for _ in range(2))
        keys, values = (inputs.normal(tags.shape[0], c.num_key_value_heads, c.head_dim) for _ in range(2))
        return lambda backend: window_attention(
            q, k, v, keys, values, context, window=window, causal=causal, backend=backend
        )

    row = 2 * HALF * c.num_key_value_heads * c.head_dim
    block = n * (row + 2 * HALF * c.num_attention_heads * c.head_dim)
    return Operation("window_attention", "window_attention", sequences * (length * row + block), make)


def _walk(c: DFlash2Config, sequences: int) -> Operation:
    k, r, candidates = c.max_draft_tokens, c.selector_rank, c.selector_top_k

    def make(inputs: Inputs) -> Call:
        gate, anchors = inputs.normal(sequences, k, r), inputs.ids(c.vocab_size, sequences)
        ids = inputs.ids(c.vocab_size, sequences, k, candidates)
        logits = inputs.normal(sequences, k, candidates).float()
        before, after = (inputs.normal(c.vocab_size, r, std=0.1) for _ in range(2))
        return lambda backend: selector_walk(gate, anchors, ids, logits, before, after, backend=backend).tokens

    moved = sequences * k * (2 * candidates * r * HALF + r * HALF + candidates * (ID + FLOAT) + ID)
    return Operation("selector_walk", "selector_walk", moved, make)


def _verify(c: DFlash2Config, sequences: int) -> Operation:
    def make(inputs: Inputs) -> Call:
        tokens = inputs.ids(c.vocab_size, sequences, c.max_draft_tokens)
        valid = torch.ones(sequences, dtype=torch.bool, device=inputs.device)
        logits = inputs.normal(sequences, c.block_size, c.vocab_size)
        logits[:, :-1].scatter_(2, tokens[..., None], 100.0)
        return lambda backend: verify(tokens, valid, logits, backend=backend)

    return Operation("verify", "verify", sequences * c.block_size * c.vocab_size * HALF, make)


def _conv(c: DFlash2Config, sequences: int) -> Operation:
    taps, groups = c.conv_kernel_size, c.hidden_size // c.conv_group_size

    def make(inputs: Inputs) -> Call:
        x, base = inputs.normal(sequences, c.block_size, c.hidden_size), inputs.normal(taps, c.hidden_size)
        delta = inputs.normal(sequences, c.block_size, taps, groups)
        return lambda backend: grouped_conv(x, base, delta, backend=backend)

    rows = sequences * c.block_size
    return Operation("grouped_conv", "grouped_conv", HALF * (rows * (2 * c.hidden_size + taps * groups)), make)
