"""vLLM's V1 model runner: what its step computed goes to `RequestDrafter`, and drafts go back."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash2.adapters.base import RequestDrafter
from dflash2.adapters.chunks import Chunk, Drafts
from dflash2.adapters.vllm.hooks import engine_version, warn_if_untested
from dflash2.adapters.vllm.settings import Settings
from dflash2.drafter import DFlash2Drafter
from dflash2.errors import ConfigError
from dflash2.lm_head import Int8LMHead

__all__ = ["make_proposer", "target_tables"]

_log = logging.getLogger("vllm.dflash2")

MOST_STORE_BYTES = 1 << 30


def make_proposer(base: type) -> type:
    """The proposer class for this vLLM, derived from its own so that the runner's type checks hold.

    Args:
        base: ``vllm.v1.spec_decode.dflash.DFlashProposer``.
    """

    class DFlash2Proposer(base):  # type: ignore[misc, valid-type]
        """Drafts from the drafter's own KV. Registers no attention layer, so nothing of it enters vLLM's KV cache."""

        def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None):
            super().__init__(vllm_config, device, runner)
            warn_if_untested()
            self.runner = runner
            self.core: RequestDrafter | None = None
            self.failed_steps = 0
            _follow_ends(runner, self)

        def load_model(self, target_model: nn.Module) -> None:
            """Load the drafter and take its memory now, before vLLM measures what is left for its own KV cache."""
            self.model, self._draft_attn_layer_names = None, set()
            self.core = _make_core(self.vllm_config, self.device, target_model, self.num_speculative_tokens)

        def initialize_attn_backend(self, kv_cache_config: Any, kernel_block_sizes: Any = None) -> None:
            """No layers of ours; a real group's id, or vLLM makes no attention metadata for the drafter's step."""
            self.kv_cache_gid, self.draft_attn_groups = 0, []
            self.block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size

        def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
            """Nothing of ours is in any group."""

        def dummy_run(self, *args: Any, **kwargs: Any) -> None:
            """Memory is taken already, and there is nothing to compile."""

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
            self._last_draft_probs = None
            count = common_attn_metadata.num_reqs
            vocab = self.vllm_config.model_config.get_vocab_size()
            try:
                chunks = self._chunks(
                    target_token_ids, target_positions, next_token_ids, common_attn_metadata, sampling_metadata,
                    num_rejected_tokens_gpu,
                )  # fmt: skip
                rows = sum(c.rows for c in chunks)
                drafts = self.core.step(chunks, target_hidden_states[:rows])
            except Exception:  # noqa: BLE001  whatever it is, the engine goes on without drafts
                self.failed_steps += 1
                _log.exception("dflash2: a step without drafts (%d so far)", self.failed_steps)
                tokens = torch.zeros(count, self.core.k, dtype=torch.int64, device=self.device)
                drafts = Drafts(tokens, tokens.new_zeros(count, dtype=torch.bool), None, None)
            if self._enable_probabilistic_draft_probs and drafts.q is not None:
                self._last_draft_probs = drafts.dense_q(vocab)[:, :num_speculative_tokens].contiguous()
            return drafts.tokens[:, :num_speculative_tokens].contiguous()

        def _chunks(
            self,
            tokens: Tensor,
            positions: Tensor,
            next_ids: Tensor,
            common: Any,
            sampling: Any,
            rejected: Tensor | None,
        ) -> list[Chunk]:  # fmt: skip
            """One per request, in the batch's order."""
            batch, count = self.runner.input_batch, common.num_reqs
            bounds = common.query_start_loc_cpu[: count + 1].tolist()
            if positions.dim() > 1:
                positions = positions[0]  # of text all of M-RoPE's are equal
            starts = positions[common.query_start_loc[:count].long()].tolist()
            gone = [0] * count if rejected is None else rejected[:count].tolist()
            anchors, ids = next_ids[:count].tolist(), tokens[: bounds[-1]].tolist()
            unfinished = self.runner.discard_request_mask.np[:count].tolist()
            heat = [0.0] * count
            if self._enable_probabilistic_draft_probs and sampling.temperature is not None:
                heat = sampling.temperature[:count].tolist()
            return [
                Chunk(
                    request=batch.req_ids[i],
                    start=starts[i],
                    tokens=ids[bounds[i] : bounds[i + 1]],
                    rows=bounds[i + 1] - bounds[i],
                    valid=bounds[i + 1] - bounds[i] - gone[i],
                    anchor=None if unfinished[i] else anchors[i],
                    temperature=max(heat[i], 0.0),
                    prefix=lambda i=i, n=starts[i]: batch.token_ids_cpu[i, :n].tolist(),
                )
                for i in range(count)
            ]

    return DFlash2Proposer


def _follow_ends(runner: Any, proposer: Any) -> None:
    """Hear of requests that end or begin: their ids may name something else from now on."""
    update = runner._update_states

    def update_states(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if proposer.core is not None:
            proposer.core.forget(list(scheduler_output.finished_req_ids))
            proposer.core.forget([r.req_id for r in scheduler_output.scheduled_new_reqs])
        return update(scheduler_output, *args, **kwargs)

    runner._update_states = update_states


def _make_core(vllm_config: Any, device: torch.device, target: nn.Module, k: int) -> RequestDrafter:
    settings = Settings.of(vllm_config.additional_config)
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "dflash2 drafts on one GPU so far: tensor_parallel_size and pipeline_parallel_size must be 1. "
            "DFLASH2_VLLM=off uses vLLM's own drafter."
        )
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    path = vllm_config.speculative_config.draft_model_config.model
    drafter = DFlash2Drafter.from_pretrained(path, dtype=model.dtype, device=device)
    embedding, head = target_tables(target)
    if settings.int8_head:
        if not isinstance(head, Tensor):
            raise ConfigError("int8_head: the target's head has a bias or is quantised. Leave int8_head out.")
        linear = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(head, requires_grad=False)
        head = Int8LMHead.from_linear(linear)
    drafter.bind_target(embedding, head)
    if settings.int8_linears:
        drafter.quantize_linears()
    size = {
        "max_requests": scheduler.max_num_seqs,
        "max_tokens": model.max_model_len + k + 1,
        "num_draft_tokens": k,
        "page_size": settings.page_size,
    }
    core = RequestDrafter(drafter, **size, prefix_store_bytes=_store_bytes(vllm_config, settings, drafter))
    weights = sum(t.untyped_storage().nbytes() for t in (*drafter.parameters(), *drafter.buffers()))
    kv = core.kv
    _log.info(
        "dflash2: drafting %d tokens with %s (%s, windows %s) beside vLLM %s: weights %s bytes, %d pages of %d rows "
        "and prefix store together %s bytes, kernels %s, head %s",
        k, path, drafter.config.architecture, sorted(set(drafter.config.windows), key=str), engine_version(),
        f"{weights:,}", kv.num_pages, kv.page_size, f"{kv.nbytes:,}", drafter.backend,
        "int8" if settings.int8_head else str(model.dtype).removeprefix("torch."),
    )  # fmt: skip
    return core


def _store_bytes(vllm_config: Any, settings: Settings, drafter: DFlash2Drafter) -> int:
    if settings.prefix_store_bytes is not None:
        return settings.prefix_store_bytes
    if not vllm_config.cache_config.enable_prefix_caching:
        return 0
    c = drafter.config
    row = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * drafter.norm.weight.element_size()
    pages = c.window_pages(settings.page_size) or -(-vllm_config.model_config.max_model_len // settings.page_size)
    return min(MOST_STORE_BYTES, vllm_config.scheduler_config.max_num_seqs * pages * settings.page_size * row)


def target_tables(target: nn.Module) -> tuple[Tensor, Any]:
    """The embedding table and the head of a vLLM model: a weight ``[V', H]``, or a callable where there is a bias.

    Raises:
        ConfigError: they cannot be found, or are quantised.
    """
    language: Any = target
    while not hasattr(language, "lm_head") and hasattr(language, "get_language_model"):
        language = language.get_language_model()
    embedding = getattr(getattr(language, "model", None), "embed_tokens", None)
    head = getattr(language, "lm_head", None)
    weights = [getattr(m, "weight", None) for m in (embedding, head)]
    if not all(isinstance(w, Tensor) and w.is_floating_point() for w in weights):
        raise ConfigError(
            f"{type(target).__name__}: no 16-bit model.embed_tokens and lm_head (a quantised head?). "
            "DFLASH2_VLLM=off uses vLLM's own drafter."
        )
    bias = getattr(head, "bias", None)
    if bias is not None:
        return weights[0].data, lambda hidden: F.linear(hidden, head.weight, bias)
    return weights[0].data, weights[1].data
