"""vLLM's V2 model runner: what its step computed goes to `RequestDrafter`, and drafts go back, all on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dflash2.adapters.base import RequestDrafter
from dflash2.adapters.chunks import Chunk, Drafts, Live, moved_chunk
from dflash2.adapters.guard import StepGuard
from dflash2.adapters.versions import VLLM
from dflash2.adapters.vllm.core import make_core, own_noise

__all__ = ["Speculating", "make_speculator"]

_log = logging.getLogger("vllm.dflash2")


class Speculating:
    """Goes before ``DraftModelSpeculator`` of ``vllm.v1.worker.gpu.spec_decode.speculator``: see `make_speculator`.

    It registers no attention layer and owns its graphs, so that vLLM has nothing to set up or to capture for it.
    """

    supports_mm_inputs = False
    vllm_config: Any
    device: torch.device
    num_speculative_steps: int
    draft_logits: Tensor | None

    def __init__(self, vllm_config: Any, device: torch.device):
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        VLLM.warn_if_untested()
        self.core: RequestDrafter | None = None
        self.guard = StepGuard(_log)
        self.noise = own_noise(vllm_config, device)
        self.model = nn.Module()  # vLLM prepares, counts and frees what a drafter's model holds: nothing here
        self.draft_attn_layer_names: set[str] = set()
        self.attn_groups: list[Any] = []
        self._prompts: dict[str, Sequence[int]] = {}
        self._warm = False

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter and take its memory now, before vLLM measures what is left for its own KV cache."""
        self.core = make_core(self.vllm_config, self.device, target_model, self.num_speculative_steps)

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """Nothing of the drafter is a vLLM model."""
        return self.model

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """No attention layers of vLLM's."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """The drafter's graphs are its own."""

    def capture(self) -> None:
        """They were recorded when it was loaded."""

    def scheduled(self, scheduler_output: Any, states: Any) -> None:
        """Hear of requests that end, pause or begin. A preempted one comes back as a new one.

        Args:
            scheduler_output: of the step to come.
            states: the runner's ``RequestState``, before that step.
        """
        if self.core is None:
            return
        begun = scheduler_output.scheduled_new_reqs
        # The runner forgets the tokens of preempted ones too. Sorted: sets have another order on each rank.
        ended = sorted({*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())})
        for request in ended:
            self.guard.note(self.core.finish, request, partial(_tokens, states, request))
        for request in [*ended, *(r.req_id for r in begun)]:
            self.guard.note(self.core.forget, [request])
            self._prompts.pop(request, None)
        self._prompts |= {r.req_id: r.prefill_token_ids for r in begun}

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor],
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """int64 ``[requests, num_speculative_steps]``; zeros for a request that goes without drafts.

        All of them do where ``num_speculative_tokens`` is given as 0: newer versions say so when nobody would use them.
        """
        count, core = input_batch.num_reqs, self.core
        assert core is not None
        if dummy_run:
            self.guard.note(self._rehearse, aux_hidden_states)
            return torch.zeros(count, core.k, dtype=torch.int64, device=self.device)

        slots = input_batch.idx_mapping[:count]
        heat = None if self.draft_logits is None else temperature.index_select(0, slots).float()

        def step() -> Drafts:
            rows = input_batch.num_scheduled_tokens[:count].tolist()
            live = Live(
                starts=input_batch.positions.index_select(0, input_batch.query_start_loc[:count]).long(),
                valid=core.lengths(rows) - num_rejected[:count],
                anchors=last_sampled.view(-1).index_select(0, slots).long(),
                temperature=heat,
            )
            taps = torch.cat([t[: sum(rows)] for t in aux_hidden_states], dim=-1)
            chunks = self._chunks(input_batch, kwargs.get("num_speculative_tokens") != 0)
            return core.step(chunks, taps, self.noise, live)

        drafts = self.guard.run(step, count, core)
        if self.draft_logits is not None:  # after a failure too: older ones do not belong to the tokens of now
            self.guard.note(self._publish, self.draft_logits, drafts, slots, heat)
        return drafts.tokens

    def _publish(self, logits: Tensor, drafts: Drafts, slots: Tensor, temperature: Tensor) -> None:
        """What the drafts were drawn from, as the logits that vLLM's rejection sampler takes the softmax of."""
        log_q = drafts.dense_q(logits.shape[-1]).log()
        if hasattr(type(self), "draft_logits_spec"):  # from 0.32 on it divides them by the temperature itself
            log_q = log_q * torch.where(temperature > 0, temperature, 1.0)[:, None, None]
        logits[slots.long()] = log_q.to(logits.dtype)

    def _rehearse(self, aux_hidden_states: list[Tensor]) -> None:
        """The first dummy run is vLLM's measurement of memory: the most that a step of ours takes belongs into it."""
        if not self._warm and self.core is not None:
            self._warm = True
            self.core.warm_up(torch.cat(aux_hidden_states, dim=-1))

    def _chunks(self, batch: Any, drafting: bool) -> list[Chunk]:
        """One per request, in the batch's order. While a prompt is computed its position is known here, later not."""
        starts, rows = batch.num_computed_tokens_np.tolist(), batch.num_scheduled_tokens.tolist()
        ends, prefilling = batch.prefill_len_np.tolist(), batch.is_prefilling_np.tolist()
        made = []
        for i, request in enumerate(batch.req_ids[: batch.num_reqs]):
            if not prefilling[i]:
                made.append(moved_chunk(request, rows[i], drafting))
                continue
            prompt: Sequence[int] = self._prompts.get(request, ())
            made.append(
                Chunk(
                    request=request,
                    start=starts[i],
                    tokens=prompt[starts[i] : starts[i] + rows[i]],
                    rows=rows[i],
                    valid=rows[i],
                    anchor=None if starts[i] + rows[i] < ends[i] or not drafting else 0,
                    prefix=partial(_head, prompt, starts[i]),
                )
            )
        return made


def _head(tokens: Sequence[int], count: int) -> Sequence[int]:
    return tokens[:count]


def _tokens(states: Any, request: str) -> list[int]:
    """Of a request of vLLM's, prompt and output. Waits for the device."""
    slot = states.req_id_to_index[request]
    return states.all_token_ids.gpu[slot, : int(states.total_len.gpu[slot])].tolist()


def make_speculator(base: type) -> type:
    """The speculator class for this vLLM.

    Args:
        base: ``vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator``.
    """
    return type("DFlash2Speculator", (Speculating, base), {})
