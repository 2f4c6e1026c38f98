"""`dflash2 tune`: time every candidate setting of each kernel on this GPU and keep the best, shape by shape."""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash2.bench.checks import agree
from dflash2.bench.operations import Inputs, Operation, operations, prefill_operations
from dflash2.bench.run import the_gpu
from dflash2.bench.shapes import SHAPES
from dflash2.bench.timing import Timer
from dflash2.config import DFlash2Config
from dflash2.errors import ConfigError
from dflash2.ops.launch import override, settings_file, settings_folders
from dflash2.provenance import provenance

__all__ = ["TUNED", "candidates", "tune", "tune_on", "tuning_operations"]

#: By op: the kernel module that lists its candidates, and under which name. The settings of `context_rows` are those
#: of `row_linear`, whose product it is.
TUNED = {
    "int8_head": ("int8_head", "CANDIDATES"),
    "dense_topk": ("dense_topk", "CANDIDATES"),
    "block_linear": ("block_linear", "CANDIDATES"),
    "gated_linear": ("block_linear", "GATED_CANDIDATES"),
    "row_linear": ("row_linear", "CANDIDATES"),
    "window_attention": ("window_attention", "CANDIDATES"),
    "selector_walk": ("selector_walk", "CANDIDATES"),
    "verify": ("verify", "CANDIDATES"),
}
#: Sequences of the rounds whose shapes are measured: by drafter, all and in a hurry.
SEQUENCES = {"27b": (1, 4, 8, 32), "30b": (1,), "flash": (1,)}
QUICK = {"27b": (1, 8)}
#: Rows of a prompt's chunk: without them a long append would be launched like the nearest round.
PREFILLS = (512, 2080)
#: A candidate may round otherwise than the defaults do; more than this is a wrong result.
TOLERANCE = 0.02
#: Less than this much faster than the defaults is noise.
MARGIN = 0.01
CHUNK = 4
MOST_WORKERS = 16

Settings = Mapping[str, int]
Say = Callable[[str], None]


@dataclass
class _Best:
    """The fastest candidate so far."""

    settings: Settings
    median_us: float
    default_us: float


def candidates(op: str) -> list[dict[str, int]]:
    """The defaults, as ``{}``, and what the kernel module lists."""
    module, name = TUNED[op]
    return [{}, *getattr(importlib.import_module(f"dflash2.kernels.{module}"), name)]


def tuning_operations(ops: Sequence[str] = (), *, quick: bool = False) -> list[Operation]:
    """What is timed: the tunable operations (all, or those named) on the rounds' shapes.

    Raises:
        ConfigError: there is no such op.
    """
    if unknown := set(ops) - set(TUNED):
        raise ConfigError(f"--ops {', '.join(sorted(unknown))}: no such operation. There are: {', '.join(TUNED)}.")
    return [o for o in _all(QUICK if quick else SEQUENCES) if o.op in (ops or TUNED)]


def _all(rounds: Mapping[str, Sequence[int]], shapes: Mapping[str, DFlash2Config] = SHAPES) -> Iterator[Operation]:
    for name, batches in rounds.items():
        for sequences in batches:
            yield from operations(shapes[name], sequences, f"{name}.c{sequences}")
    for rows in PREFILLS:
        yield from prefill_operations(shapes["27b"], rows, f"27b.rows{rows}")


def tune(ops: Sequence[str] = (), out: Path | None = None, *, quick: bool = False, say: Say = print) -> Path:
    """Measure and write the settings file of this GPU; operations that were not measured keep what it says of them.

    Args:
        ops: names; none is all.
        out: the file; default the one of this user, where kernels look first.
        quick: fewer shapes and samples.
        say: takes each line.

    Returns:
        The file.

    Raises:
        ConfigError: no GPU, or an unknown op.
    """
    device, wanted = the_gpu(), tuning_operations(ops, quick=quick)
    name = torch.cuda.get_device_name(device)
    out = settings_folders()[0] / settings_file(name) if out is None else out
    began = time.perf_counter()
    say(f"{name}: compiling {sum(len(candidates(o.op)) for o in wanted)} candidates of {len(wanted)} shapes")
    unusable = _compile(wanted, quick, ops)
    say(f"compiled in {time.perf_counter() - began:.0f} s, {sum(map(len, unusable.values()))} cannot run here\n")
    timer = Timer(device, samples=9 if quick else 15, sample_us=300.0, warm_up_us=500.0)
    measured = tune_on(wanted, timer, unusable, say=say)
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(out.read_text())["ops"] if out.is_file() else {}
    report = {
        **provenance(device),
        "triton": importlib.import_module("triton").__version__,
        "ops": {**kept, **measured},
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    say(f"\n{out}: {time.perf_counter() - began:.0f} s in all")
    return out


def tune_on(
    wanted: Sequence[Operation], timer: Timer, unusable: Mapping[str, Mapping[int, str]], *, say: Say = print,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """The measuring itself: by op, the entries that `launch_settings` reads.

    Args:
        unusable: by operation's name, which candidates need not be tried.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for operation in wanted:
        name = f"{operation.name:<36}"
        try:
            shape, best = _fastest(operation, timer, unusable.get(operation.name, {}), Inputs(timer.device, dtype))
        except _cannot_run() as e:
            say(f"{name} its defaults cannot run here: {type(e).__name__}: {e}")
            continue
        gc.collect()
        if best is None:
            say(f"{name} nothing to set at this size")
            continue
        gain = best.default_us / best.median_us - 1
        say(f"{name}{best.median_us:>10.1f} us, {gain:.1%} faster than the defaults: {dict(best.settings)}")
        entry = {"shape": shape, "settings": dict(best.settings), "median_us": round(best.median_us, 3)}
        found.setdefault(operation.op, []).append(entry)
    return found


def _fastest(
    operation: Operation, timer: Timer, unusable: Mapping[int, str], inputs: Inputs
) -> tuple[dict[str, int], _Best | None]:
    """The shape that the op asks for, and its best candidate; None where it asks for no settings."""
    calls = operation.calls(inputs)
    with override(operation.op, {}) as asked:
        expected = calls[0]()
    if not asked:
        return {}, None
    default_us = _time(operation, {}, timer, calls)
    best = _Best({}, default_us, default_us)
    for i, settings in enumerate(candidates(operation.op)):
        if i == 0 or i in unusable:
            continue
        try:
            with override(operation.op, settings):
                right = agree(calls[0](), expected, TOLERANCE)
            took = _time(operation, settings, timer, calls) if right else float("inf")
        except _cannot_run():
            continue
        if took < min(best.median_us, (1 - MARGIN) * default_us):
            best = _Best(settings, took, default_us)
    return asked[0], best


def _time(operation: Operation, settings: Settings, timer: Timer, calls: list[Callable[[], Any]]) -> float:
    with override(operation.op, settings):
        run = timer.captured(calls)
        return timer.measure(run, len(calls)).median_us


def _cannot_run() -> tuple[type[Exception], ...]:
    """What a candidate raises that asks for too much, or that the compiler refuses."""
    from triton.errors import TritonError

    return (TritonError, RuntimeError, ValueError)


def _compile(wanted: Sequence[Operation], quick: bool, ops: Sequence[str]) -> dict[str, dict[int, str]]:
    """Run every candidate once, in many processes: Triton's cache on disk then has them. Returns which cannot run.

    A process that dies with a candidate takes the pool with it; what is left is compiled when it is measured.
    """
    chunks = [
        (o.name, list(range(first, min(first + CHUNK, len(candidates(o.op))))))
        for o in wanted
        for first in range(0, len(candidates(o.op)), CHUNK)
    ]
    unusable: dict[str, dict[int, str]] = {}
    workers = min(MOST_WORKERS, os.cpu_count() or 1, len(chunks))
    if workers < 2:
        return unusable
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [(name, pool.submit(_try_candidates, name, chunk, quick, list(ops))) for name, chunk in chunks]
        for name, job in jobs:
            try:
                unusable.setdefault(name, {}).update(job.result())
            except BrokenProcessPool:
                break
    return unusable


def _try_candidates(name: str, chunk: list[int], quick: bool, ops: list[str]) -> dict[int, str]:
    """In a process of its own: launch some candidates of one operation, and say which fail and why."""
    device = the_gpu()
    (operation,) = [o for o in tuning_operations(ops, quick=quick) if o.name == name]
    call = operation.make(Inputs(device))
    failed = {}
    for i in chunk:
        try:
            with override(operation.op, candidates(operation.op)[i]):
                call("auto")
            torch.cuda.synchronize(device)
        except _cannot_run() as e:
            failed[i] = f"{type(e).__name__}: {e}"[:200]
    return failed
