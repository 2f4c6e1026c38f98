import os
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Before any kernel is imported: without a GPU the real kernels run in Triton's interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def kernel_device() -> str:
    """Where Triton kernels run in this session."""
    pytest.importorskip("triton", reason="triton is not installed")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "cpu" if interpreted else "cuda"


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> tuple[str, str]:
    """A random Llama of 50 words with a tokenizer, and a drafter for it: two folders."""
    from test_generate import SHAPE, drafter
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    root: Path = tmp_path_factory.mktemp("pair")
    vocabulary = ["<unk>", "<pad>", "<eos>", "<mask>", *(f"w{i}" for i in range(46))]
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>", "mask_token": "<mask>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(root / "target")
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"pad_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}))
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(root / "target")
    drafter().save_pretrained(root / "drafter")
    return str(root / "target"), str(root / "drafter")
