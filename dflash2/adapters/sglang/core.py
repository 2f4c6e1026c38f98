"""From SGLang's arguments and target to a `RequestDrafter`."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash2.adapters.base import RequestDrafter
from dflash2.adapters.sglang.settings import VARIABLE, Settings
from dflash2.adapters.sglang.versions import engine_version
from dflash2.capture import CAPTURED_BATCHES
from dflash2.drafter import DFlash2Drafter
from dflash2.errors import CapacityError, ConfigError
from dflash2.lm_head import Int8LMHead
from dflash2.target import misfits

__all__ = ["make_core", "target_tables"]

_log = logging.getLogger("sglang.dflash2")

#: Bounds of the prefix store where no size is set.
LEAST_STORE_BYTES, MOST_STORE_BYTES = 64 << 20, 1 << 30


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
    requests = min(settings.max_requests or running_requests, running_requests)
    longest = int(model.context_len) + 2 * (k + 1)  # SGLang may run a request a block beyond its end
    try:
        core = RequestDrafter(
            drafter,
            max_requests=requests,
            max_tokens=longest,
            num_draft_tokens=k,
            page_size=settings.page_size,
            prefix_store_bytes=_store_bytes(settings, radix_cache, drafter, requests, longest),
        )
    except CapacityError as e:
        raise CapacityError(
            f"dflash2, for {requests} requests at a time: {e} Here that is --max-running-requests, or max_requests or "
            f"prefix_store_bytes in {VARIABLE}."
        ) from e
    if device.type == "cuda" and settings.cuda_graphs and graphs:
        sizes = [n for n in CAPTURED_BATCHES if n < requests]
        drafter.capture(core.kv, [*sizes, min(requests, CAPTURED_BATCHES[-1])], k)
    _announce(core, path, settings.int8_head)
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
    linear = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(head, requires_grad=False)
    return embedding, Int8LMHead.from_linear(linear)


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


def _store_bytes(settings: Settings, radix_cache: bool, drafter: DFlash2Drafter, requests: int, longest: int) -> int:
    if settings.prefix_store_bytes is not None:
        return settings.prefix_store_bytes
    if not radix_cache:
        return 0
    c = drafter.config
    row = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * drafter.norm.weight.element_size()
    pages = c.window_pages(settings.page_size) or -(-longest // settings.page_size)
    pool = requests * pages * settings.page_size * row
    return min(max(pool, LEAST_STORE_BYTES), MOST_STORE_BYTES)


def _announce(core: RequestDrafter, path: str, int8_head: str) -> None:
    drafter, kv = core.drafter, core.kv
    head = str(drafter.dtype).removeprefix("torch.") if int8_head == "off" else f"int8 ({int8_head})"
    weights = sum(t.untyped_storage().nbytes() for t in (*drafter.parameters(), *drafter.buffers()))
    _log.info(
        "dflash2: drafting %d tokens with %s (%s, windows %s) beside SGLang %s: weights %s bytes, %d pages of %d rows "
        "and prefix store together %s bytes, kernels %s, graphs %s, head %s",
        core.k, path, drafter.config.architecture, sorted(set(drafter.config.windows), key=str), engine_version(),
        f"{weights:,}", kv.num_pages, kv.page_size, f"{kv.nbytes:,}", drafter.backend,
        "on" if kv.captured is not None else "off", head,
    )  # fmt: skip
