"""`dflash2 bench`: ceilings, then every case against them and beside its peers, into one result file."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from dflash2.bench.cases import Case, Runner, Workshop, select
from dflash2.bench.ceilings import Ceilings, measure_ceilings
from dflash2.bench.checks import check_operations
from dflash2.bench.timing import Timer
from dflash2.errors import ConfigError
from dflash2.ops.launch import settings_file
from dflash2.provenance import provenance

__all__ = ["default_path", "measure", "run_bench", "the_gpu"]

#: A median needs 50 samples to be stable to a percent; peers that take long get fewer.
SAMPLES, QUICK_SAMPLES, PEER_SAMPLES = 60, 12, 20

Result = TypeVar("Result")
Say = Callable[[str], None]


def the_gpu() -> torch.device:
    """The CUDA device that is current.

    Raises:
        ConfigError: there is none.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "no CUDA GPU is visible here, and kernels are measured on one. Run this on a GPU machine; what decoding "
            "gains on a CPU shows `dflash2 demo --repeats 5`."
        )
    return torch.device("cuda", torch.cuda.current_device())


def default_path(device: torch.device) -> Path:
    """In the current folder, named after the GPU."""
    return Path(settings_file(torch.cuda.get_device_name(device)))


def run_bench(
    patterns: Sequence[str] = (),
    out: Path | None = None,
    *,
    quick: bool = False,
    skip_tests: bool = False,
    say: Say = print,
) -> bool:
    """Measure and write. The file is rewritten after every case, so that an interruption loses one case.

    Args:
        patterns: of case names; none is all.
        out: the result file; default `default_path`.
        quick: few samples and no peers, for development.
        skip_tests: leave out the operations' tests; the file says so.
        say: takes each line.

    Returns:
        Whether the tests were green and every case could be measured.

    Raises:
        ConfigError: no GPU, or ``out`` cannot be written.
    """
    device, cases = the_gpu(), select(patterns)
    out = default_path(device) if out is None else out
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no such folder to write to. Make it first.")
    say(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    green, tested = (True, "skipped (--skip-tests)") if skip_tests else check_operations(device)
    say(f"operations: {tested}")
    if not green:
        say("a kernel is wrong on this device, so nothing is measured.")
        return False
    timer = Timer(device, samples=QUICK_SAMPLES if quick else SAMPLES)
    return measure(cases, timer, out, {"tests": tested, "quick": quick}, say=say, peers=not quick)


def measure(
    cases: Sequence[Case],
    timer: Timer,
    out: Path,
    facts: dict[str, Any],
    *,
    say: Say = print,
    peers: bool = True,
    workshop: Workshop | None = None,
    ceilings: Ceilings | None = None,
) -> bool:
    """The measuring itself, on the timer's device: see `run_bench`.

    Args:
        facts: what else the provenance should say.
        peers: measure what the cases are compared with, too.
        workshop, ceilings: made or measured here unless given.
    """
    shop = Workshop(timer) if workshop is None else workshop
    roof = measure_ceilings(timer) if ceilings is None else ceilings
    gc.collect()
    read, copy = roof.read_bytes_per_s / 1e12, roof.copy_bytes_per_s / 1e12
    say(f"read {read:.3f} TB/s, copy (bytes read + written) {copy:.3f} TB/s\n")
    failed: dict[str, str] = {}
    origin = {**provenance(timer.device), **_machine(timer.device), **facts, "read_ways": roof.ways, "failed": failed}
    report: dict[str, Any] = {
        "ceilings": {"read_bytes_per_s": roof.read_bytes_per_s, "copy_bytes_per_s": roof.copy_bytes_per_s},
        "provenance": origin,
        "cases": [],
    }
    say(HEADER)
    for case in cases:
        row, error = _attempt(partial(_measure, case, shop, roof, peers))
        if row is None:
            failed[case.name] = error
            say(f"{case.name:<30} FAILED: {error}")
        else:
            report["cases"].append(row)
            say(_line(row))
        out.write_text(json.dumps(report, indent=1) + "\n")
        gc.collect()
    say(f"\nresults: {out}")
    return not failed


def _measure(case: Case, shop: Workshop, roof: Ceilings, with_peers: bool) -> dict[str, Any]:
    timer = shop.timer
    work = case.prepare(shop)
    work.check()
    took = timer.measure(work.run, work.units)
    work.check()
    floor_us = work.num_bytes / roof.read_bytes_per_s * 1e6
    notes = dict(work.extras.pop("notes", {}))
    peers: dict[str, float | None] = {}
    for name, make in work.peers.items() if with_peers else ():
        median, error = _attempt(partial(_peer, timer, make))
        peers[name] = median
        if error:
            notes[name] = error
        gc.collect()
    row = {
        "case": case.name,
        **{name: round(value, 3) for name, value in asdict(took).items()},
        "bytes": work.num_bytes,
        "floor_us": round(floor_us, 3),
        "over_floor": round(took.median_us / floor_us, 4),
        "share_of_read": round(floor_us / took.median_us, 4),
        "peers": peers,
    }
    return {**row, **work.extras, **({"notes": notes} if notes else {})}


def _peer(timer: Timer, make: Callable[[], Runner]) -> float:
    run, units = make()
    return round(timer.measure(run, units, min(timer.samples, PEER_SAMPLES)).median_us, 3)


def _attempt(run: Callable[[], Result]) -> tuple[Result | None, str]:
    """The result, or what went wrong: a case that fails must not take the others' results with it."""
    try:
        return run(), ""
    except Exception as e:  # noqa: BLE001 - compilers, drivers and other people's modules fail in many ways
        lines = str(e).strip().splitlines() or [""]
        return None, f"{type(e).__name__}: {lines[0][:300]}"


COLUMNS = ("median us", "20 %", "80 %", "MB", "floor us", "x floor", "of read")
HEADER = f"{'case':<30}" + "".join(f"{name:>10}" for name in COLUMNS) + "  peers us"


def _line(row: dict[str, Any]) -> str:
    peers = ", ".join(f"{n} {'-' if us is None else f'{us:.0f}'}" for n, us in row["peers"].items())
    times = [f"{row[name]:>10.1f}" for name in ("median_us", "p20_us", "p80_us")]
    held = f"{row['bytes'] / 1e6:>10.1f}{row['floor_us']:>10.1f}{row['over_floor']:>10.3f}{row['share_of_read']:>10.1%}"
    return f"{row['case']:<30}{''.join(times)}{held}  {peers}"


def _machine(device: torch.device) -> dict[str, Any]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else None
    return {"triton": triton, "cuda": torch.version.cuda, "l2_bytes": l2}
