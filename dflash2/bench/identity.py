"""Whether ``model.generate`` gives the same tokens with drafts as without: ``python -m dflash2.bench.identity --help``.

Greedy decoding of prompts by Transformers' own `generate`, with and without `dflash2.adapters.transformers.generate`,
for several batch sizes and settings that shape the target's distribution or end its answers. Where two outputs part,
the report keeps where, and how close the call was.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dflash2.checkpoint_files import DEFAULT_DRAFTER
from dflash2.command import FAILED, add_place, run_command
from dflash2.comparison import first_difference
from dflash2.drafter import DFlash2Drafter
from dflash2.errors import ConfigError
from dflash2.prompts import BUILTIN, all_prompt_ids, load_prompts
from dflash2.provenance import provenance
from dflash2.targets import EMBEDDED_TARGET

__all__ = ["NEAR_TIE", "Checker", "main", "summarise"]

#: A gap of logits that the order of an fp32 sum decides.
NEAR_TIE = 1e-4
#: What is given to `generate` besides greedy decoding. ``stop`` is an id that ends most answers early.
SETTINGS: dict[str, Callable[[list[int], int], dict[str, Any]]] = {
    "greedy": lambda ends, stop: {},
    "penalty": lambda ends, stop: {"repetition_penalty": 1.1},
    "greedy, early end": lambda ends, stop: {"eos_token_id": [*ends, stop]},
    "penalty, early end": lambda ends, stop: {"repetition_penalty": 1.1, "eos_token_id": [*ends, stop]},
}

Round = tuple[list[int], list[int], Tensor]


@contextmanager
def recorded(drafter: DFlash2Drafter) -> Iterator[list[Round]]:
    """The rounds drafted meanwhile: handles of the sequences, their start positions, drafts ``[R, k]``."""
    rounds: list[Round] = []
    propose = drafter.propose

    def keep(kv: Any, seqs: Any, anchors: Any, starts: Any, *rest: Any) -> Any:
        proposal = propose(kv, seqs, anchors, starts, *rest)
        rounds.append((list(seqs), list(starts), proposal.tokens))
        return proposal

    with mock.patch.object(drafter, "propose", keep):
        yield rounds


class Checker:
    """Compares answers of one pair.

    Args:
        target, tokenizer, drafter: from `load_pair`.
        max_new_tokens: of each answer at most.
        settings: names of `SETTINGS`.
        batch_sizes: each prompt is decoded in a batch of each size.
    """

    def __init__(
        self, target: Any, tokenizer: Any, drafter: DFlash2Drafter, max_new_tokens: int,
        settings: Sequence[str] = tuple(SETTINGS), batch_sizes: Sequence[int] = (1, 8),
    ):  # fmt: skip
        self.target, self.tokenizer, self.drafter = target, tokenizer, drafter
        ends = target.generation_config.eos_token_id
        self.ends = [ends] if isinstance(ends, int) else list(ends or [])
        stop = tokenizer(["."])["input_ids"][0][-1]
        neutral = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": max_new_tokens}
        self.settings = {name: neutral | SETTINGS[name](self.ends, stop) for name in settings}
        self.batch_sizes = batch_sizes

    def check(self, prompts: Sequence[tuple[str, list[int]]]) -> list[dict[str, Any]]:
        """Decode (name, token ids) prompts in every batch size and setting; one record for each answer."""
        return [
            {"setting": name, "batch_size": size, **found}
            for name, how in self.settings.items()
            for size in self.batch_sizes
            for first in range(0, len(prompts), size)
            for found in self._batch(prompts[first : first + size], how)
        ]

    def _batch(self, prompts: Sequence[tuple[str, list[int]]], how: dict[str, Any]) -> list[dict[str, Any]]:
        from dflash2.adapters import transformers as adapter

        width = max(len(ids) for _, ids in prompts)
        rows = [[0] * (width - len(ids)) + ids for _, ids in prompts]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for _, ids in prompts]
        place = self.drafter.device
        given = {"input_ids": torch.tensor(rows, device=place), "attention_mask": torch.tensor(mask, device=place)}
        plain = self.target.generate(**given, **how)[:, width:].tolist()
        with recorded(self.drafter) as rounds:
            drafted = self.target.generate(**given, **how, custom_generate=adapter.generate, drafter=self.drafter)
        new = drafted[:, width:].tolist()
        return [
            {"prompt": name, **self._compare(row, ids, plain[row], new[row], rounds, how)}
            for row, (name, ids) in enumerate(prompts)
        ]

    def _compare(
        self, row: int, ids: list[int], plain: list[int], drafted: list[int], rounds: list[Round], how: dict[str, Any]
    ) -> dict[str, Any]:
        ends = how.get("eos_token_id", self.ends)
        plain, answer = cut(plain, ends), cut(drafted, ends)
        prompt = torch.tensor([ids], device=self.drafter.device)
        difference = first_difference(self.target, prompt, plain, answer)
        if difference is not None and difference.logit_gap is not None:
            seen = torch.cat((prompt, prompt.new_tensor([plain[: difference.index]])), 1)
            difference = replace(difference, logit_gap=self._gap(seen, difference.tokens, how))
        own = [(starts[seqs.index(row)], drafts[seqs.index(row)]) for seqs, starts, drafts in rounds if row in seqs]
        ended = answer[-1] in ends
        return {
            "tokens": len(answer),
            "rounds": len(own),
            "ended": ended,
            "ended_by_a_draft": ended and bool(own) and stood(*own[-1], len(ids), answer),
            "difference": None if difference is None else vars(difference),
        }

    def _gap(self, seen: Tensor, tokens: tuple[int | None, int | None], how: dict[str, Any]) -> float:
        """Between two ids after ``seen [1, S]``, as the setting shapes the logits."""
        one = how | {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
        scores = self.target.generate(seen, attention_mask=torch.ones_like(seen), **one).scores[0][0]
        return float(scores[tokens[0]] - scores[tokens[1]])


def cut(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Without what is behind the first end: padding of the batch."""
    return next((tokens[: i + 1] for i, t in enumerate(tokens) if t in ends), tokens)


def stood(start: int, drafts: Tensor, prompt: int, answer: list[int]) -> bool:
    """Whether an answer's last token was a draft of the round whose anchor is at ``start``, not the target's own."""
    n = prompt + len(answer) - 1 - start
    return 0 < n <= len(drafts) and drafts[:n].tolist() == answer[-n:]


def summarise(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each setting and batch size: answers, how many are the same, near-ties, ends, and what drafting did."""
    groups = sorted(
        {(r["setting"], r["batch_size"]) for r in records}, key=lambda g: (list(SETTINGS).index(g[0]), g[1])
    )
    return [
        {"setting": s, "batch_size": b, **_sum([r for r in records if (r["setting"], r["batch_size"]) == (s, b)])}
        for s, b in groups
    ]


def _sum(records: list[dict[str, Any]]) -> dict[str, Any]:
    n: Counter[str] = Counter()
    for r in records:
        n.update({k: int(r[k]) for k in ("tokens", "rounds", "ended", "ended_by_a_draft")})
        n["same"] += r["difference"] is None
        n["near_ties"] += near_tie(r["difference"])
    fields = ("same", "near_ties", "tokens", "rounds", "ended", "ended_by_a_draft")
    return {"answers": len(records), **{k: n[k] for k in fields}}


def near_tie(difference: dict[str, Any] | None) -> bool:
    """Whether outputs part where rounding decides."""
    return difference is not None and difference["logit_gap"] is not None and abs(difference["logit_gap"]) < NEAR_TIE


def choose(sources: Sequence[str], limit: int) -> list[tuple[str, dict[str, Any]]]:
    """(name, prompt) of every source in turn, so that the first ``limit`` (0: all) are spread evenly."""
    read = [[(f"{Path(s).stem}:{p.get('id', i)}", p) for i, p in enumerate(load_prompts(s))] for s in sources]
    mixed = [p for group in zip_longest(*read) for p in group if p is not None]
    return mixed[:limit] if limit else mixed


#: Of this worker process, with where it runs: the versions are those that were loaded, whatever changes on disk.
_worker: list[tuple[Checker, dict[str, str | None]]] = []


def _start(args: argparse.Namespace) -> None:
    from dflash2.loading import load_pair

    if args.processes > 1:
        torch.set_num_threads(1)
    pair = load_pair(args.target, args.drafter, args.device, args.dtype)
    checker = Checker(*pair, args.max_new_tokens, args.settings, args.batch_sizes)
    _worker[:] = [(checker, provenance(checker.drafter.device))]


def _work(prompts: Sequence[tuple[str, dict[str, Any]]]) -> tuple[list[dict[str, Any]], dict[str, str | None]]:
    checker, where = _worker[0]
    ids = all_prompt_ids(checker.tokenizer, [p for _, p in prompts])
    found = checker.check([(name, row) for (name, _), row in zip(prompts, ids, strict=True)])
    return found, where


def _results(args: argparse.Namespace, parts: Sequence[Any]) -> Iterator[Any]:
    if args.processes == 1:
        _start(args)
        yield from map(_work, parts)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, spawn, _start, (args,)) as pool:
        yield from pool.map(_work, parts)


def _run(args: argparse.Namespace) -> int:
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {args.out}: there is no such folder to write to. Make it first.")
    prompts = choose(args.prompts, args.limit)
    size = max(args.batch_sizes)
    parts = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "prompts")}
    report: dict[str, Any] = {"settings": settings, "differences": []}
    records: list[dict[str, Any]] = []
    for done, (found, where) in enumerate(_results(args, parts), 1):
        records += found
        report["differences"] += [r for r in found if r["difference"]]
        names = {r["prompt"] for r in records}
        report |= {"prompts": len(names), "sources": Counter(sorted(n.partition(":")[0] for n in names))}
        report |= {"summary": summarise(records), "provenance": where}
        print(f"{done} of {len(parts)} parts, {len(records)} answers, {len(report['differences'])} differ", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for line in report["summary"]:
        print(json.dumps(line))
    return 0 if all(near_tie(r["difference"]) for r in report["differences"]) else FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 1 if outputs differ by more than a near-tie."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash2.bench.identity",
        description="Greedy model.generate with drafts beside the same without, token for token.",
    )
    parser.add_argument("--target", default=EMBEDDED_TARGET, help="the model that decides (default: %(default)s)")
    parser.add_argument("--drafter", default=DEFAULT_DRAFTER, help="the model that drafts (default: %(default)s)")
    add_place(parser, "float32")
    parser.add_argument("--prompts", nargs="+", default=[BUILTIN], help="names or files, taken in turn (%(default)s)")
    parser.add_argument("--limit", type=int, default=0, help="so many prompts of all together; 0: all")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per answer (default: %(default)s)")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8], help="(default: 1 8)")
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS),
        help="penalty: repetition_penalty=1.1; early end: a full stop ends an answer too (default: all)",
    )  # fmt: skip
    parser.add_argument("--processes", type=int, default=1, help="side by side, one thread each (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the result file, rewritten after every part")
    return run_command(parser.prog, lambda: _run(parser.parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
