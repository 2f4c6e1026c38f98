"""From vLLM's configuration and target to a `RequestDrafter`: what both of its model runners share."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash2.adapters.base import RequestDrafter
from dflash2.adapters.opening import announcement, int8_copy, open_core
from dflash2.adapters.versions import VLLM
from dflash2.adapters.vllm.ranks import agreement, is_first_rank, sharded_head, whole_table
from dflash2.adapters.vllm.settings import Settings
from dflash2.drafter import DFlash2Drafter
from dflash2.errors import ConfigError
from dflash2.lm_head import Int8LMHead
from dflash2.target import misfits

__all__ = ["make_core", "own_noise", "target_tables"]

_log = logging.getLogger("vllm.dflash2")


def make_core(vllm_config: Any, device: torch.device, target: nn.Module, k: int) -> RequestDrafter:
    """Load the drafter, share the target's tables, take all memory, and log one line.

    Args:
        vllm_config: the engine's.
        device: the target's.
        target: the loaded model.
        k: drafts per request.

    Raises:
        ConfigError: settings, drafter and target do not go together.
        CapacityError: the memory cannot be had.
    """
    settings = Settings.of(vllm_config.additional_config)
    _refuse(vllm_config)
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    path = vllm_config.speculative_config.draft_model_config.model
    drafter = DFlash2Drafter.from_pretrained(path, dtype=model.dtype, device=device).requires_grad_(False)
    if problems := misfits(drafter.config, model.hf_config):
        raise ConfigError(f"the drafter {path} was not made for this target: {'; '.join(problems)}.")
    table, head = _tables(target, settings)
    drafter.bind_target(table, head)
    if settings.int8_linears:
        drafter.quantize_linears()
    core = open_core(
        drafter,
        settings,
        k=k,
        running=scheduler.max_num_seqs,
        longest=model.max_model_len + k + 1,
        caches_prefixes=bool(vllm_config.cache_config.enable_prefix_caching),
        graphs=not model.enforce_eager,
        advice="--max-num-seqs, or max_requests or prefix_store_bytes of dflash2 in --additional-config",
        agree=agreement(),
    )
    if is_first_rank():
        copied = table.nbytes if vllm_config.parallel_config.tensor_parallel_size > 1 else 0
        each = f"; all of it on each rank, with the whole embedding: {copied:,} bytes" if copied else ""
        _log.info(announcement(core, path, f"vLLM {VLLM.installed()}", settings.int8_head) + each)
    return core


def _refuse(vllm_config: Any) -> None:
    """Raises `ConfigError` for what vLLM would let a drafter do and this one does not."""
    stages, spec = vllm_config.parallel_config.pipeline_parallel_size, vllm_config.speculative_config
    if stages > 1:
        raise ConfigError(
            f"pipeline_parallel_size={stages}: a drafter reads layers of the target, which then lie on different GPUs. "
            "Use tensor_parallel_size instead."
        )
    for name, owner in (("enable_adaptive_verification", spec), ("watermark_config", vllm_config)):
        if getattr(owner, name, None):
            raise ConfigError(f"{name}: dflash2 does not give vLLM what that needs of drafts. Leave it out.")


def own_noise(vllm_config: Any, device: torch.device) -> torch.Generator:
    """For drafts alone: the same on every rank, and what vLLM draws for itself is what it draws without a drafter."""
    return torch.Generator(device).manual_seed(vllm_config.model_config.seed or 0)


def _tables(target: nn.Module, settings: Settings) -> tuple[Tensor, Any]:
    embedding, head = target_tables(target)
    language = _language_model(target)
    tied = isinstance(head, Tensor) and head.data_ptr() == embedding.data_ptr()
    table = whole_table(language.model.embed_tokens, embedding)
    if settings.int8_head != "off":
        if not isinstance(head, Tensor):
            raise ConfigError("int8_head: the target's head has a bias. Leave int8_head out.")
        if settings.int8_head == "shared" and tied:
            raise ConfigError(
                'int8_head "shared": the target\'s head is tied to its embedding, which needs the 16-bit weight: it '
                'cannot be freed. "drafts" makes an int8 copy for the drafter alone.'
            )
        if settings.int8_head == "shared":
            del head  # or this would be another reader of what is to be freed
            head = _share_int8(language.lm_head)
        else:
            head = int8_copy(head)
    return table, sharded_head(language.lm_head, head)


class _Int8Logits:
    """Stands where vLLM's quantisation method of ``lm_head`` stood."""

    def __init__(self, head: Int8LMHead):
        self.head = head

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = self.head(x)
        return logits if bias is None else logits + bias


def _share_int8(lm_head: Any) -> Int8LMHead:
    """Make the target's own head int8; its 16-bit weight goes, before vLLM measures what is left."""
    try:
        head = Int8LMHead.from_linear(lm_head, free_source=True)
    except ConfigError as e:
        raise ConfigError(f'int8_head "shared": {e} "drafts" makes an int8 copy for the drafter alone.') from e
    lm_head.quant_method = _Int8Logits(head)
    _log.info("dflash2: the target's head is int8 now, %s: its output changes a little", head.extra_repr())
    return head


def _language_model(target: Any) -> Any:
    while not hasattr(target, "lm_head") and hasattr(target, "get_language_model"):
        target = target.get_language_model()
    return target


def target_tables(target: nn.Module) -> tuple[Tensor, Any]:
    """The embedding table and the head of a vLLM model: a weight ``[V', H]``, or a callable where there is a bias.

    Raises:
        ConfigError: they cannot be found, or are quantised.
    """
    language = _language_model(target)
    embedding: Any = getattr(getattr(language, "model", None), "embed_tokens", None)
    head: Any = getattr(language, "lm_head", None)
    weights: list[Any] = [getattr(m, "weight", None) for m in (embedding, head)]
    if not all(isinstance(w, Tensor) and w.is_floating_point() for w in weights):
        raise ConfigError(
            f"{type(target).__name__}: no 16-bit model.embed_tokens and lm_head (a quantised head?). "
            "DFLASH2_VLLM=off uses vLLM's own drafter."
        )
    bias = getattr(head, "bias", None)
    if bias is not None:
        return weights[0].data, lambda hidden: F.linear(hidden, head.weight, bias)
    return weights[0].data, weights[1].data
