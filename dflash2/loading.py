"""A target and a drafter by name, path or hub id, ready to run on one device."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from dflash2.drafter import DFlash2Drafter
from dflash2.errors import CheckpointError, ConfigError
from dflash2.lm_head import Int8LMHead
from dflash2.targets import EMBEDDED_TARGET, resolve_target

__all__ = ["int8_head", "load_pair", "load_target", "pick_device"]


def pick_device(device: str = "auto", dtype: str = "auto") -> tuple[torch.device, torch.dtype]:
    """The device and dtype to run in.

    Args:
        device: ``auto`` is CUDA where there is one, else the CPU.
        dtype: ``auto`` is bfloat16 on CUDA and float32 on the CPU, where 16-bit products are slow or emulated.

    Raises:
        ConfigError: the device or the dtype does not exist here.
    """
    cuda = torch.cuda.is_available()
    try:
        found = torch.device(("cuda" if cuda else "cpu") if device == "auto" else device)
    except RuntimeError as e:
        raise ConfigError(f"device={device!r}: {e}. Use auto, cpu or cuda.") from e
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as e:  # "not compiled with" it, or no driver
        why = f"torch {torch.__version__} cannot use it ({str(e).splitlines()[0]})"
        raise ConfigError(f"device={device!r}: {why}. Use auto or cpu.") from e
    name = ("bfloat16" if found.type == "cuda" else "float32") if dtype == "auto" else dtype
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype={dtype!r}: expected auto, float32, bfloat16 or float16.")
    return found, getattr(torch, name)


def load_target(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """A Transformers causal LM and its tokenizer.

    Args:
        name: ``smollm2-135m`` (the embedded target, made on first use), a folder, or a hub id.

    Raises:
        CheckpointError: there is no such model, or its files cannot be read.
    """
    path = resolve_target(name)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as e:  # missing, partial and foreign files
        raise CheckpointError(
            f"target {name}: cannot be loaded ({e}). Give a folder or hub id of a Transformers causal LM with its "
            f"tokenizer, or {EMBEDDED_TARGET}."
        ) from e
    return model.to(device).eval(), tokenizer


def int8_head(target: Any) -> Int8LMHead:
    """An int8 copy of a target's output head, tied or not; the target keeps its own.

    Raises:
        ConfigError: it has no head, or none of 16 or 32 bits.
    """
    head = target.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        found = "no output head" if head is None else f"a {type(head).__name__} without a weight as its head"
        raise ConfigError(f"{type(target).__name__} has {found}: expected a causal LM whose head is a linear layer.")
    if not weight.is_floating_point():
        raise ConfigError(f"{type(target).__name__}'s head is {weight.dtype} already: load the target in 16 bits.")
    return Int8LMHead.from_linear(head)


def load_pair(
    target: str,
    drafter: str,
    device: str = "auto",
    dtype: str = "auto",
    *,
    int8_linears: bool = False,
    draft_int8_head: bool = False,
) -> tuple[Any, Any, DFlash2Drafter]:
    """Target, tokenizer and drafter. The drafter is read first: its faults show before a large target is loaded.

    Args:
        target, drafter: names, folders or hub ids.
        device, dtype: see `pick_device`.
        int8_linears: quantise the drafter's linears (`DFlash2Drafter.quantize_linears`).
        draft_int8_head: drafts are picked by an int8 copy of the target's head; the target decides by its own.
    """
    where, kind = pick_device(device, dtype)
    draft = DFlash2Drafter.from_pretrained(drafter, dtype=kind, device=where)
    if int8_linears:
        draft.quantize_linears()
    model, tokenizer = load_target(target, where, kind)
    if draft_int8_head:
        draft.bind_target(model.get_input_embeddings(), int8_head(model))
    return model, tokenizer, draft
