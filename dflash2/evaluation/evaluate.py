"""Replay drafters over a trace and turn what is counted into a table of estimates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from dflash2.drafter import DFlash2Drafter
from dflash2.evaluation.definition import MIN_PROMPTS, bucket_name
from dflash2.evaluation.replay import anchors_of, draft_odds
from dflash2.evaluation.rounds import Tally, round_lengths, tally
from dflash2.evaluation.statistics import Sample, resample
from dflash2.evaluation.trace import Trace, choose_layers

__all__ = ["Replayed", "Row", "replay_trace", "rows"]


@dataclass(frozen=True)
class Replayed:
    """One drafter over one trace.

    Attributes:
        tallies: by the most drafts per round.
        about: of each document its ``dataset``, ``domain``, ``id`` and ``temperature``.
        lengths: tokens of every round of every document at the widest; empty lists for sampled documents.
        seconds: wall clock, reading the shards included.
    """

    tallies: dict[int, Tally]
    about: list[dict[str, Any]]
    lengths: list[list[int]]
    seconds: float

    @property
    def widest(self) -> int:
        """The most drafts per round of all."""
        return max(self.tallies)


def replay_trace(trace: Trace, drafter: DFlash2Drafter, widths: Sequence[int] | None = None) -> Replayed:
    """Replay a drafter over all documents of a trace.

    Args:
        trace: what a target did.
        drafter: for that target, on its device. If it is not bound yet, the trace's tables are bound.
        widths: numbers of drafts per round; by default the widest only.

    Raises:
        ConfigError: the drafter does not fit the trace.
        CheckpointError: a file of the trace is damaged.
    """
    c = drafter.config
    trace.check_fit(c)
    widths = sorted(set(widths or [c.max_draft_tokens]))
    tables = trace.tables(drafter.device, drafter.dtype)
    if not drafter.is_bound:
        drafter.bind_target(tables.embedding, tables.head)
    tallies: dict[int, list[Tally]] = {k: [] for k in widths}
    about: list[dict[str, Any]] = []
    lengths: list[list[int]] = []
    began = time.perf_counter()
    for shard in trace.shards():
        anchors = anchors_of(shard, trace.max_new_tokens)
        taps = choose_layers(shard.taps, trace.columns(c), len(trace.layer_ids))
        odds = draft_odds(drafter, shard, taps, tables.head, anchors, widths)
        for k in widths:
            tallies[k].append(tally(odds[k], anchors))
        heat = shard.temperatures.tolist()
        found = round_lengths(odds[widths[-1]].stands, anchors)
        lengths += [r if t <= 0 else [] for r, t in zip(found, heat, strict=True)]
        about += [{**a, "temperature": round(t, 3)} for a, t in zip(shard.about, heat, strict=True)]
    if drafter.device.type == "cuda":
        torch.cuda.synchronize()
    joined = {k: Tally.join(parts) for k, parts in tallies.items()}
    return Replayed(joined, about, lengths, time.perf_counter() - began)


@dataclass(frozen=True)
class Row:
    """One estimate: a line of the CSV.

    Attributes:
        run: whose.
        group: what the prompts are told apart by: ``all``, ``dataset``, ``domain`` or ``context``.
        name: which of the group. Temperatures are never mixed: for ``all`` it is T=0 and the like.
        drafts: k, the most per round.
        metric: what is estimated.
        position: of the draft in its block, 1 to k; 0 for what concerns whole rounds.
        value, low, high: the estimate and its 95 % bootstrap interval over prompts.
        prompts: how many say something about it.
    """

    run: str
    group: str
    name: str
    drafts: int
    metric: str
    position: int
    value: float
    low: float
    high: float
    prompts: int


Group = tuple[str, str, np.ndarray]


def rows(runs: Mapping[str, Replayed], costs: Mapping[str, Mapping[int, float]] | None = None) -> list[Row]:
    """All estimates of all runs.

    Args:
        runs: over one trace.
        costs: for each run, seconds of a round by number of drafts; 0 is plain decoding. Without them there is no
            speed.
    """
    found: list[Row] = []
    baseline = next(iter(runs.values()))
    for group, name, members in _groups(baseline.about):
        weights = resample(len(members), f"{group} {name}")
        reference: Sample | None = None
        for run, replayed in runs.items():
            add = _Adder(found, run, group, name)
            for k, counted in replayed.tallies.items():
                for metric, sample in _of_rounds(counted, members, weights).items():
                    add(k, metric, sample)
                if costs is not None and group == "all":
                    add(k, "tokens_per_s", _yield(counted, members, weights).scaled(1 / costs[run][k]))
            if costs is not None and group == "all":
                add(0, "tokens_per_s", Sample.constant(1 / costs[run][0], len(members)))
            widest = replayed.tallies[replayed.widest]
            for metric, position, sample in _of_drafts(widest, members, weights):
                add(replayed.widest, metric, sample, position)
            own = _of_rounds(widest, members, weights)["acceptance_length"]
            if reference is not None:
                add(replayed.widest, "difference_to_first_run", own - reference)
            reference = reference or own
            if group == "all":
                suffix = "" if len(members) == len(baseline.about) else f" {name}"
                found += _by_context(run, replayed, members, weights, suffix)
    return found


class _Adder:
    def __init__(self, rows: list[Row], run: str, group: str, name: str):
        self.rows, self.run, self.group, self.name = rows, run, group, name

    def __call__(self, drafts: int, metric: str, sample: Sample, position: int = 0) -> None:
        estimate = sample.estimate()
        if estimate is not None:
            self.rows.append(Row(self.run, self.group, self.name, drafts, metric, position, **asdict(estimate)))


def _groups(about: Sequence[Mapping[str, Any]]) -> Iterator[Group]:
    """Everything at one temperature; then by data set and by domain. Names say which where there are several."""
    heat = np.array([a["temperature"] for a in about])
    for t in np.unique(heat):
        yield "all", f"T={t:g}", np.flatnonzero(heat == t)
        for group in ("dataset", "domain"):
            names = np.array([a[group] for a in about])
            for name in dict.fromkeys(names[(heat == t) & (names != "")].tolist()):
                label = name if len(np.unique(heat)) == 1 else f"{name} T={t:g}"
                yield group, label, np.flatnonzero((heat == t) & (names == name))


def _of_rounds(t: Tally, members: np.ndarray, weights: np.ndarray) -> dict[str, Sample]:
    with np.errstate(invalid="ignore", divide="ignore"):
        per_prompt = (t.tokens / t.rounds)[members]
        unary = (t.tokens / t.unary_rounds)[members]
    return {
        "acceptance_length": Sample.mean(per_prompt, weights),
        "acceptance_length_over_rounds": _yield(t, members, weights),
        "acceptance_length_unary": Sample.mean(unary, weights),
        "selector_gain": Sample.mean(per_prompt - unary, weights),
    }


def _yield(t: Tally, members: np.ndarray, weights: np.ndarray) -> Sample:
    """Tokens of all rounds by their number."""
    return Sample.ratio(t.tokens[members], t.rounds[members], weights)


def _of_drafts(t: Tally, members: np.ndarray, weights: np.ndarray) -> Iterator[tuple[str, int, Sample]]:
    with np.errstate(invalid="ignore", divide="ignore"):
        yield "acceptance_length_every_position", 0, Sample.mean((t.yielded / t.anchors)[members], weights)
    rates = {
        "conditional_acceptance": (t.kept, t.reached),
        "recall": (t.found, t.reached),
        "selector_accuracy": (t.kept, t.found),
    }
    for metric, (above, below) in rates.items():
        for i in range(t.reached.shape[1]):
            yield metric, i + 1, Sample.ratio(above[members, i], below[members, i], weights)


def _by_context(run: str, replayed: Replayed, members: np.ndarray, weights: np.ndarray, suffix: str) -> Iterator[Row]:
    t, k = replayed.tallies[replayed.widest], replayed.widest
    for level in range(t.bucket_rounds.shape[1]):
        below = t.bucket_rounds[members, level]
        estimate = Sample.ratio(t.bucket_tokens[members, level], below, weights).estimate()
        if estimate is not None and estimate.prompts >= MIN_PROMPTS:
            name, metric = bucket_name(level) + suffix, "acceptance_length_over_rounds"
            yield Row(run, "context", name, k, metric, 0, **asdict(estimate))
