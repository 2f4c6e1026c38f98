"""From SGLang's arguments and target to a `RequestDrafter`."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash2.adapters.base import RequestDrafter
from dflash2.adapters.opening import announcement, int8_copy, open_core
from dflash2.adapters.sglang.settings import VARIABLE, Settings
from dflash2.adapters.versions import SGLANG
from dflash2.drafter import DFlash2Drafter
from dflash2.errors import ConfigError
from dflash2.target import misfits

__all__ = ["make_core", "target_tables"]

_log = logging.getLogger("sglang.dflash2")


def make_core(path: str, runner: Any, k: int, running_requests: int, radix_cache: bool, graphs: bool) -> RequestDrafter:
    """Load the drafter, share the target's tables, take all memory, and log one line.

    Args:
        path: of the drafter.
        runner: the target's ``ModelRunner``, which has not taken memory for its own KV cache yet.
        k: drafts per request.
        running_requests: most that run at a time.
        radix_cache: whether requests may begin behind a cached prefix.
        graphs: whether SGLang records CUDA graphs.

    Raises:
        ConfigError: settings, drafter and target do not go together.
        CapacityError: the memory cannot be had.
    """
    settings, model, device = Settings.of_environment(), runner.model_config, torch.device(runner.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    drafter = DFlash2Drafter.from_pretrained(path, dtype=runner.dtype, device=device).requires_grad_(False)
    _check_pair(path, drafter, model)
    drafter.bind_target(*_tables(runner.model, settings))
    if settings.int8_linears:
        drafter.quantize_linears()
    core = open_core(
        drafter,
        settings,
        k=k,
        running=running_requests,
        longest=int(model.context_len) + 2 * (k + 1),  # SGLang may run a request a block beyond its end
        caches_prefixes=radix_cache,
        graphs=graphs,
        advice=f"--max-running-requests, or max_requests or prefix_store_bytes in {VARIABLE}",
    )
    _log.info(announcement(core, path, f"SGLang {SGLANG.installed()}", settings.int8_head))
    return core


def _check_pair(path: str, drafter: DFlash2Drafter, model: Any) -> None:
    problems = misfits(drafter.config, model.hf_config)
    last = model.hf_config.get_text_config().num_hidden_layers - 1
    if last in drafter.config.target_layer_ids:
        problems.append(f"target_layer_ids: SGLang does not hand out the output of the last layer, {last}")
    kinds = set(getattr(model.hf_config.get_text_config(), "layer_types", None) or ())
    kinds -= {"full_attention", "sliding_attention"}
    if kinds:
        problems.append(
            f"layers of kind {', '.join(sorted(kinds))} keep state that rejected drafts cannot be taken out of"
        )
    if problems:
        raise ConfigError(f"the drafter {path} cannot serve this target: {'; '.join(problems)}.")


def _tables(target: nn.Module, settings: Settings) -> tuple[Tensor, Any]:
    embedding, head = target_tables(target)
    if settings.int8_head == "off":
        return embedding, head
    if not isinstance(head, Tensor):
        raise ConfigError("int8_head: the target's head has a bias. Leave int8_head out.")
    return embedding, int8_copy(head)


def target_tables(target: Any) -> tuple[Tensor, Any]:
    """The embedding table and the head of an SGLang model: a weight ``[V', H]``, or a callable where there is a bias.

    Raises:
        ConfigError: they cannot be found, or are quantised.
    """
    while not hasattr(target, "lm_head") and hasattr(target, "language_model"):
        target = target.language_model
    embedding = target.get_input_embeddings() if hasattr(target, "get_input_embeddings") else None
    head: Any = getattr(target, "lm_head", None)
    weights: list[Any] = [getattr(m, "weight", None) for m in (embedding, head)]
    if not all(isinstance(w, Tensor) and w.is_floating_point() for w in weights):
        raise ConfigError(f"{type(target).__name__}: no 16-bit embedding and lm_head (a quantised head?).")
    bias = getattr(head, "bias", None)
    if bias is not None:
        return weights[0].data, lambda hidden: F.linear(hidden, head.weight, bias)
    return weights[0].data, weights[1].data
