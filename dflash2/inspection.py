"""What a checkpoint is: shapes, window, taps, bytes, and whether it fits a target."""

from __future__ import annotations

from typing import Any

from dflash2.config import DFlash2Config
from dflash2.drafter import DFlash2Drafter
from dflash2.int8_linear import has_int8_linears, int8_saving

__all__ = ["describe", "propose_bytes"]


def propose_bytes(
    c: DFlash2Config, weight_bytes: int, context: int, item: int = 2, head_item: int = 2
) -> dict[str, int]:
    """Bytes one `propose` of one sequence must move, by part.

    Args:
        c: the drafter.
        weight_bytes: bytes of all weights but the codebooks, which are only gathered from.
        context: visible context rows.
        item: bytes per stored element of context rows and codebooks.
        head_item: bytes per element of the target's head: 2 for 16-bit, 1 for int8.
    """
    return {
        "drafter weights": weight_bytes,
        "target head": head_item * c.vocab_size * c.hidden_size,
        "context rows": 2 * item * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * context,
        "codebook rows": 2 * item * c.max_draft_tokens * c.selector_top_k * c.selector_rank,
    }


def describe(drafter: DFlash2Drafter, page_size: int = 16) -> dict[str, Any]:
    """Facts about a loaded drafter, ready for printing or JSON. Sizes in bytes, in the dtype it was loaded in."""
    c = drafter.config
    tensors = drafter.state_dict()  # parameters, and the weights and scales of int8 linears
    size = sum(t.nbytes for t in tensors.values())
    read = size - sum(t.nbytes for name, t in tensors.items() if "_codebook" in name)
    item = drafter.dtype.itemsize
    row = 2 * item * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    retention = c.retention
    context = retention if retention is not None else c.max_position_embeddings or 0
    pages = c.window_pages(page_size)
    return {
        "architecture": c.architecture,
        "parameters": sum(t.numel() for name, t in tensors.items() if not name.endswith(".scale")),
        "weight_bytes": size,
        "dtype": str(drafter.dtype).removeprefix("torch."),
        "int8 linears": has_int8_linears(drafter),
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "heads (query/kv/dim)": f"{c.num_attention_heads}/{c.num_key_value_heads}/{c.head_dim}",
        "vocab_size": c.vocab_size,
        "block_size": c.block_size,
        "drafts per block": c.max_draft_tokens,
        "mask_token_id": c.mask_token_id,
        "taps (outputs of target layers)": list(c.target_layer_ids),
        "num_target_layers": c.num_target_layers,
        "window per layer": ["full" if w is None else w for w in c.windows],
        "causal in the block": list(c.causal),
        "convolution (taps, group)": [c.conv_kernel_size, c.conv_group_size] if c.has_conv else None,
        "selector (candidates, rank)": [c.selector_top_k, c.selector_rank] if c.has_selector else None,
        "output multiplier, softcap": [c.output_multiplier, c.final_logit_softcapping],
        "rope": c.rope_parameters,
        "mask embedding of its own": drafter.mask_embedding is not None,
        "kv_bytes_per_token": row,
        f"kv_pages_per_sequence (of {page_size})": pages
        if pages is not None
        else "grows: a layer attends to everything",
        "kv_bytes_per_sequence": None if pages is None else pages * page_size * row,
        "bytes_per_propose": propose_bytes(c, read, context, item, item),
        "bytes_per_propose_int8_head": propose_bytes(c, read, context, item, 1),
        "bytes_per_propose_int8_all": propose_bytes(c, read - int8_saving(drafter), context, item, 1),
    }
