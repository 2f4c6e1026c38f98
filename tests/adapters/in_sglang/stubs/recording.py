"""Notes what the drafter is told and answers in the scheduler's process, one JSON line a step."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext

from dflash2.adapters.vllm.after_import import after_import

FAILING = "failing0"


def install(path: str) -> None:
    """``path``: the file. ``DFLASH2_TEST_OVERLAP=1`` has the schedule overlap, as it does on GPUs."""
    if os.environ.get("DFLASH2_TEST_OVERLAP") == "1":
        after_import("dflash2.adapters.sglang.arguments", _let_overlap)
    after_import("dflash2.adapters.sglang.worker", lambda module: _follow(module.Drafting, path))


def _let_overlap(module) -> None:
    """CPU tensors count as an accelerator's; what SGLang does to streams has no meaning for them."""
    import torch

    resolve = module.resolve

    def overlapping(args):
        return {name: value for name, value in resolve(args).items() if name != "disable_overlap_schedule"}

    module.resolve = overlapping
    torch.Tensor.record_stream = lambda tensor, stream: None


def _follow(drafting: type, path: str) -> None:
    step, begin = drafting._step, drafting.__init__
    on_device = os.environ.get("DFLASH2_TEST_OVERLAP") == "1"

    def begun(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        append = self.core._append

        def checked(some, taps):
            if any(p.chunk.request == FAILING for p in some):
                raise ValueError("a test wants this request to fail")
            append(some, taps)

        self.core._append = checked

    def noted(self, chunks, taps, live, batch):
        from dflash2.testing import cpu_as_device

        with cpu_as_device() if on_device else nullcontext():
            out = step(self, chunks, taps, live, batch)
        rows = zip(chunks, live.starts, live.valid, live.anchors, out.drafted, out.tokens, strict=True)
        entry = {
            "chunks": [
                [c.request, int(s), c.rows, int(v), int(a) if c.anchor is not None else None, t.tolist() if d else None]
                for c, s, v, a, d, t in rows
            ],
            "temperatures": [c.temperature for c in chunks],
            "counters": {k: v for k, v in vars(self.core.counters).items() if isinstance(v, int)},
            "failures": dict(self.core.counters.failures),
            "failed_steps": self.guard.failed_steps,
            "requests": len(self.core.requests),
            "pages": self.core.kv.pages_in_use,
            "invalid": self.core.invalid,
        }
        with open(path, "a") as f:
            f.write(json.dumps(entry) + "\n")
        return out

    drafting._step, drafting.__init__ = noted, begun
