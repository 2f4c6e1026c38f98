"""From an engine's sizes to a `RequestDrafter`: memory, graphs, and the line that says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dflash2.adapters.base import RequestDrafter
from dflash2.adapters.settings import DrafterSettings
from dflash2.capture import CAPTURED_BATCHES
from dflash2.drafter import DFlash2Drafter
from dflash2.errors import CapacityError
from dflash2.lm_head import Int8LMHead

__all__ = ["announcement", "int8_copy", "open_core"]

#: The prefix store where no size is set: this share of the GPU's memory. An engine's cache outlives a small store, and
#: what it serves from its cache is never computed again, so that a prompt lost once would be drafted without for good.
STORE_SHARE = 0.01
#: Elsewhere than on a GPU.
STORE_BYTES = 64 << 20


def open_core(
    drafter: DFlash2Drafter,
    settings: DrafterSettings,
    *,
    k: int,
    running: int,
    longest: int,
    caches_prefixes: bool,
    graphs: bool,
    advice: str,
    **more: Any,
) -> RequestDrafter:
    """Take all memory, and record the graphs.

    Args:
        drafter: bound to the engine's target.
        settings: the user's.
        k: drafts per request.
        running: most requests that the engine runs at a time.
        longest: positions that a request may have.
        caches_prefixes: whether requests may begin behind rows that the engine computed for others.
        graphs: whether the engine records CUDA graphs.
        advice: what the user can lower, for the message when the memory cannot be had.
        **more: for `RequestDrafter`.

    Raises:
        CapacityError: the memory cannot be had.
        ConfigError: k is out of range.
    """
    requests = min(settings.max_requests or running, running)
    try:
        core = RequestDrafter(
            drafter,
            max_requests=requests,
            max_tokens=longest,
            num_draft_tokens=k,
            page_size=settings.page_size,
            prefix_store_bytes=_store_bytes(drafter.device, settings, caches_prefixes),
            **more,
        )
    except CapacityError as e:
        raise CapacityError(f"dflash2, for {requests} requests at a time: {e} Here that is {advice}.") from e
    if drafter.device.type == "cuda" and settings.cuda_graphs and graphs:
        sizes = [n for n in CAPTURED_BATCHES if n < requests]
        drafter.capture(core.kv, [*sizes, min(requests, CAPTURED_BATCHES[-1])], k)
    return core


def _store_bytes(device: torch.device, settings: DrafterSettings, caches_prefixes: bool) -> int:
    if settings.prefix_store_bytes is not None:
        return settings.prefix_store_bytes
    if not caches_prefixes:
        return 0
    if device.type != "cuda":
        return STORE_BYTES
    return int(STORE_SHARE * torch.cuda.get_device_properties(device).total_memory)


def int8_copy(weight: Tensor) -> Int8LMHead:
    """A head for drafting alone; the target keeps its own.

    Args:
        weight: of the target's head, ``[V', H]``.
    """
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return Int8LMHead.from_linear(linear)


def announcement(core: RequestDrafter, path: str, engine: str, int8_head: str) -> str:
    """The one line at take-over.

    Args:
        core: what drafts.
        path: of the drafter.
        engine: its name and version.
        int8_head: as in the settings.
    """
    drafter, kv = core.drafter, core.kv
    head = str(drafter.dtype).removeprefix("torch.") if int8_head == "off" else f"int8 ({int8_head})"
    weights = sum(t.untyped_storage().nbytes() for t in (*drafter.parameters(), *drafter.buffers()))
    return (
        f"dflash2: drafting {core.k} tokens with {path} ({drafter.config.architecture}, windows "
        f"{sorted(set(drafter.config.windows), key=str)}) beside {engine}: weights {weights:,} bytes, {kv.num_pages} "
        f"pages of {kv.page_size} rows and prefix store together {kv.nbytes:,} bytes, kernels {drafter.backend}, "
        f"graphs {'off' if kv.captured is None else f'{kv.captured.nbytes:,} bytes'}, head {head}"
    )
