"""vLLM's V1 model runner: what its step computed goes to `RequestDrafter`, and drafts go back."""

from __future__ import annotations

import logging
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dflash2.adapters.base import RequestDrafter
from dflash2.adapters.chunks import Chunk, Drafts, Live, moved_chunk
from dflash2.adapters.guard import StepGuard
from dflash2.adapters.versions import VLLM
from dflash2.adapters.vllm.core import make_core, own_noise

__all__ = ["Proposing", "make_proposer"]

_log = logging.getLogger("vllm.dflash2")


class Proposing:
    """Goes before ``DFlashProposer`` of ``vllm.v1.spec_decode.dflash``: see `make_proposer`.

    Drafts come from the drafter's own KV. It registers no attention layer, so nothing of it enters vLLM's KV cache.
    """

    vllm_config: Any
    device: torch.device
    num_speculative_tokens: int
    max_model_len: int
    _enable_probabilistic_draft_probs: bool
    _draft_attn_layer_names: set[str]
    draft_attn_groups: list[Any]
    _last_draft_probs: Tensor | None

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None):
        super().__init__(vllm_config, device, runner)  # type: ignore[call-arg]
        VLLM.warn_if_untested()
        self.runner = runner
        self.core: RequestDrafter | None = None
        self.guard = StepGuard(_log)
        self.noise = own_noise(vllm_config, device)
        self.live = device.type != "cpu"  # whether reading positions would wait for the device
        self.resumed: set[str] = set()
        self._warm = False
        _follow(runner, self)

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter and take its memory now, before vLLM measures what is left for its own KV cache."""
        self._draft_attn_layer_names = set()
        self.core = make_core(self.vllm_config, self.device, target_model, self.num_speculative_tokens)

    def initialize_attn_backend(self, kv_cache_config: Any, kernel_block_sizes: Any = None) -> None:
        """No layers of ours; a real group's id, or vLLM makes no attention metadata for the drafter's step."""
        self.kv_cache_gid, self.draft_attn_groups = 0, []
        self.block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        # One request near the longest length must not cost all others of its step their rows: ours have no such limit.
        self.runner.effective_drafter_max_model_len = self.max_model_len + 2 * (self.num_speculative_tokens + 1)

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        """Nothing of ours is in any group."""

    def initialize_cudagraph_keys(self, cudagraph_mode: Any) -> None:
        """The drafter's graphs are its own."""

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """The first one is vLLM's measurement of memory: the most that a step of ours takes belongs into it."""
        if not self._warm and self.core is not None:
            self._warm = True
            width = len(self.core.drafter.config.target_layer_ids) * self.core.drafter.config.hidden_size
            taps = torch.zeros(num_tokens, width, dtype=self.core.drafter.dtype, device=self.device)
            self.guard.note(self.core.warm_up, taps)

    @torch.inference_mode()
    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: Any,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: Tensor | None = None,
        slot_mappings: Any = None,
    ) -> Tensor:
        """int64 ``[requests, num_speculative_tokens]``; zeros for a request that goes without drafts."""
        core = self.core
        assert core is not None
        self._last_draft_probs = None

        def step() -> Drafts:
            # Those of M-RoPE are equal for text.
            positions = target_positions[0] if target_positions.dim() > 1 else target_positions
            heat = sampling_metadata.temperature if self._enable_probabilistic_draft_probs else None
            bounds = common_attn_metadata.query_start_loc_cpu[: common_attn_metadata.num_reqs + 1].tolist()
            lengths = core.lengths([end - first for first, end in pairwise(bounds)])
            where = _where(common_attn_metadata, positions, lengths, next_token_ids, num_rejected_tokens_gpu, heat)
            if self.live:
                chunks, live = self._live_chunks(bounds), where
            else:
                chunks, live = self._host_chunks(target_token_ids, bounds, where), None
            drafts = core.step(chunks, target_hidden_states, self.noise, live)
            if heat is not None and drafts.q is not None:
                vocabulary = self.vllm_config.model_config.get_vocab_size()
                self._last_draft_probs = drafts.dense_q(vocabulary)[:, :num_speculative_tokens].contiguous()
            return drafts

        drafts = self.guard.run(step, common_attn_metadata.num_reqs, core)
        return drafts.tokens[:, :num_speculative_tokens].contiguous()

    def _host_chunks(self, tokens: Tensor, bounds: list[int], where: Live) -> list[Chunk]:
        """One per request, in the batch's order, where nothing has to be waited for."""
        batch, count = self.runner.input_batch, len(bounds) - 1
        starts, valid, anchors = where.starts.tolist(), where.valid.tolist(), where.anchors.tolist()
        heat = [0.0] * count if where.temperature is None else where.temperature.tolist()
        ids, unfinished = tokens[: bounds[-1]].tolist(), self.runner.discard_request_mask.np[:count].tolist()
        return [
            Chunk(
                request=batch.req_ids[i],
                start=starts[i],
                tokens=ids[bounds[i] : bounds[i + 1]],
                rows=bounds[i + 1] - bounds[i],
                valid=valid[i],
                anchor=None if unfinished[i] else anchors[i],
                temperature=max(heat[i], 0.0),
                prefix=partial(_known, batch, i, 0, starts[i]),
            )
            for i in range(count)
        ]

    def _live_chunks(self, bounds: list[int]) -> list[Chunk]:
        """The same where positions after the prompt are the device's: prompts, and resumed requests, are exact."""
        batch, count = self.runner.input_batch, len(bounds) - 1
        starts, prompts = batch.num_computed_tokens_cpu[:count].tolist(), batch.num_prompt_tokens[:count].tolist()
        unfinished, made = self.runner.discard_request_mask.np[:count].tolist(), []
        for i, request in enumerate(batch.req_ids[:count]):
            rows = bounds[i + 1] - bounds[i]
            if starts[i] >= prompts[i] and request not in self.resumed:
                made.append(moved_chunk(request, rows, not unfinished[i]))
                continue
            made.append(
                Chunk(
                    request=request,
                    start=starts[i],
                    tokens=_known(batch, i, starts[i], starts[i] + rows),
                    rows=rows,
                    valid=rows,
                    anchor=None if unfinished[i] else 0,
                    prefix=partial(_known, batch, i, 0, starts[i]),
                )
            )
        self.resumed.clear()
        return made


def _where(
    common: Any, positions: Tensor, lengths: Tensor, next_ids: Tensor, rejected: Tensor | None,
    temperature: Tensor | None,
) -> Live:  # fmt: skip
    """Where the requests of a step are, as vLLM has it on the device, in few launches."""
    count = len(lengths)
    valid = lengths if rejected is None else lengths - rejected[:count]
    heat = None if temperature is None else temperature[:count].float()
    starts = positions.index_select(0, common.query_start_loc[:count])
    return Live(starts.long(), valid, next_ids[:count].long(), heat)


def _known(batch: Any, row: int, first: int, end: int) -> list[int]:
    """Ids at these positions of a request."""
    return batch.token_ids_cpu[row, first:end].tolist()


def _tokens(runner: Any, name: str) -> list[int]:
    """Of a request of vLLM's, prompt and output; with asynchronous scheduling the newest may be -1."""
    request = runner.requests[name]
    return [*request.prompt_token_ids, *request.output_token_ids]


def _follow(runner: Any, proposer: Any) -> None:
    """Hear of requests that end, begin or resume: their ids, or positions, mean something else from now on."""
    update = runner._update_states

    def update_states(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        core = proposer.core
        if core is not None:
            finished = sorted(scheduler_output.finished_req_ids)  # a set has another order on each rank
            for ended in finished:
                proposer.guard.note(core.finish, ended, partial(_tokens, runner, ended))
            proposer.guard.note(core.forget, [*finished, *(r.req_id for r in scheduler_output.scheduled_new_reqs)])
            proposer.resumed |= set(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        return update(scheduler_output, *args, **kwargs)

    runner._update_states = update_states


def make_proposer(base: type) -> type:
    """The proposer class for this vLLM, derived from its own so that the runner's type checks hold.

    Args:
        base: ``vllm.v1.spec_decode.dflash.DFlashProposer``.
    """
    return type("DFlash2Proposer", (Proposing, base), {})
