"""From a GGUF file of SmolLM2 to a folder that Transformers loads like any other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from dflash2.errors import CheckpointError

__all__ = ["convert"]

# What SmolLM2's tokenizer makes of a chat turn.
_PROBE = "<|im_start|>user\nHi  42<|im_end|>\n"
_PROBE_IDS = [1, 4093, 198, 26843, 216, 216, 36, 34, 2, 198]


def convert(gguf: Path, folder: Path) -> None:
    """Write model, generation settings and tokenizer of a GGUF file as a bf16 Transformers folder.

    Args:
        gguf: a GGUF file of a SmolLM2 model.
        folder: an existing, empty folder.

    Raises:
        CheckpointError: this release of Transformers reads the file's tokenizer wrongly.
    """
    import torch
    import transformers

    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    _check_tokenizer(tokenizer, gguf)
    # Not dequantized by name, a model from GGUF counts as quantized and is not saved.
    dequantize = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), **where, dtype=torch.bfloat16, quantization_config=dequantize
    )
    _set_special_tokens(tokenizer, model.config)
    # The GGUF file names one end token; the base model's <|endoftext|> ends an answer too.
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # written readable by their owner only; a cache may be shared
        shutil.copymode(folder / "config.json", weights)


def _set_special_tokens(tokenizer: Any, config: Any) -> None:
    """Take the special tokens from the model: Transformers 5.17 reads eos as <|im_start|> and no pad from this file."""
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = tokenizer.convert_ids_to_tokens(
        [config.bos_token_id, config.eos_token_id, config.pad_token_id]
    )
    tokenizer.model_max_length = config.max_position_embeddings


def _check_tokenizer(tokenizer: Any, gguf: Path) -> None:
    """Refuse a tokenizer read wrongly: Transformers 5.3 made a Code Llama tokenizer of this file, without a word."""
    import transformers

    found = tokenizer(_PROBE).input_ids
    if found != _PROBE_IDS:
        raise CheckpointError(
            f"Transformers {transformers.__version__} reads the tokenizer of {gguf.name} as one that gives {found} for "
            f"{_PROBE!r}; expected {_PROBE_IDS}. Upgrade transformers, or give the GGUF file of a SmolLM2 model."
        )
