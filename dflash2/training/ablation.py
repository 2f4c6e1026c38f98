"""Runs side by side: what each was trained with, and what it accepts, as a table and as JSON.

``python -m dflash2.training.ablation --runs v1 conv selector both --reports report/report.json --out ablation.json``

``--plot picture.png`` draws it, with ``--curve training.json`` beside the learning curve of another run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash2.command import run_command
from dflash2.errors import ConfigError

__all__ = ["compare", "main", "plot", "table"]

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
    provenance = [_json(path)["provenance"] for path in reports]
    return {"metric": f"{METRIC} of the widest rounds, bonus included", "provenance": provenance, "runs": found}


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
            rows = [r for r in rows if r["group"] in ("dataset", "all") and r["drafts"] == run["block_size"] - 1]
            lengths = {_dataset(r): {k: round(r[k], 4) for k in ("value", "low", "high")} for r in rows}
            found.setdefault(Path(run["drafter"]).resolve(), {}).update(lengths)
    return found


def _dataset(row: dict[str, Any]) -> str:
    return "all" if row["group"] == "all" else row["name"]


def plot(found: dict[str, Any], path: Path, curve: Sequence[dict[str, Any]] = ()) -> None:
    """Draw what each run accepts, with its interval.

    Args:
        found: of `compare`.
        path: picture to write.
        curve: a learning curve to draw beside it: ``tokens`` trained on, acceptance in ``rounds``, and ``unary``, the
            same without the selector.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'dflash2[notebooks]'") from None
    figure = Figure((10, 3.6), layout="constrained")
    bars, *rest = figure.subplots(1, 2 if curve else 1, squeeze=False)[0]
    for i, entry in enumerate(found["runs"].values()):
        lengths = entry[METRIC]
        length = lengths.get("all") or next(iter(lengths.values()))
        bars.barh(i, length["value"] - 1, left=1, color="tab:gray" if i == 0 else "tab:blue")
        if "low" in length:
            bars.hlines(i, length["low"], length["high"], color="black")
        gain = f"  {length['gain_percent']:+.0f} %" if length.get("gain_percent") else ""
        bars.text(length.get("high", length["value"]) + 0.03, i, f"{length['value']:.2f}{gain}", va="center")
    bars.set_yticks(range(len(found["runs"])), list(found["runs"]))
    bars.invert_yaxis()
    bars.set_xlim(1, 1.15 * bars.get_xlim()[1])
    bars.set_title("runs of equal data and steps", loc="left", fontsize="medium")
    bars.set_xlabel("tokens per target pass (1: no draft stands)")
    for axes in rest:
        for key, label in (("rounds", "in rounds"), ("unary", "without the selector")):
            axes.plot([x["tokens"] / 1e6 for x in curve], [x[key] for x in curve], "o-", label=label)
        axes.set_title("learning curve", loc="left", fontsize="medium")
        axes.set_xlabel("million tokens trained on")
        axes.grid(alpha=0.3)
        axes.legend()
    for axes in (bars, *rest):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


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
    parser.add_argument("--plot", type=Path, help="draw this picture (needs matplotlib)")
    parser.add_argument("--curve", type=Path, help="JSON file with a learning curve to draw beside it")
    args = parser.parse_args(argv)
    found = compare(args.runs, args.reports)
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    if args.plot:
        plot(found, args.plot, _json(args.curve)["curve"] if args.curve else ())
    print(table(found))


if __name__ == "__main__":
    raise SystemExit(run_command("dflash2.training.ablation", main))
