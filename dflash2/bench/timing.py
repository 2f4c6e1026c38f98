"""How long the device takes: CUDA events around replayed graphs, and statistics over many samples."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

__all__ = ["Timing", "Timer"]

Call = Callable[[], Any]

WARM_UP_CALLS = 3
MAX_REPEATS = 1000


@dataclass(frozen=True)
class Timing:
    """Of one call, in microseconds: the median over the samples, and what 20 % and 80 % of them stay below."""

    median_us: float
    p20_us: float
    p80_us: float

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Timing:
        """From two samples or more."""
        tenths = statistics.quantiles(samples_us, n=10, method="inclusive")
        return cls(statistics.median(samples_us), tenths[1], tenths[7])


class Timer:
    """Times work on one device.

    Args:
        device: a CUDA device, or the CPU (what tests of the benchmark run on: no graphs, the host's clock).
        samples: how many a median is taken over.
        sample_us: the least a sample lasts; short work is repeated, and the time divided.
        warm_up_us: how long to run before the first sample, so that clocks have settled.
    """

    def __init__(
        self, device: torch.device, samples: int = 60, sample_us: float = 2000.0, warm_up_us: float = 30_000.0
    ):
        self.device, self.samples, self.sample_us, self.warm_up_us = device, samples, sample_us, warm_up_us

    def captured(self, calls: Sequence[Call]) -> Call:
        """All calls, one after the other, as one CUDA graph; returns its replay.

        Several calls over different inputs keep an operation from finding in the cache what it left there.
        """
        if self.device.type != "cuda":
            return lambda: [call() for call in calls]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):  # compiles, allocates workspaces, fills caches of launch settings
                for call in calls:
                    call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [call() for call in calls]
        return partial(_replay, graph, kept)

    def measure(self, run: Call, units: int = 1, samples: int | None = None) -> Timing:
        """Time ``run``, which does ``units`` equal pieces of work, and give the time of one piece.

        Samples are queued without waiting between them, so that work which the host can prepare faster than the device
        does it is timed without gaps; what the host cannot keep up with is timed as slow as it is.
        """
        run()
        once = max(self._laps(run, 1, 1)[0], 1.0)
        self._laps(run, 1, max(1, min(MAX_REPEATS, int(self.warm_up_us / once))))
        repeats = max(1, min(MAX_REPEATS, math.ceil(self.sample_us / once)))
        laps = self._laps(run, samples or self.samples, repeats)
        return Timing.of([lap / repeats / units for lap in laps])

    def host_us(self, run: Call, samples: int = 20) -> float:
        """Median time until ``run`` returns to the host, with an idle device before it."""
        laps = []
        for _ in range(samples):
            self.wait()
            began = time.perf_counter()
            run()
            laps.append((time.perf_counter() - began) * 1e6)
        self.wait()
        return statistics.median(laps)

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _laps(self, run: Call, samples: int, repeats: int) -> list[float]:
        """Microseconds of each sample of ``repeats`` runs."""
        if self.device.type != "cuda":
            return [self._host_lap(run, repeats) for _ in range(samples)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
        self.wait()
        marks[0].record()
        for mark in marks[1:]:
            for _ in range(repeats):
                run()
            mark.record()
        self.wait()
        return [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]

    @staticmethod
    def _host_lap(run: Call, repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - began) * 1e6


def _replay(graph: torch.cuda.CUDAGraph, kept: list[Any]) -> None:
    """``kept`` is what the graph writes, which must stay allocated."""
    graph.replay()
