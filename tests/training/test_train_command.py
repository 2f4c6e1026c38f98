"""`dflash2 train` as a process: killed and started again, and what it says of wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train import DRAFTER, settings, trainer

from dflash2.cli import main
from dflash2.training.config_file import load_config


def settings_file(folder: Path, **values) -> Path:
    file = folder / "settings.json"
    file.write_text(json.dumps(values))
    return file


def test_a_run_that_is_killed_loses_nothing(toy_llama, toy_target_folder, shard, tmp_path):
    trainer(toy_llama, shard, tmp_path / "whole", max_steps=40).run()
    c = vars(settings(shard, tmp_path / "killed", max_steps=40, save_steps=1)) | {"target": str(toy_target_folder)}
    command = [sys.executable, "-m", "dflash2", "train", "--config", str(settings_file(tmp_path, **c))]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 5):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reached = torch.load(tmp_path / "killed" / "resume.pt", weights_only=True)["step"]
    assert 3 < reached < 40
    trainer(toy_llama, shard, tmp_path / "killed", max_steps=40).run()
    a, b = (torch.load(tmp_path / n / "resume.pt", weights_only=True) for n in ("whole", "killed"))
    assert a["step"] == b["step"] == 40
    for x, y in zip(a["optimizer"]["masters"], b["optimizer"]["masters"], strict=True):
        assert torch.equal(x, y)
    files = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("whole", "killed")]
    assert files[0] == files[1]
    lines = [
        [json.loads(x) for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("whole", "killed")
    ]
    assert [x["step"] for x in lines[1]] == list(range(1, 41))
    assert [x["loss"] for x in lines[1]] == [x["loss"] for x in lines[0]]


def test_a_settings_file_is_written_once(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    assert main(["train", "--write-config", str(file)]) == 0
    assert "mask_token_id" in capsys.readouterr().out
    assert load_config(file, ["max_steps=3"]).drafter == {"mask_token_id": 16}
    assert main(["train", "--write-config", str(file)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": ["nowhere/*.npz"]}, "'nowhere/.*' matches no file. Write shards with"),
        ({"drafter": {**DRAFTER, "mask_token_id": 5}}, "shards hold the mask token 5 .* times"),
        ({"drafter": {k: v for k, v in DRAFTER.items() if k != "mask_token_id"}}, "mask_token_id is missing"),
        ({"drafter": {**DRAFTER, "hidden_size": 48}}, "does not fit the target: hidden_size: drafter 48, target 32"),
        (
            {"drafter": {**DRAFTER, "target_layer_ids": [9]}},
            r"target_layer_ids=\[9\]: needs layers in \[0, num_target_layers=6",
        ),
        ({"drafter": {**DRAFTER, "blocksize": 4}}, r"drafter: unknown fields \['blocksize'\]"),
        ({"learning_rate": 1}, r"unknown training settings \['learning_rate'\]"),
        ({"gold": "best"}, "gold='best': must be 'argmax' or 'token'"),
        ({"selector_miss": "drop"}, "selector_miss='drop': must be 'exclude' or 'inject'"),
        ({"hard_weight": 0, "soft_weight": 0}, "one of them above 0"),
        ({"tv_weight": -1}, "must not be negative"),
        ({"lr": "fast"}, "lr='fast': expected a number"),
        ({"ema": "0.9x"}, "ema='0.9x': expected a number"),
        ({"max_steps": 1.5}, "max_steps=1.5: expected a int"),
        ({"fast": True}, "fast=true on cpu: flex attention has a backward pass on GPUs only"),
        ({"accumulate": 3}, "rows_per_step=2: must be a multiple of accumulate=3"),
        ({"target": "./no-such-target"}, "no-such-target: no such folder"),
        ({"row_tokens": 5}, "documents fill 0 rows of 5, fewer than rows_per_step=2"),
    ],
)
def test_wrong_input_is_said_before_anything_is_trained(change, message, toy_target_folder, shard, tmp_path, capsys):
    import re

    c = vars(settings(shard, tmp_path / "run")) | {"target": str(toy_target_folder)} | change
    assert main(["train", "--config", str(settings_file(tmp_path, **c))]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_shards_of_another_vocabulary_are_refused(toy_target_folder, shard, tmp_path, capsys):
    with np.load(shard) as z:
        arrays = dict(z)
    np.savez(tmp_path / "b.npz", **arrays | {"tokens": arrays["tokens"] + 40})
    c = vars(settings(tmp_path / "b.npz", tmp_path / "run")) | {"target": str(toy_target_folder)}
    assert main(["train", "--config", str(settings_file(tmp_path, **c))]) == 2
    assert "the target's vocabulary ends at 60: they were written for another target" in capsys.readouterr().err
