"""Runs side by side: what each was trained with, and what it accepts, as a table and as JSON.

``python -m dflash2.training.ablation --runs v1 conv selector both --reports report/report.json --out ablation.json``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash2.command import run_command
from dflash2.errors import ConfigError

__all__ = ["compare", "main", "table"]

METRIC = "acceptance_length"


def compare(runs: Sequence[Path], reports: Sequence[Path]) -> dict[str, Any]:
    """Collect what runs were and what they reached.

    Args:
        runs: folders of `dflash2 train`; the first is what the others are compared with.
        reports: ``report.json`` of `dflash2 eval`, with these folders as drafters; none: validation only.

    Returns:
        for each run its steps, the settings that differ between runs, the validation curve (tokens trained on against
        acceptance length), and by dataset acceptance length, its interval, and the gain on the first run.
    """
    settings = [_json(run / "train.json") for run in runs]
    changed = [
        k for k in settings[0] if k not in ("out", "provenance") and any(s.get(k) != settings[0][k] for s in settings)
    ]
    measured = _measured(reports)
    found: dict[str, Any] = {}
    for run, s in zip(runs, settings, strict=True):
        curve = _curve(run / "metrics.jsonl", s["row_tokens"] * s["rows_per_step"])
        lengths = measured.get(run.resolve(), {})
        if curve and not reports:
            lengths = {"validation": {"value": curve[-1][1]}}
        found[run.name] = {"settings": {k: s.get(k) for k in changed}, "curve": curve, METRIC: lengths}
    first = found[runs[0].name][METRIC]
    for entry in found.values():
        for name, length in entry[METRIC].items():
            if name in first:
                length["gain_percent"] = round(100 * (length["value"] / first[name]["value"] - 1), 2)
    return {"metric": f"{METRIC} of the widest rounds, bonus included", "runs": found}


def table(found: dict[str, Any]) -> str:
    """Markdown: a row for each run, a column for each dataset."""
    runs = found["runs"]
    names = sorted({name for entry in runs.values() for name in entry[METRIC]})
    lines = [f"| run | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for run, entry in runs.items():
        cells = [_cell(entry[METRIC].get(name)) for name in names]
        lines.append(f"| {run} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(length: dict[str, float] | None) -> str:
    if length is None:
        return "-"
    interval = f" [{length['low']:.2f}, {length['high']:.2f}]" if "low" in length else ""
    gain = length.get("gain_percent")
    return f"{length['value']:.2f}{interval}" + (f" {gain:+.1f} %" if gain else "")


def _measured(reports: Sequence[Path]) -> dict[Path, dict[str, dict[str, float]]]:
    """By run folder and dataset: value, low and high."""
    found: dict[Path, dict[str, dict[str, float]]] = {}
    for path in reports:
        report = _json(path)
        for name, run in report["runs"].items():
            rows = [r for r in report["rows"] if r["run"] == name and r["metric"] == METRIC]
            rows = [r for r in rows if r["group"] == "dataset" and r["drafts"] == run["block_size"] - 1]
            lengths = {r["name"]: {k: r[k] for k in ("value", "low", "high")} for r in rows}
            found.setdefault(Path(run["drafter"]).resolve(), {}).update(lengths)
    return found


def _curve(path: Path, tokens_per_step: int) -> list[tuple[int, float]]:
    """(tokens, acceptance length) of every evaluation."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(x["step"] * tokens_per_step, round(x["validation"]["rounds"], 4)) for x in lines if "validation" in x]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as e:
        raise ConfigError(
            f"{path} cannot be read: {e.strerror}. Expected the folder of a run, or a report.json."
        ) from e


def main(argv: Sequence[str] | None = None) -> None:
    """Write the comparison and print its table."""
    parser = argparse.ArgumentParser(prog="python -m dflash2.training.ablation", description=__doc__)
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="folders; the first is the baseline")
    parser.add_argument("--reports", type=Path, nargs="*", default=[], help="report.json files of dflash2 eval")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args(argv)
    found = compare(args.runs, args.reports)
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))


if __name__ == "__main__":
    raise SystemExit(run_command("dflash2.training.ablation", main))
