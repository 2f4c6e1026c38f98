from __future__ import annotations

import numpy as np
import pytest
import torch

#: Ids that no training document of the toy target holds: masks.
UNUSED = {1, 60}


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


@pytest.fixture(scope="session")
def toy_target_folder(toy_llama, tmp_path_factory):
    """The random Llama as a Transformers folder; its tokenizer knows the words w3 to w60."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("toy-llama")
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 61))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    toy_llama.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shard(toy_llama, tmp_path_factory):
    """Greedy answers of the toy target, 24 documents, none of which holds the ids `UNUSED`."""
    rng, documents, plens = np.random.default_rng(0), [], []
    while len(documents) < 24:
        prompt = torch.from_numpy(rng.integers(3, 60, (1, rng.integers(4, 9))))
        out = toy_llama.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=36, do_sample=False)
        if not UNUSED & set(out[0].tolist()):
            documents.append(out[0].numpy())
            plens.append(prompt.shape[1])
    path = tmp_path_factory.mktemp("shards") / "a.npz"
    lens = [len(d) for d in documents]
    np.savez(path, tokens=np.concatenate(documents), lens=lens, plens=plens, temps=np.zeros(24))
    return path
