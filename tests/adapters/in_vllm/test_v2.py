"""The V2 model runner, for GPUs, in the Triton interpreter: vLLM's own DFlash2 drafts are what ours are held to."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapters.pairs import make_pair

from dflash2.adapters.chunks import Drafts
from dflash2.adapters.vllm.speculator import Speculating


def run(task: dict, folder: Path, switch: str) -> dict:
    """What `v2_on_cpu` prints for the task, in a process of its own."""
    told = folder / "task.json"
    told.write_text(json.dumps(task))
    environment = os.environ | {"DFLASH2_VLLM": switch, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parent / "v2_on_cpu.py"
    done = subprocess.run(
        [sys.executable, str(script), str(told)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict:
    rng = random.Random(3)
    head = [rng.randrange(256) for _ in range(80)]
    prompts = {f"r{i}": (head if i % 2 else []) + [rng.randrange(256) for _ in range(20 + i)] for i in range(4)}
    pair = make_pair(tmp_path_factory.mktemp("v2"), plain_qk=True)
    return {"pair": pair, "prompts": prompts, "params": {"max_tokens": 10}, "runs": 2}


def test_drafts_are_those_of_vllm_itself(task, tmp_path):
    """Chunked prompts and, in the second run, prefix hits; positions, lengths and anchors stay on the device."""
    ours, theirs = (run(task, tmp_path, switch) for switch in ("on", "off"))
    assert ours["tokens"] == theirs["tokens"]
    common = ours["drafts"].keys() & theirs["drafts"].keys()
    assert len(common) >= 36
    assert {key for key in common if ours["drafts"][key] != theirs["drafts"][key]} == set()
    counters = ours["counters"]
    assert counters["restored"] >= 2
    assert (counters["holes"], counters["invalid"], counters["failed_steps"], counters["pages_in_use"]) == (0, 0, 0, 0)
    assert counters["failures"] == {}


@pytest.mark.parametrize("divides", [False, True], ids=["0.26", "0.32"])
def test_the_rejection_sampler_is_given_what_drafts_were_drawn_from(divides):
    """As logits whose softmax it takes; newer versions divide them by the temperature first.

    (Sampled requests end in the interpreter: one of vLLM's own kernels does not run there.)
    """
    kind = type("Newer", (Speculating,), {"draft_logits_spec": None} if divides else {})
    torch.manual_seed(0)
    candidates = torch.tensor([[[4, 1, 7], [2, 0, 9]], [[1, 2, 3], [5, 6, 7]]])
    q = torch.rand(2, 2, 3).softmax(-1)
    q[1] = torch.tensor([0.0, 1.0, 0.0])  # a greedy row
    drafts = Drafts(candidates[:, :, 0], torch.ones(2, dtype=torch.bool), candidates, q)
    heat, logits = torch.tensor([0.7, 0.0]), torch.zeros(4, 2, 12)
    kind._publish(object.__new__(kind), logits, drafts, torch.tensor([3, 1]), heat)
    scale = torch.where(heat > 0, heat, 1.0)[:, None, None] if divides else 1.0
    expected = torch.zeros(2, 2, 12).scatter_(-1, candidates, q)
    torch.testing.assert_close((logits[[3, 1]] / scale).softmax(-1), expected)
    assert not logits[[0, 2]].any()
