"""A real SGLang engine on the CPU, and what its drafter was told and answered."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapters.cold import Round

STUBS = Path(__file__).parent / "stubs"
SMALL = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch",
    "grammar_backend": "none", "disable_cuda_graph": True, "disable_overlap_schedule": True,
    "skip_tokenizer_init": True, "mem_fraction_static": 0.2, "max_running_requests": 4, "max_total_tokens": 4096,
    "context_length": 1024, "chunked_prefill_size": 64, "schedule_policy": "lpm", "log_level": "warning",
    "sleep_on_idle": True,
}  # fmt: skip


@contextmanager
def environment(**values: str):
    """Of processes that begin meanwhile."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Engine:
    """`sglang.Engine` in a process of its own, since it keeps its arguments in globals; the scheduler is its child.

    Args:
        target: folder.
        drafter: folder; None for an engine without the plug-in's algorithm.
        record: file for what the drafter does.
        variables: of the processes' environment.
        **kw: SGLang's arguments.
    """

    def __init__(self, target: str, drafter: str | None, record: Path, variables: Mapping[str, str] = {}, **kw):
        self.record, self.outputs = record, {}
        if drafter is not None:
            kw |= {"speculative_algorithm": "DFLASH2", "speculative_draft_model_path": drafter}
        path = os.pathsep.join([str(STUBS), str(STUBS.parent), os.environ.get("PYTHONPATH", "")])
        told = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "DFLASH2_RECORD": str(record), "PYTHONPATH": path}
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        with environment(**told, **variables):
            self.process = context.Process(target=_serve, args=(theirs, SMALL | kw | {"model_path": target}))
            self.process.start()
        theirs.close()

    def run(
        self,
        prompts: Mapping[str, Sequence[int]],
        params: Mapping[str, Any],
        concurrency: int = 4,
        aborts: Mapping[str, int] | None = None,
    ) -> dict[str, list[int]]:
        """Token ids of each request.

        Args:
            prompts: by name, which is the request's id.
            params: sampling parameters, for all or by name.
            concurrency: requests under way at a time.
            aborts: names to abort once so many tokens are there.
        """
        self.pipe.send((dict(prompts), dict(params), concurrency, dict(aborts or {})))
        try:
            answer = self.pipe.recv()
        except EOFError:
            raise RuntimeError("the engine ended") from None
        if isinstance(answer, Exception):
            raise answer
        self.outputs |= answer
        return {name: list(answer[name]["output_ids"]) for name in prompts}

    def stop(self) -> None:
        """End its processes."""
        self.pipe.close()
        self.process.join(30)
        self.process.kill()

    def steps(self) -> list[dict[str, Any]]:
        """All that was noted so far."""
        return [json.loads(line) for line in self.record.read_text().splitlines()] if self.record.exists() else []

    def rounds(self, names: Sequence[str]) -> list[Round]:
        """Rounds in which these requests got drafts."""
        return [
            Round(request, start + valid, anchor, drafts, start)
            for step in self.steps()
            for request, start, _, valid, anchor, drafts in step["chunks"]
            if drafts is not None and request in names
        ]

    def tokens_per_pass(self, names: Sequence[str]) -> float:
        """Of SGLang's own count: the first token of a request is no verify pass's."""
        meta = [self.outputs[name]["meta_info"] for name in names]
        return sum(m["completion_tokens"] - 1 for m in meta) / sum(m["spec_verify_ct"] for m in meta)


def _serve(pipe: Any, kw: dict[str, Any]) -> None:
    """In the engine's process: answer what comes through the pipe until it closes."""
    import sglang

    engine = sglang.Engine(**kw)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            engine.shutdown()
            return
        try:
            pipe.send(engine.loop.run_until_complete(_answers(engine, *task)))
        except Exception as e:  # noqa: BLE001  it is the test's
            pipe.send(type(e)(*map(str, e.args)))


async def _answers(engine: Any, prompts: dict, params: dict, concurrency: int, aborts: dict) -> dict[str, dict]:
    gate, outputs = asyncio.Semaphore(concurrency), {}

    async def one(name: str) -> None:
        async with gate:
            stream = await engine.async_generate(
                input_ids=list(prompts[name]), sampling_params=dict(params.get(name, params)), rid=name, stream=True
            )
            async for out in stream:
                outputs[name] = out
                if len(out["output_ids"]) >= aborts.get(name, 1 << 30):
                    del aborts[name]
                    engine.tokenizer_manager.abort_request(name)

    await asyncio.gather(*(one(name) for name in prompts))
    return outputs
