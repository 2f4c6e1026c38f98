"""The recipe of docs/training.md, from nothing to a report, at toy size."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from dflash2.cli import _parser, main
from dflash2.training.config_file import load_config

DOCS = Path(__file__).parents[2] / "docs" / "training.md"


def recipe() -> list[list[str]]:
    """Arguments of the commands in the first code block of the docs."""
    block = re.search(r"```bash\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    lines = block[1].replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("dflash2 ")]


@pytest.mark.parametrize("line", re.findall(r"^dflash2 .*", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
def test_commands_of_the_docs_parse(line):
    args = _parser().parse_args(shlex.split(line, comments=True)[1:])
    if args.command == "train" and args.set:
        load_config(None, ["target=t", "shards=a.npz", "out=o", "max_steps=1", *args.set])


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / "prompts.jsonl"
    words = [" ".join(f"w{3 + (7 * i + j * j) % 56}" for j in range(4 + i % 4)) for i in range(24)]
    file.write_text("".join(json.dumps({"turns": [w], "domain": "words"}) + "\n" for w in words))
    return file


def test_three_commands_make_a_drafter_and_a_report(toy_target_folder, prompts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DFLASH2_EMBEDDED_TARGET", str(toy_target_folder))
    synth, train, evaluate = recipe()
    assert [c[0] for c in (synth, train, evaluate)] == ["synth", "train", "eval"]
    small = {"--max-new-tokens": "36", "--device": "cpu"}
    assert main(_changed(synth, {"--prompts": str(prompts), **small})) == 0
    said = np.concatenate([np.load(shard)["tokens"] for shard in Path("tokens").glob("*.npz")])
    unsaid = min(set(range(61)) - set(said.tolist()))
    toy = [
        "device=cpu", "dtype=float32", "row_tokens=96", "rows_per_step=2", "anchors_per_row=32", "tile=8",
        "max_steps=4", "drafter.num_hidden_layers=2", "drafter.conv_group_size=8", "drafter.target_layer_ids=[1,2,4]",
        "drafter.selector_rank=4", "drafter.selector_top_k=4", "val_permille=200", "log_seconds=0",
    ]  # fmt: skip
    toy.append(f"drafter.mask_token_id={unsaid}")
    assert main([*train, "--set", *toy]) == 0
    assert main(_changed(evaluate, {"--prompts": str(prompts), "--limit": "4", **small})) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert 1 <= lines[-1]["validation"]["rounds"] <= 8
    report = json.loads(Path("report/report.json").read_text())
    assert report["runs"]
    assert Path("report/report.html").stat().st_size > 1000


def _changed(command: list[str], options: dict[str, str]) -> list[str]:
    """The command with other values of some options; those that it lacks are added."""
    for name, value in options.items():
        if name in command:
            at = command.index(name) + 1
            end = next((i for i in range(at, len(command)) if command[i].startswith("--")), len(command))
            command = [*command[:at], value, *command[end:]]
        else:
            command = [*command, name, value]
    return command
