"""Tiny drafters whose proposals really depend on the context, and ways to feed them."""

from __future__ import annotations

from functools import lru_cache

import torch
from hypothesis import strategies as st
from oracle import Oracle
from torch import Tensor

from dflash2 import DFlash2Config, DFlash2Drafter
from dflash2.ops.window_attention import PagedContext

SLIDING, FULL = "sliding_attention", "full_attention"


def tiny_config(**changes) -> DFlash2Config:
    """v2, two sliding layers of window 8, block 4, vocabulary 37."""
    fields = {
        "architecture": "DFlash2DraftModel",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 37,
        "mask_token_id": 36,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "rope_parameters": {"rope_theta": 1e4},
        "block_size": 4,
        "layer_types": (SLIDING, SLIDING),
        "sliding_window": 8,
        "is_causal": False,
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 6,
        "selector_top_k": 5,
        "dtype": "float32",
    }
    fields |= changes
    if "num_hidden_layers" in changes and "layer_types" not in changes:
        fields["layer_types"] = (SLIDING,) * changes["num_hidden_layers"]
    if "layer_types" in changes:
        fields["num_hidden_layers"] = len(changes["layer_types"])
    if fields["architecture"] == "DFlashDraftModel":
        fields |= dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), 0)
    return DFlash2Config(**fields)


@st.composite
def configs(draw) -> DFlash2Config:
    """Every mix that changes what a query sees or what a candidate scores."""
    layers = draw(st.integers(1, 3))
    block = draw(st.integers(2, 8))
    pick = {
        "hidden_size": [16, 24],
        "sliding_window": [1, 2, 3, 4, 5, 8, 13, 64],
        "is_causal": [None, True, False],
        "conv_kernel_size": list(range(1, min(3, block) + 1)),
        "conv_group_size": [1, 4, 8],
        "selector_top_k": [1, 2, 5],
        "num_key_value_heads": [1, 2, 4],
        "attention_bias": [False, True],
        "output_multiplier": [1.0, 0.2],
        "final_logit_softcapping": [None, 3.0],
        "input_embedding_scale": [1.0, 2.5],
        "architecture": ["DFlash2DraftModel", "DFlash2DraftModel", "DFlashDraftModel"],
        "target_layer_ids": [(1,), (0, 2), (0, 1, 3)],
    }
    changes = {name: draw(st.sampled_from(values)) for name, values in pick.items()}
    kinds = tuple(draw(st.sampled_from([SLIDING, FULL])) for _ in range(layers))
    return tiny_config(block_size=block, layer_types=kinds, **changes)


def _set_weights(drafter: DFlash2Drafter, generator: torch.Generator) -> None:
    """Far from the initial std of 0.02: sharp attention, values as large as the residual stream."""
    for name, p in drafter.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("base_kernel"):
            value = 0.4 * noise
            value[:, 0] += 1
        elif "norm" in name:
            value = (2.0 if "q_norm" in name or "k_norm" in name else 1.0) * (1 + 0.3 * noise)
        elif "codebook" in name or p.dim() == 1:
            value = noise
        else:
            gain = {"kernel_projection": 0.4, "v_proj": 2.0, "o_proj": 2.0}
            value = noise * next((g for part, g in gain.items() if part in name), 1.0) / p.shape[-1] ** 0.5
        p.data.copy_(value)


@lru_cache(maxsize=20_000)
def _tap(position: int, branch: int, width: int) -> Tensor:
    g = torch.Generator().manual_seed(position * 7919 + branch * 104729 + 1)
    return torch.randn(width, generator=g)


class Toy:
    """A drafter, its target's tables, and the oracle that reads the same weights."""

    def __init__(self, config: DFlash2Config, seed: int = 0, dtype: torch.dtype = torch.float32, padded_rows: int = 3):
        self.config = config
        g = torch.Generator().manual_seed(seed)
        self.drafter = DFlash2Drafter(config, dtype=dtype).requires_grad_(False)
        _set_weights(self.drafter, g)
        rows = config.vocab_size + padded_rows
        self.embed = torch.randn(rows, config.hidden_size, generator=g).to(dtype)
        self.head = (torch.randn(rows, config.hidden_size, generator=g)).to(dtype)
        self.head[config.vocab_size :] *= 100  # padding that would win if it were not masked
        self.drafter.bind_target(self.embed, self.head)
        self.oracle = Oracle(self.drafter, self.embed, self.head)
        self.tap_width = len(config.target_layer_ids) * config.hidden_size

    def taps(self, first: int, end: int, branch: int = 0) -> Tensor:
        """``[end - first, T*H]``; position and branch decide a row, so any split gives the same rows."""
        rows = [_tap(position, branch, self.tap_width) for position in range(first, end)]
        return (torch.stack(rows) if rows else torch.empty(0, self.tap_width)).to(self.drafter.dtype)

    def context(self, first: int, end: int, branch: int = 0) -> dict[int, Tensor]:
        return {first + i: row for i, row in enumerate(self.taps(first, end, branch))}

    def append(self, kv, seq: int, first: int, end: int, branch: int = 0, **kw) -> None:
        self.drafter.append(kv, [seq], self.taps(first, end, branch), [first], [end - first], **kw)

    def hidden(self, call) -> tuple[object, Tensor]:
        """The call's result, and the final hidden states ``[R, k+1, H]`` that it went through."""
        caught: list[Tensor] = []
        handle = self.drafter.norm.register_forward_hook(lambda module, args, out: caught.append(out))
        try:
            result = call()
        finally:
            handle.remove()
        return result, caught[-1]


def positions_there(kv, slot: int, end: int) -> list[int]:
    """Positions before ``end`` whose rows a query of this slot would find."""
    context = PagedContext(kv.tags, kv.page_table, torch.tensor([slot]), torch.tensor([end]), kv.page_size, kv.ring)
    return (end - kv.ring + context.there[0].nonzero()[:, 0]).tolist()


def owned_rows(kv) -> Tensor:
    """bool over the rows of ``kv.keys``: those of pages that a sequence owns."""
    pages = kv.page_table[kv.page_table >= 0]
    owned = torch.zeros(kv.num_pages + 1, dtype=torch.bool, device=kv.device)
    owned[pages] = True
    return owned.repeat_interleave(kv.page_size)


def poison(kv, value: float = float("nan")) -> None:
    """Fill every row that holds nothing valid, as memory does: free pages, unwritten rows, the page nobody reads."""
    unused = ~owned_rows(kv) | (kv.tags < 0)
    kv.keys[:, unused] = value
    kv.values[:, unused] = value


def _chain(kv, seq: int) -> tuple[list, list] | None:
    chain = kv.chain(seq)
    return None if chain is None else (list(chain.tokens), list(chain.digests))


def snapshot(kv) -> dict:
    """All that a failed call must leave as it was."""
    owned, slots = owned_rows(kv), kv.slots(kv.open_sequences)
    valid = owned & (kv.tags >= 0)
    return {
        "spans": {q: kv.spans(q) for q in kv.open_sequences},
        "next": {q: kv.span(q)[1] for q in kv.open_sequences},
        "pages_in_use": kv.pages_in_use,
        "free_pages": sorted(kv._free_pages),
        "free_slots": sorted(kv._free_slots),
        "chains": {q: _chain(kv, q) for q in kv.open_sequences},
        "tags": torch.where(owned, kv.tags, -1),
        "table": kv.page_table.clone(),
        "device_next": kv.next[slots],
        "limit": kv.limit[slots],
        "faults": kv.faults[slots],
        "keys": kv.keys[:, valid].clone(),
        "values": kv.values[:, valid].clone(),
    }


def assert_same(before: dict, after: dict) -> None:
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, after[name]), name
        else:
            assert value == after[name], name
