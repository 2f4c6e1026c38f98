"""vLLM's V2 model runner on the CPU, its Triton kernels in the interpreter: prints tokens and drafts as JSON.

Usage: v2_on_cpu.py TASK.json; with DFLASH2_VLLM=off the drafts are vLLM's own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import conftest  # noqa: F401  sets what vLLM reads from the environment

os.environ["TRITON_INTERPRET"], os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1", "1"


def pretend_that_triton_has_a_cpu() -> None:
    """An active backend, or vLLM turns Triton off; and masks as bools, which the interpreter wants of them."""
    import numpy as np
    import torch
    import triton.backends as backends
    import triton.runtime.interpreter as interpreter
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        def __init__(self) -> None: ...

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 0)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            return lambda *args, **kwargs: 0.0

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    backends.backends["cpu"] = backends.Backend(compiler=backends.backends["nvidia"].compiler, driver=Driver)

    def boolean(mask: Any) -> Any:
        if mask.data.dtype == np.bool_:
            return mask
        return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    builder.create_masked_load = lambda self, p, mask, *args: load(self, p, boolean(mask), *args)
    builder.create_masked_store = lambda self, p, v, mask, c: store(self, p, v, boolean(mask), c)


def record_theirs(drafts: dict[str, list[int]]) -> None:
    from engine import named
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

    propose = DFlash2Speculator.propose

    def recording(self, batch, *args, **kwargs):
        out = propose(self, batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            sampled, rejected, last = args[4], args[5], args[6].view(-1)
            for i in range(batch.num_reqs):
                if int(sampled[i]):
                    end = int(batch.positions[int(batch.query_start_loc[i + 1]) - 1 - int(rejected[i])]) + 1
                    key = f"{named(batch.req_ids[i])} {end} {int(last[int(batch.idx_mapping[i])])}"
                    drafts[key] = out[i].tolist()
        return out

    DFlash2Speculator.propose = recording


def main(path: str) -> None:
    from engine import Engine, named
    from vllm import SamplingParams

    with open(path) as f:
        task = json.load(f)
    drafts: dict[str, list[int]] = {}
    ours = os.environ.get("DFLASH2_VLLM") != "off"
    if not ours:
        record_theirs(drafts)
    engine = Engine(*task["pair"], method=task.get("method", "greedy"), **task.get("settings", {}))
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | task["params"])
    counters = {}
    if ours:
        from dflash2.testing import cpu_as_device

        core = engine.runner.speculator.core
        step = core.step

        def recording(chunks, taps, noise, live):
            with cpu_as_device():
                out = step(chunks, taps, noise, live)
            for i, c in enumerate(chunks):
                if c.anchor is not None and bool(out.drafted[i]):
                    key = f"{named(c.request)} {int(live.starts[i] + live.valid[i])} {int(live.anchors[i])}"
                    drafts[key] = out.tokens[i].tolist()
            return out

        core.step = recording
    tokens = [engine.run(task["prompts"], params) for _ in range(task.get("runs", 1))]
    if ours:
        counters = {**vars(core.counters), "pages_in_use": core.kv.pages_in_use, "invalid": core.invalid}
        counters["failed_steps"] = engine.runner.speculator.guard.failed_steps
    print(json.dumps({"tokens": tokens, "drafts": drafts, "counters": counters}))


if __name__ == "__main__":
    pretend_that_triton_has_a_cpu()
    main(sys.argv[1])
