"""What the worker uses of SGLang. Everything that knows one of its modules by name, beside the registry, is here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "decide",
    "decided",
    "install_hooks",
    "keep_out_of_pools",
    "make_worker",
    "next_input",
    "prefill",
    "result",
    "verify",
]

REFUSED = ("frequency_penalty", 0.0), ("presence_penalty", 0.0), ("repetition_penalty", 1.0), ("min_new_tokens", 0)


def decided(server_args: Any) -> Any:
    """The arguments with all that SGLang made of them so far; later versions keep that beside what was given."""
    from sglang.srt.arg_groups import overrides

    view = getattr(overrides, "resolving_view", None)
    return server_args if view is None else view(server_args)


def decide(server_args: Any, values: dict[str, Any]) -> None:
    """Change arguments while SGLang makes up its mind about them."""
    from sglang.srt.arg_groups import overrides

    declare = getattr(overrides, "declare_resolution", None)
    if declare is not None:
        declare(server_args, "DFLASH2", **values)
        return
    for name, value in values.items():
        setattr(server_args, name, value)


def make_worker() -> type:
    """The worker class for this SGLang, derived from its own so that its type checks hold."""
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

    from dflash2.adapters.sglang.worker import Drafting

    return type("DFlash2Worker", (Drafting, BaseSpecWorker), {})


def install_hooks() -> None:
    """In a scheduler with this algorithm: requests that cannot be served exactly are refused, no pool is looked for."""
    from sglang.srt.mem_cache import kv_cache_builder
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.speculative.dflash_utils.validate_dflash_request"
    HookRegistry.register(target, check_request, HookType.REPLACE)
    if hasattr(kv_cache_builder, "get_draft_kv_pool"):  # later versions ask the worker
        target = "sglang.srt.mem_cache.kv_cache_builder.get_draft_kv_pool"
        HookRegistry.register(target, lambda *args, **kwargs: None, HookType.REPLACE)
    HookRegistry.apply_hooks()


def check_request(request: Any, *_: Any, **__: Any) -> str | None:
    """Why a request cannot be served, or None."""
    p = request.sampling_params
    asked = [name for name, off in REFUSED if getattr(p, name, off) not in (off, None)]
    if asked:
        return f"DFLASH2: {', '.join(asked)}: SGLang does not count a request's output while it decodes with drafts."
    if request.return_logprob:
        return "DFLASH2 does not return log-probabilities."
    if request.return_hidden_states:
        return "DFLASH2 does not return hidden states: they are the drafter's."
    return None


def keep_out_of_pools(runner: Any) -> None:
    """SGLang's KV pool holds the target's layers only.

    Args:
        runner: the target's ``ModelRunner``, before it sizes its pool.
    """
    for owner, name in (
        (runner.spec_aux_config, "dflash_draft_num_layers"),
        (runner.spec_aux_config, "draft_kv_num_layers"),
        (runner.spec_aux_config, "draft_model_config"),
        (getattr(runner, "kv_cache_configurator", None), "dflash_draft_cell_size_per_token"),
    ):
        if hasattr(owner, name):
            setattr(owner, name, None)


def prefill(target_worker: Any, batch: Any, **kwargs: Any) -> Any:
    """``GenerationBatchResult`` of a prompt batch, hidden states of all rows included."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    return target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL, **kwargs)


def verify(target_worker: Any, batch: Any, blocks: Tensor, positions: Tensor, slots: Tensor) -> Any:
    """One pass of the target over anchors and drafts.

    Args:
        target_worker: ``TpModelWorker``.
        batch: ``ScheduleBatch``, which SGLang restores afterwards.
        blocks, positions, slots: int64 ``[R, k+1]``: ids, where they are, and where their KV goes.

    Returns:
        ``GenerationBatchResult`` with logits ``[R * (k+1), V]`` and hidden states ``[R * (k+1), T*H]``.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    width = blocks.shape[1]
    told = DFlashVerifyInput(
        draft_token=blocks.reshape(-1),
        positions=positions.reshape(-1),
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    batch.out_cache_loc = slots.reshape(-1)
    known, total = batch.seq_lens_cpu, batch.seq_lens_sum
    if known is not None:  # backends plan with the length after the pass
        batch.seq_lens_cpu, batch.seq_lens_sum = known + width, int(known.sum()) + width * len(known)
    else:
        reserved = getattr(batch.spec_info, "nxt_kv_lens_cpu", getattr(batch.spec_info, "reserved_seq_lens_cpu", None))
        if reserved is not None:
            batch.seq_lens_cpu, batch.seq_lens_sum = reserved, int(reserved.sum())
    forward, _ = told.prepare_for_verify(batch, target_worker)
    batch.seq_lens_cpu, batch.seq_lens_sum = known, total
    _complete_for_torch_native(target_worker, forward, width)
    return target_worker.forward_batch_generation(
        batch=None, forward_batch=forward, is_verify=True, skip_attn_backend_init=True
    )


def _complete_for_torch_native(target_worker: Any, forward: Any, width: int) -> None:
    """The backend ``torch_native`` runs any pass of several rows as an extension; a verify pass lacks its fields."""
    if type(target_worker.model_runner.attn_backend).__name__ != "TorchNativeAttnBackend":
        return
    forward.extend_prefix_lens = forward.seq_lens
    forward.extend_seq_lens = torch.full_like(forward.seq_lens, width)
    forward.seq_lens = forward.seq_lens + width


def adjust(logits: Tensor, batch: Any, blocks: Tensor, grammar_barrier: Any) -> None:
    """Bias, custom processors and grammars, in place.

    Args:
        logits: ``[R * (k+1), V]``.
        batch: ``ScheduleBatch``.
        blocks: int64 ``[R, k+1]``.
        grammar_barrier: what SGLang wants called before grammars are asked, or None.
    """
    from sglang.srt.speculative import dflash_utils, spec_utils

    mask = None
    if batch.has_grammar:
        mask = spec_utils.build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=spec_utils.GrammarTree.from_linear_chain(blocks),
            sampling_info=batch.sampling_info,
            device=logits.device,
            barrier=grammar_barrier,
        )
    dflash_utils.apply_dflash_verify_logits_adjustments(
        next_token_logits=logits, sampling_info=batch.sampling_info, draft_token_num=blocks.shape[1]
    )
    if mask is not None:
        mask.apply(logits)


def next_input(anchors: Tensor, lengths: Tensor) -> Any:
    """What SGLang carries to the next step of these requests.

    Args:
        anchors: int64 ``[R]``, newest tokens.
        lengths: int64 ``[R]``, tokens that have been run.
    """
    from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

    return make_draft_input_v2(bonus_tokens=anchors, new_seq_lens=lengths)


def idle_input(device: Any) -> Any:
    """The same for nobody."""
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

    return DFlashDraftInputV2.create_idle_input(device=device)


def result(**fields: Any) -> Any:
    """``GenerationBatchResult``."""
    from sglang.srt.managers.scheduler import GenerationBatchResult

    return GenerationBatchResult(**fields)
