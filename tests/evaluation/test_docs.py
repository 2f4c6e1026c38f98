"""docs/measuring.md: its commands parse, its Python runs, its definition and metrics are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import test_eval_command

from dflash2 import cli
from dflash2.drafter import DFlash2Drafter
from dflash2.evaluation.definition import DEFINITION
from dflash2.evaluation.evaluate import replay_trace, rows
from dflash2.evaluation.trace import Trace

TEXT = (Path(__file__).resolve().parents[2] / "docs/measuring.md").read_text(encoding="utf-8")
COMMANDS = [s for block in re.findall(r"^```sh\n(.*?)^```", TEXT, re.M | re.S) for s in block.splitlines()]
(SNIPPET,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)

prompts, traced = test_eval_command.prompts, test_eval_command.traced


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line):
    cli._parser().parse_args(shlex.split(line, comments=True)[1:])


def test_the_snippet_runs(pair, traced, capsys):
    source = SNIPPET.replace('"trace"', repr(traced)).replace('"smollm2-135m-dflash2"', repr(pair[1]))
    exec(compile(source, "docs/measuring.md", "exec"), {})
    assert re.search(r"^7 drafts: 1\.\d+ \[", capsys.readouterr().out, re.M)


def test_definition_and_metrics_are_the_codes(pair, traced):
    assert DEFINITION in TEXT.replace("\n", " ")
    trace = Trace(traced)
    replayed = replay_trace(trace, DFlash2Drafter.from_pretrained(pair[1], dtype=trace.dtype))
    costs = dict.fromkeys(range(8), 1.0)
    found = rows({"a": replayed, "b": replayed}, {"a": costs, "b": costs})
    explained = set(re.findall(r"`(\w+)`", TEXT[TEXT.index("| metric |") : TEXT.index("Rates count")]))
    assert {r.metric for r in found} == explained
