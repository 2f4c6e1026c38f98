from __future__ import annotations

import json
import sys

import pytest

from dflash2.errors import ConfigError
from dflash2.training.metrics import Metrics


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_of_steps_that_a_kill_undid_are_taken_out(tmp_path):
    first = Metrics(tmp_path / "run", 0, tensorboard=False)
    for step in (1, 2, 3):
        first.write({"step": step, "loss": 1.0 / step})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    again = Metrics(tmp_path / "run", 2, tensorboard=False)
    again.write({"step": 3, "loss": 7.0})
    assert lines(tmp_path / "run") == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 7.0}]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path, 0, tensorboard=True)
    metrics.write({"step": 1, "loss": 2.0, "top1": [0.5, 0.25], "validation": {"rounds": 3.0, "by_row": [0.75]}})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    got = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    expected = {"loss": 2.0, "top1/1": 0.5, "top1/2": 0.25, "validation/rounds": 3.0, "validation/by_row/1": 0.75}
    assert got == {name: [(1, value)] for name, value in expected.items()}


def test_without_tensorboard_there_is_a_hint(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'dflash2\[train\]', or set it to false"):
        Metrics(tmp_path, 0, tensorboard=True)
