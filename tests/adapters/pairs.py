"""Tiny targets and drafters as folders. Their weights are far from the initial 0.02: outputs depend on the context."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import SLIDING, _set_weights

from dflash2 import DFlash2Config, DFlash2Drafter

BYTES = 256
SPECIAL = ("<eos>", "<bos>", "<pad>", "<mask>")
TAPS = (0, 2)
WINDOW = 48
K = 3  # drafts of a block


def make_pair(
    folder: Path, vocab: int = BYTES + len(SPECIAL), positions: int = 65_536, plain_qk: bool = False, **drafter
) -> tuple[str, str]:
    """Writes ``folder/target`` (with a byte tokenizer if the vocabulary has room) and ``folder/drafter``.

    ``plain_qk`` leaves the weights of q_norm and k_norm at 1.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(vocab)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=positions, rope_theta=1e6, dtype="float32",
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    for name, p in target.named_parameters():
        if p.dim() > 1:
            gain = 2.0 if "proj" in name else 1.0
            torch.nn.init.normal_(p, std=1.0 if "embed" in name else gain / p.shape[1] ** 0.5)
    target.save_pretrained(folder / "target")
    if vocab >= BYTES + len(SPECIAL):
        _byte_tokenizer().save_pretrained(folder / "target")
    made = DFlash2Drafter(drafter_config(vocab, positions, **drafter)).requires_grad_(False)
    _set_weights(made, torch.Generator().manual_seed(1))
    if plain_qk:
        for name, p in made.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                p.fill_(1.0)
    made.save_pretrained(folder / "drafter")
    return str(folder / "target"), str(folder / "drafter")


def drafter_config(vocab: int, positions: int = 65_536, **changes) -> DFlash2Config:
    fields = {
        "architecture": "DFlash2DraftModel", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": vocab,
        "mask_token_id": vocab - 1, "target_layer_ids": TAPS, "num_target_layers": 3,
        "rope_parameters": {"rope_theta": 1e4}, "block_size": 4, "layer_types": (SLIDING, SLIDING),
        "sliding_window": WINDOW, "is_causal": False, "conv_kernel_size": 2, "conv_group_size": 16,
        "selector_rank": 8, "selector_top_k": 6, "max_position_embeddings": positions, "dtype": "float32",
    }  # fmt: skip
    if changes.get("architecture") == "DFlashDraftModel":
        changes |= dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), 0)
    return DFlash2Config(**fields | changes)


def _byte_tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")
