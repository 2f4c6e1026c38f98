"""Decoding with drafts beside plain greedy decoding: ``python -m dflash2.bench.generate --help``.

Each repetition decodes a prompt by `model.generate` of Transformers, with ``num_draft_tokens="auto"``, and, as often as
asked, with every fixed number of drafts: one after the other in one process, so that what disturbs the machine disturbs
all of them. A ratio compares runs of one repetition; a prompt's is the median over repetitions, a kind's the median
over its prompts. Wall-clock time of whole calls, the prompt's pass included.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dflash2.checkpoint_files import DEFAULT_DRAFTER
from dflash2.command import FAILED, run_command
from dflash2.comparison import first_difference
from dflash2.demo import plain_greedy, timed
from dflash2.drafter import DFlash2Drafter
from dflash2.errors import ConfigError
from dflash2.generation import generate
from dflash2.prompts import prompt_ids, read_prompts
from dflash2.provenance import provenance
from dflash2.targets import EMBEDDED_TARGET

__all__ = ["PROMPTS", "main", "measure_prompt", "run"]

PROMPTS = (
    ("code", "Write a Python function that returns the n-th Fibonacci number without recursion."),
    ("code", "Write a Python class Stack with the methods push, pop and is_empty."),
    ("code", "Write a Python function that counts how often each word occurs in a text file."),
    ("code", "Write a JavaScript function that sorts an array of objects by their field `price`."),
    ("math", "A train goes 60 km in the first hour and 45 km in each of the next three hours. How far does it go?"),
    ("math", "Lena has 3 boxes with 24 pencils each and gives away 17 pencils. How many are left? Show each step."),
    ("math", "A shirt costs 40 dollars and is 25 percent off. What does it cost now? Explain step by step."),
    ("math", "Tom saves 15 dollars a week. After how many weeks can he buy a bike for 180 dollars?"),
    ("chat", "What should I pack for a week of hiking in the mountains in autumn?"),
    ("chat", "Write a short, friendly e-mail that moves tomorrow's meeting to Friday."),
    ("chat", "Why is the sky blue at noon and red in the evening?"),
    ("chat", "Tell me a bedtime story about a fox who is afraid of the dark."),
)

Width = int | Literal["auto"]
Say = Callable[[str], None]


def measure_prompt(
    target: Any,
    drafter: DFlash2Drafter,
    ids: Tensor,
    widths: Sequence[Sequence[Width]],
    max_new_tokens: int,
) -> dict[str, Any]:
    """Decode one prompt plainly and with drafts, once for each repetition.

    Args:
        target, drafter: a pair, on one device.
        ids: int64 ``[1, S]``.
        widths: for each repetition, the ``num_draft_tokens`` to run after plain decoding.
        max_new_tokens: per run.

    Returns:
        tokens, plain_s, and for each width its ``seconds``, the ``ratio`` to plain decoding (above 1 is faster),
        ``round_ms`` (decoding time by verify passes), ``acceptance_length``, ``widths`` (verify passes by number of
        drafts) and ``difference`` to the plain output (None where they are the same). All but seconds and ratio are the
        last run's.
    """
    plain_s: list[float] = []
    runs: dict[str, dict[str, Any]] = {}
    plain: list[int] = []
    for repetition in widths:
        plain, seconds = timed(partial(plain_greedy, target, ids, max_new_tokens), ids.device)
        plain_s.append(seconds)
        for width in repetition:
            call = partial(generate, target, drafter, ids, None, max_new_tokens, num_draft_tokens=width)
            out, seconds = timed(call, ids.device)
            found = runs.setdefault(str(width), {"seconds": [], "ratios": []})
            found["seconds"].append(seconds)
            found["ratios"].append(plain_s[-1] / seconds)
            stats = out.stats
            found["round_ms"] = round(1e3 * stats.decode_s / max(stats.widths.total(), 1), 2)
            found["acceptance_length"] = round(stats.acceptance_length, 3)
            found["widths"] = {str(k): n for k, n in sorted(stats.widths.items())}
            found["difference"] = first_difference(target, ids, plain, out.sequences[0, ids.shape[1] :].tolist())
    for found in runs.values():
        found["ratio"] = round(statistics.median(found.pop("ratios")), 3)
        found["difference"] = None if found["difference"] is None else vars(found["difference"])
    return {"tokens": len(plain), "plain_s": plain_s, "runs": runs}


def run(
    target: Any,
    tokenizer: Any,
    drafter: DFlash2Drafter,
    prompts: Iterable[tuple[str, str]] = PROMPTS,
    max_new_tokens: int = 128,
    repeats: int = 3,
    curve_repeats: int = 1,
    out: Path | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Measure prompts, and sum them up by kind.

    Args:
        target, tokenizer, drafter: from `load_pair`.
        prompts: (kind, text) pairs.
        max_new_tokens: per run.
        repeats: how often plain and automatic decoding alternate on each prompt.
        curve_repeats: in how many of them every fixed width runs too.
        out: the result file, if any; rewritten after every prompt.
        say: takes each line.

    Returns:
        The report: ``summary`` (kind -> width -> median and lowest ratio over prompts), ``prompts``, ``settings``,
        ``provenance``.

    Raises:
        ConfigError: ``repeats`` is below 1.
    """
    if repeats < 1:
        raise ConfigError(f"repeats={repeats}: expected at least 1.")
    fixed: list[Width] = list(range(drafter.config.max_draft_tokens + 1))
    plan = [["auto", *(fixed if i < curve_repeats else [])] for i in range(repeats)]
    settings = {
        "max_new_tokens": max_new_tokens, "repeats": repeats, "curve_repeats": curve_repeats,
        "dtype": str(drafter.dtype), "threads": torch.get_num_threads(),
    }  # fmt: skip
    report: dict[str, Any] = {"settings": settings, "provenance": provenance(drafter.device), "prompts": []}
    warm_up = torch.tensor([prompt_ids(tokenizer, "Hello!")], device=drafter.device)
    measure_prompt(target, drafter, warm_up, [["auto", *fixed]], 12)
    for kind, text in prompts:
        ids = torch.tensor([prompt_ids(tokenizer, text)], device=drafter.device)
        found = measure_prompt(target, drafter, ids, plan, max_new_tokens)
        report["prompts"].append({"kind": kind, "prompt": text, **found})
        report["summary"] = summarise(report["prompts"])
        ratios = "  ".join(f"{width} {r['ratio']:.2f}x" for width, r in found["runs"].items())
        say(f"[{kind}] {text[:60]}\n    {ratios}  widths {found['runs']['auto']['widths']}")
        if out is not None:
            out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for kind, widths in report["summary"].items():
        say(f"{kind}: " + ", ".join(f"{w} {r['median']:.2f}x (lowest {r['lowest']:.2f})" for w, r in widths.items()))
    return report


def summarise(measured: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Kind -> width -> median and lowest ratio over the prompts."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for kind in dict.fromkeys(m["kind"] for m in measured):
        ratios: dict[str, list[float]] = {}
        for m in measured:
            for width, found in m["runs"].items() if m["kind"] == kind else ():
                ratios.setdefault(width, []).append(found["ratio"])
        summary[kind] = {w: {"median": round(statistics.median(r), 3), "lowest": min(r)} for w, r in ratios.items()}
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 1 if an output differed from plain greedy decoding."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash2.bench.generate",
        description="Speed of decoding with drafts beside plain greedy decoding by Transformers, interleaved.",
    )
    parser.add_argument("--target", default=EMBEDDED_TARGET, help="the model that decides (default: %(default)s)")
    parser.add_argument("--drafter", default=DEFAULT_DRAFTER, help="the model that drafts (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 (default: %(default)s)")
    parser.add_argument(
        "--prompts", nargs="+", type=Path, help="JSON lines with turns and domain; default: a dozen of this module"
    )
    parser.add_argument("--limit", type=int, help="only so many prompts of each file (or of each kind of the module's)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per answer (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="plain and auto alternate so often (default: %(default)s)"
    )
    parser.add_argument(
        "--curve-repeats", type=int, default=1, help="repetitions that run every fixed width too (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="the result file")
    return run_command(parser.prog, lambda: _run(parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    from dflash2.loading import load_pair

    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {args.out}: there is no such folder to write to. Make it first.")
    prompts = _prompts(args.prompts, args.limit)
    pair = load_pair(args.target, args.drafter, args.device, args.dtype)
    report = run(*pair, prompts, args.max_new_tokens, args.repeats, args.curve_repeats, args.out)
    return FAILED if any(r["difference"] for m in report["prompts"] for r in m["runs"].values()) else 0


def _prompts(paths: Sequence[Path] | None, limit: int | None) -> list[tuple[str, str]]:
    if paths is None:
        kinds = dict.fromkeys(kind for kind, _ in PROMPTS)
        return [p for kind in kinds for p in [p for p in PROMPTS if p[0] == kind][:limit]]
    return [(p.get("domain", path.stem), p["turns"][0]) for path in paths for p in read_prompts([path])[:limit]]


if __name__ == "__main__":
    raise SystemExit(main())
