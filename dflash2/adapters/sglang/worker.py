"""SGLang's worker for the algorithm: taps in, drafts out, and the target decides which of them stand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dflash2
from dflash2.adapters.base import RequestDrafter
from dflash2.adapters.chunks import Chunk, Drafts, Live
from dflash2.adapters.guard import StepGuard
from dflash2.adapters.sglang import engine
from dflash2.adapters.sglang.core import make_core
from dflash2.adapters.sglang.events import RequestLog, decode_chunks, moved_chunks, prefill_chunks
from dflash2.adapters.sglang.sampling import keep_sampled, temperatures
from dflash2.adapters.sglang.slots import DraftSlots
from dflash2.positions import upload

__all__ = ["Drafting"]

_log = logging.getLogger("sglang.dflash2")

#: Bounds of the rows that are rehearsed.
LEAST_ROWS, MOST_ROWS = 512, 8192


class Drafting:
    """Goes before ``BaseSpecWorker`` of ``sglang.srt.speculative.base_spec_worker``: see `engine.make_worker`.

    It takes its memory when it is made, which is before SGLang measures what is left for the KV cache, and nothing of
    SGLang's pools. Rejected drafts leave rows behind in these that the next step overwrites; SGLang reserves them.
    """

    places: Tensor

    def __init__(self, server_args: Any, target_worker: Any, **_: Any):
        super().__init__()
        runner, args = target_worker.model_runner, engine.decided(server_args)
        self.server_args = server_args
        engine.keep_out_of_pools(runner)
        core = make_core(
            args.speculative_draft_model_path,
            runner,
            args.speculative_num_draft_tokens - 1,
            args.max_running_requests,
            radix_cache=not args.disable_radix_cache,
            graphs=not args.disable_cuda_graph,
        )
        self._begin(core, target_worker, live=not args.disable_overlap_schedule, seed=args.random_seed or 0)
        if core.kv.device.type == "cuda":
            self._rehearse(min(max(args.chunked_prefill_size or 0, LEAST_ROWS), MOST_ROWS))

    def _begin(self, core: RequestDrafter, target_worker: Any, live: bool, seed: int) -> None:
        """``live``: steps are prepared before the host knows what the last one did."""
        self.core, self._target_worker, self.live = core, target_worker, live
        self.speculative_num_draft_tokens = core.k + 1
        self.guard = StepGuard(_log)
        self.log = RequestLog(
            lambda *end: self.guard.note(core.finish, *end), lambda rid: self.guard.note(core.forget, [rid])
        )
        self.sampled_drafts = core.drafter.config.selector_top_k > 0
        self.noise = torch.Generator(core.kv.device).manual_seed(seed)
        self.slots: DraftSlots | None = None

    @torch.inference_mode()
    def _rehearse(self, rows: int) -> None:
        """A long prompt's step: kernels are compiled, and what it takes is seen when SGLang measures what is left."""
        c = self.core.drafter.config
        width = len(c.target_layer_ids) * c.hidden_size
        taps = torch.zeros(rows, width, dtype=self.core.drafter.dtype, device=self.core.kv.device)
        self.guard.note(self.core.warm_up, taps)

    @property
    def draft_worker(self) -> None:
        """SGLang has no worker of its own for the drafter."""
        return None

    def __getattr__(self, name: str) -> Any:
        """What SGLang asks of a worker and this one does not change is the target's."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """SGLang's pools are there."""
        super().alloc_memory_pool(*args, **kwargs)  # type: ignore[misc]
        pool, _ = self._target_worker.get_memory_pool()
        self.places = pool.req_to_token
        self.slots = DraftSlots(self.core, len(self.places))

    def clear_cache_pool(self) -> None:
        """SGLang's cache was flushed."""
        self.guard.note(self.core.retain, ())

    @torch.inference_mode()
    def forward_batch_generation(
        self, batch: Any, on_publish: Callable[[Tensor], None] | None = None, grammar_barrier: Any = None, **kwargs: Any
    ) -> Any:
        """One step of SGLang's.

        Args:
            batch: ``ScheduleBatch``.
            on_publish: to be called with the new lengths as soon as they are there.
            grammar_barrier: to be called before grammars are asked.
            **kwargs: for the target's prefill.
        """
        self.guard.note(self.log.update, batch.reqs, self.core.contexts)
        publish = on_publish or (lambda lengths: None)
        if batch.forward_mode.is_extend() or getattr(batch, "is_extend_in_batch", False):
            return self._prefill(batch, publish, {n: v for n, v in kwargs.items() if v is not None})
        if batch.forward_mode.is_idle() or not batch.reqs:
            return self._idle(publish)
        return self._decode(batch, publish, grammar_barrier)

    def _idle(self, publish: Callable[[Tensor], None]) -> Any:
        none = engine.idle_input(self.core.kv.device)
        publish(none.new_seq_lens)
        return engine.result(
            next_token_ids=none.bonus_tokens,
            accept_lens=none.new_seq_lens.int(),
            next_draft_input=none,
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
            new_seq_lens=none.new_seq_lens,
        )

    def _prefill(self, batch: Any, publish: Callable[[Tensor], None], kwargs: dict[str, Any]) -> Any:
        out = engine.prefill(self._target_worker, batch, **kwargs)
        out.new_seq_lens = batch.seq_lens
        publish(batch.seq_lens)
        taps, out.logits_output.hidden_states = out.logits_output.hidden_states, None
        anchors = out.next_token_ids.to(self.core.kv.device, torch.int64)

        def step() -> Drafts:
            told = None if self.live else anchors.tolist()
            chunks = prefill_chunks(batch, told, self.core.kv.store is not None, self.sampled_drafts)
            rows = upload([c.rows for c in chunks], anchors.device)
            return self._step(chunks, taps, Live(batch.seq_lens.long() - rows, rows, anchors), batch)

        self._keep(batch, step)
        out.next_draft_input = engine.next_input(anchors, batch.seq_lens)
        return out

    def _decode(self, batch: Any, publish: Callable[[Tensor], None], grammar_barrier: Any) -> Any:
        assert self.slots is not None
        info, lengths, width = batch.sampling_info, batch.seq_lens.long(), self.speculative_num_draft_tokens
        if lengths.is_cuda:  # with overlapped scheduling they come from another stream
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        proposal = self.slots.take(batch.req_pool_indices, sampled=not info.is_all_greedy)
        blocks = torch.cat((batch.spec_info.bonus_tokens.view(-1, 1).long(), proposal.tokens), 1)
        positions = lengths[:, None] + torch.arange(width, device=lengths.device)
        # A request that ended in the step before may be run once more, beyond the longest length.
        columns = positions.clamp_max(self.places.shape[1] - 1)
        places = self.places[batch.req_pool_indices.long()[:, None], columns].long()
        out = engine.verify(self._target_worker, batch, blocks, positions, places)
        logits, taps = out.logits_output.next_token_logits, out.logits_output.hidden_states
        engine.adjust(logits, batch, blocks, grammar_barrier)
        heat = temperatures(info)
        rows = logits.view(*blocks.shape, -1)
        if heat is not None:
            rows = keep_sampled(rows, heat, info)
        decision = dflash2.verify(proposal, rows, 0.0 if heat is None else heat, generator=self.noise)
        kept, anchors = decision.accepted + 1, decision.next_token
        ends = lengths + kept
        publish(ends)
        tokens = torch.cat((proposal.tokens, anchors[:, None]), 1).scatter(
            1, decision.accepted[:, None], anchors[:, None]
        )

        def step() -> Drafts:
            chunks = self._decode_chunks(batch, blocks, lengths, kept, anchors)
            return self._step(chunks, taps, Live(lengths, kept, anchors), batch)

        self._keep(batch, step)
        out.logits_output.hidden_states = None
        return engine.result(
            logits_output=out.logits_output,
            next_token_ids=tokens.reshape(-1),
            accept_lens=kept.int(),
            can_run_cuda_graph=out.can_run_cuda_graph,
            next_draft_input=engine.next_input(anchors, ends),
            speculative_num_draft_tokens=width,
            new_seq_lens=ends,
        )

    def _decode_chunks(self, batch: Any, blocks: Tensor, lengths: Tensor, kept: Tensor, anchors: Tensor) -> list[Chunk]:
        if self.live:
            return moved_chunks(batch, blocks.shape[1])
        told = torch.cat((lengths[:, None], kept[:, None], anchors[:, None], blocks), 1).tolist()
        starts, valid, newest = ([row[i] for row in told] for i in range(3))
        return decode_chunks(batch, starts, [row[3:] for row in told], valid, newest, self.sampled_drafts)

    def _step(self, chunks: list[Chunk], taps: Tensor, live: Live, batch: Any) -> Drafts:
        if not self.live:
            return self.core.step(chunks, taps, self.noise)
        heat = temperatures(batch.sampling_info) if self.sampled_drafts else None
        return self.core.step(chunks, taps, self.noise, Live(live.starts, live.valid, live.anchors, heat))

    def _keep(self, batch: Any, step: Callable[[], Drafts]) -> None:
        """Draft, or not if that fails, for the next step of these requests."""
        assert self.slots is not None
        drafts = self.guard.run(step, len(batch.reqs), self.core)
        self.slots.put(batch.req_pool_indices, drafts)
