"""A vLLM engine driven step by step, and what its drafter was told and answered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from adapters.cold import Round
from adapters.pairs import K

from dflash2.adapters.chunks import Chunk

CACHE_BYTES = 128 << 20
SMALL = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 32}


class Engine:
    """`vllm.LLM` in this process."""

    def __init__(
        self, target: str, drafter: str | None, *, k: int = K, method: str = "greedy", plugin: dict | None = None, **kw
    ):
        from vllm import LLM

        if drafter is not None:
            kw["speculative_config"] = {
                "method": "dflash", "model": drafter, "num_speculative_tokens": k, "draft_sample_method": method,
            }  # fmt: skip
        if plugin is not None:
            kw["additional_config"] = {"dflash2": plugin}
        kw = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": False, **SMALL, **kw}
        kw["kv_cache_memory_bytes"] = CACHE_BYTES  # many engines live at a time in one process
        self.llm = LLM(target, **kw)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.names = iter(range(1 << 30))

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def drafter(self) -> Any:
        """The plug-in's `RequestDrafter`."""
        return self.runner.drafter.core

    def run(
        self,
        prompts: Mapping[str, Sequence[int]],
        params: Any,
        *,
        aborts: Mapping[str, int] | None = None,
        arrivals: int = 1 << 30,
    ) -> dict[str, list[int]]:
        """Token ids of each request.

        Args:
            prompts: by name; ``params`` is one `SamplingParams` or one for each name.
            aborts: names to abort once so many tokens are there.
            arrivals: requests added per step.
        """
        waiting, results, outputs = list(prompts), {n: [] for n in prompts}, {}
        aborts = dict(aborts or {})
        salt = next(self.names)
        while waiting or self.engine.has_unfinished_requests():
            for name in waiting[:arrivals]:
                mine = params[name] if isinstance(params, Mapping) else params
                self.engine.add_request(f"{salt}/{name}", {"prompt_token_ids": list(prompts[name])}, mine)
            del waiting[:arrivals]
            for out in self.engine.step():
                name = out.request_id.partition("/")[2]
                results[name], outputs[name] = list(out.outputs[0].token_ids), out
                if name in aborts and len(results[name]) >= aborts[name]:
                    self.engine.abort_request([out.request_id])
                    del aborts[name]
        self.engine.step()  # tells the runner of the last ends
        self.outputs = outputs
        return results

    @contextmanager
    def recorded(self):
        """Rounds in which a request got drafts, and every chunk: two lists that fill up."""
        rounds: list[Round] = []
        chunks: list[Chunk] = []
        step = self.drafter.step

        def recording(given, taps, *args, **kw):
            out = step(given, taps, *args, **kw)
            chunks.extend(given)
            for i, c in enumerate(given):
                if c.anchor is not None and bool(out.drafted[i]):
                    rounds.append(Round(named(c.request), c.start + c.valid, c.anchor, out.tokens[i].tolist(), c.start))
            return out

        self.drafter.step = recording
        try:
            yield rounds, chunks
        finally:
            del self.drafter.step

    def metric(self, name: str) -> float:
        """A counter of vLLM's."""
        return sum(m.value for m in self.llm.get_metrics() if m.name == f"vllm:{name}")


def named(chunk_request: str) -> str:
    """A request's name in the test: vLLM may add a suffix to ids."""
    return chunk_request.partition("/")[2].partition("-")[0]


def dumps(value: object) -> str:
    return json.dumps(value, sort_keys=True)
