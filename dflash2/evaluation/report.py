"""What `dflash2 eval` writes: ``report.json``, ``report.csv`` and ``report.html``."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dflash2.drafter import DFlash2Drafter
from dflash2.evaluation.definition import DEFINITION
from dflash2.evaluation.evaluate import Replayed, Row, rows
from dflash2.evaluation.live_check import LiveCheck
from dflash2.evaluation.page import page
from dflash2.evaluation.statistics import DRAWS
from dflash2.evaluation.trace import Trace
from dflash2.int8_linear import has_int8_linears
from dflash2.lm_head import Int8LMHead
from dflash2.provenance import provenance

__all__ = ["about_drafter", "make_report", "write_report"]


def about_drafter(path: str, drafter: DFlash2Drafter, replayed: Replayed) -> dict[str, Any]:
    """What a report says of a run."""
    c, dtype = drafter.config, str(drafter.dtype).removeprefix("torch.")
    return {
        "drafter": path,
        "architecture": c.architecture,
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "block_size": c.block_size,
        "selector_top_k": c.selector_top_k if c.has_selector else 0,
        "conv_kernel_size": c.conv_kernel_size if c.has_conv else 0,
        "layers": c.num_hidden_layers,
        "dtype": dtype,
        "linears": "int8" if has_int8_linears(drafter) else dtype,
        "head": "int8" if isinstance(drafter._head[0], Int8LMHead) else dtype,
        "replay_s": round(replayed.seconds, 3),
    }


def make_report(
    trace: Trace,
    runs: Mapping[str, Replayed],
    about: Mapping[str, dict[str, Any]],
    device: Any,
    costs: Mapping[str, Mapping[int, float]] | None = None,
    costs_from: str = "",
    checks: Mapping[str, LiveCheck] | None = None,
) -> tuple[dict[str, Any], list[Row]]:
    """The report as JSON values, and its estimates.

    Args:
        trace: what was replayed.
        runs, about: by name, from `replay_trace` and `about_drafter`.
        device: where.
        costs: see `rows`.
        costs_from: where the costs are from.
        checks: by run.
    """
    table = rows(runs, costs)
    baseline = next(iter(runs))
    lengths: dict[str, dict[str, float]] = {run: {} for run in runs}
    for r in table:
        if r.metric == "acceptance_length" and r.group == "dataset" and r.drafts == runs[r.run].widest:
            lengths[r.run][r.name] = round(r.value, 4)
    report = {
        "title": f"Drafters for {Path(str(trace.about['target']['name'])).name}",
        "definition": DEFINITION,
        "acceptance_length": lengths,
        "baseline": baseline,
        "runs": dict(about),
        "trace": {**trace.about, "agreement": min(f["agreement"] for f in trace.found()), "made_by": trace.origin},
        "settings": {
            "documents": len(runs[baseline].about),
            "intervals": f"95 %, {DRAWS} bootstrap resamples of prompts, the same for every run",
            "at_a_temperature": "expected rounds over the recorded answers, which were sampled at that temperature",
        },
        "provenance": provenance(device),
    }
    if costs is not None:
        ms = {run: {str(k): round(1e3 * s, 4) for k, s in c.items()} for run, c in costs.items()}
        report["costs"] = {"source": costs_from, "round_ms": ms}
    if checks:
        report["live_check"] = {run: asdict(c) for run, c in checks.items()}
    return report, table


def write_report(folder: Path, report: Mapping[str, Any], table: Sequence[Row]) -> None:
    """Write the three files; the JSON has the table too."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {**report, "rows": [asdict(r) for r in table]}
    (folder / "report.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    with (folder / "report.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([f.name for f in fields(Row)])
        writer.writerows([list(asdict(r).values()) for r in table])
    (folder / "report.html").write_text(page(report, table), encoding="utf-8")
