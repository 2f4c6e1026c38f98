from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def toy_llama():
    """A random Llama small enough for thousands of steps; its embedding is scaled up so that it has opinions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)
