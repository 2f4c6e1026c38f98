"""Two processes against one: the same losses, weights and checkpoints, with weights held by each or split."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_train import DRAFTER

from dflash2.errors import ConfigError
from dflash2.training.checks import check_split
from dflash2.training.config import TrainConfig
from dflash2.training.parallel import Processes
from dflash2.training.target import FrozenTarget
from dflash2.training.train import Trainer

#: Trains one run after the other, in one of several processes: each a file of settings.
PROGRAM = """
import sys, torch
from dflash2.training.config_file import load_config
from dflash2.training.train import train
torch.set_num_threads(1)
for file in sys.argv[1:]:
    train(load_config(file))
"""
#: What is changed, and which run of one process it has to equal.
RUNS = {
    "ddp": ({}, "alone"),
    "fsdp": ({"sharding": "fsdp"}, "alone"),
    "ddp in parts": ({"accumulate": 2, "selector_mean": "rows"}, "alone by rows"),
    "fsdp in parts": ({"accumulate": 2, "selector_mean": "rows", "sharding": "fsdp"}, "alone by rows"),
    "ddp resumed": ({"out": "paused ddp"}, "alone"),
    "fsdp resumed": ({"out": "paused fsdp", "sharding": "fsdp"}, "alone"),
}


def in_two_processes(folder: Path, runs: list[dict]) -> None:
    files = [folder / f"settings-{i}.json" for i in range(len(runs))]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(run))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, files)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
            env=shared | {"RANK": str(i), "LOCAL_RANK": str(i)}, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    for process in started:
        _, errors = process.communicate(timeout=150)
        assert process.returncode == 0, errors[-3000:]


def curve(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def folder(shard, toy_llama, toy_target_folder, tmp_path_factory) -> Path:
    """Of runs of four steps: by one process, paused after one step, and by two."""
    root = tmp_path_factory.mktemp("runs")
    base = {
        "target": str(toy_target_folder), "shards": [str(shard)], "drafter": dict(DRAFTER), "device": "cpu",
        "dtype": "float32", "row_tokens": 96, "rows_per_step": 4, "anchors_per_row": 16, "tile": 8, "max_steps": 4,
        "log_seconds": 0, "eval_seconds": 0, "save_seconds": 0, "save_steps": 2, "val_permille": 200, "ema": 0.9,
    }  # fmt: skip
    ones = {"alone": {}, "alone by rows": {"selector_mean": "rows"}}
    ones |= {name: {"pause_seconds": 1e-6} for name in ("paused ddp", "paused fsdp")}
    for name, change in ones.items():
        Trainer(TrainConfig(**base | {"out": str(root / name)} | change), FrozenTarget(toy_llama, ())).run()
    twos = [base | change | {"out": str(root / change.get("out", name))} for name, (change, _) in RUNS.items()]
    in_two_processes(root, twos)
    return root


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_do_what_one_does(folder, name):
    change, single = RUNS[name]
    ours, alone = folder / change.get("out", name), folder / single
    mine, theirs = curve(ours), curve(alone)
    assert [line["step"] for line in mine] == [1, 2, 3, 4]
    for a, b in zip(mine, theirs, strict=True):
        for key in ("loss", "base", "selector", "grad_norm", "expected_length"):
            assert a[key] == pytest.approx(b[key], rel=1e-5), (a["step"], key)
        for key in ("top1", "recall", "choice"):
            assert a[key] == b[key]
    states = [torch.load(f / "resume.pt", weights_only=True)["optimizer"] for f in (ours, alone)]
    for key in ("masters", "average"):
        for a, b in zip(states[0][key], states[1][key], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6)
    assert (ours / "model.safetensors").stat().st_size == (alone / "model.safetensors").stat().st_size


def test_rows_that_cannot_be_split_are_refused():
    c = TrainConfig(target="t", shards=["a"], out="o", max_steps=1, device="cpu", rows_per_step=6, accumulate=2)
    with pytest.raises(ConfigError, match="rows_per_step=6 cannot be split over 2 processes.*a multiple of 4"):
        check_split(c, 2)


def test_other_floats_than_ours_are_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match="accelerate is set up for fp16: set dtype"):
        Processes("cpu", "none")
