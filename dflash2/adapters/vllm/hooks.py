"""Where the plug-in meets vLLM. Everything that knows a vLLM module by name to change it is here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash2.adapters.vllm.after_import import after_import

__all__ = ["install"]

#: Drafters that this package loads.
ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
_OURS = "_dflash2"


def install() -> None:
    """Idempotent. Nothing is imported, and nothing changes for an engine without a drafter."""
    after_import("vllm.config.vllm", _accept_candidate_heads)
    after_import("vllm.model_executor.models.registry", _register_architecture)
    after_import("vllm.v1.spec_decode.dflash", _take_over)
    after_import("vllm.v1.worker.gpu.spec_decode", _take_over_v2)
    after_import("vllm.v1.worker.gpu.model_runner", _follow_v2)
    after_import("vllm.v1.sample.rejection_sampler", _repair_sampling_on_cpus)


def _accept_candidate_heads(module: Any) -> None:
    """Its own V1 proposer would not run a selector; ours does. So that is no longer a reason to refuse the runner."""
    config = module.VllmConfig
    refuse = getattr(config, "_get_v1_model_runner_unsupported_features", None)
    if refuse is None or hasattr(refuse, _OURS):  # 0.26 has no such check
        return

    def unsupported(self: Any) -> list[str]:
        ours = ("DFlash candidate-head drafts", "mixed sliding/full dflash drafts") if _is_ours(self) else ()
        return [reason for reason in refuse(self) if reason not in ours]

    setattr(unsupported, _OURS, True)
    config._get_v1_model_runner_unsupported_features = unsupported


def _is_ours(vllm_config: Any) -> bool:
    """Whether the drafter is of a kind that this package loads; vLLM keeps its own classes for others."""
    spec = vllm_config.speculative_config
    return (
        spec is not None
        and spec.method == "dflash"
        and bool(set(ARCHITECTURES) & set(spec.draft_model_config.architectures))
    )


def _register_architecture(module: Any) -> None:
    """Versions without DFlash2 of their own do not know its name; of the class they look at the interfaces only."""
    registry = module.ModelRegistry
    for name in ARCHITECTURES:
        if name not in registry.get_supported_archs():
            registry.register_model(name, "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM")


def _take_over(module: Any) -> None:
    """Making one of vLLM's proposers makes one of ours, a subclass, where the drafter is ours: its type checks hold."""
    theirs = module.DFlashProposer
    if hasattr(theirs, _OURS):
        return
    from dflash2.adapters.vllm.proposer import make_proposer

    ours = make_proposer(theirs)

    def choose(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(ours if cls is theirs and _is_ours(vllm_config) else cls)

    theirs.__new__ = choose
    setattr(theirs, _OURS, True)


def _take_over_v2(module: Any) -> None:
    theirs = module.init_speculator
    if hasattr(theirs, _OURS):
        return

    def init_speculator(vllm_config: Any, device: torch.device, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(vllm_config):
            return theirs(vllm_config, device, *args, **kwargs)
        from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

        from dflash2.adapters.vllm.speculator import make_speculator

        return make_speculator(DraftModelSpeculator)(vllm_config, device)

    setattr(init_speculator, _OURS, True)
    module.init_speculator = init_speculator
    after_import("vllm.v1.worker.gpu.model_runner", lambda runner: setattr(runner, "init_speculator", init_speculator))


def _follow_v2(module: Any) -> None:
    """Tell our speculator what the scheduler says before the runner acts on it."""
    runner = module.GPUModelRunner
    finish = runner.finish_requests
    if hasattr(finish, _OURS):
        return

    def finish_requests(self: Any, scheduler_output: Any) -> None:
        if (tell := getattr(self.speculator, "scheduled", None)) is not None:
            tell(scheduler_output, self.req_states)
        finish(self, scheduler_output)

    setattr(finish_requests, _OURS, True)
    runner.finish_requests = finish_requests


def _repair_sampling_on_cpus(module: Any) -> None:
    """Two faults of vLLM 0.26 to 0.33 on CPUs, with any drafter.

    It hands its kernel a copy of the output, so sampling parameters of drafts are uninitialised memory, and output at
    temperatures above 0 is garbage (vllm-project/vllm issue 55005). And top-k of a step in which no request has drafts
    asks for the largest of no numbers, which ends the engine.
    """
    expand, truncate = module.expand_batch_to_tokens, module.apply_top_k_top_p
    if hasattr(expand, _OURS):
        return

    def expand_batch_to_tokens(
        x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Tensor:
        if x.device.type != "cpu":
            return expand(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)

    def apply_top_k_top_p(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return truncate(logits, *args, **kwargs) if len(logits) else logits

    setattr(expand_batch_to_tokens, _OURS, True)
    module.expand_batch_to_tokens, module.apply_top_k_top_p = expand_batch_to_tokens, apply_top_k_top_p
