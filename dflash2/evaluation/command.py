"""The subcommands ``dflash2 trace`` and ``dflash2 eval``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dflash2.checkpoint_files import DEFAULT_DRAFTER
from dflash2.command import FAILED, add_place
from dflash2.errors import ConfigError
from dflash2.targets import EMBEDDED_TARGET

__all__ = ["add_commands"]

PROMPTS_HELP = (
    "sets of prompts, each a name like gsm8k or builtin, or a .jsonl file of lines like "
    '{"turns": ["the prompt"]}; NAME=SOURCE to call one something else'
)
#: Settings of the answers and what they are by default; None on the command line is not given.
DECODING: dict[str, int | float] = {
    "limit": 0,
    "max_new_tokens": 256,
    "temperature": 0.0,
    "seed": 0,
    "batch_size": 32,
}


def add_commands(commands: Any) -> None:
    """Add both to the subparsers of the command ``dflash2``."""
    trace = commands.add_parser(
        "trace",
        help="record what a target does on prompts, to measure drafters without it",
        description="The target answers prompts; tokens and the hidden states that drafters read go to a folder. An "
        "interrupted trace goes on when it is run again. `dflash2 eval --trace FOLDER` replays drafters over it.",
    )
    trace.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where to put the trace")
    trace.add_argument("--target", default=EMBEDDED_TARGET, help="folder, hub id or name (default: %(default)s)")
    trace.add_argument("--shards", nargs="+", metavar="FILE", help="record these token shards of `dflash2 synth`")
    trace.add_argument("--drafter", action="append", help="record the layers that it reads; may be repeated (default: "
                       "the packaged one)")  # fmt: skip
    trace.add_argument("--layers", type=int, nargs="+", metavar="L", help="or these decoder layers")
    _decoding(trace)
    add_place(trace, auto="bfloat16 on GPUs, else float32")
    trace.set_defaults(run=_trace)

    measure = commands.add_parser(
        "eval",
        help="acceptance of drafters: replay over a trace, several side by side",
        description="Replays drafters over a trace and writes report.json, report.csv and report.html. With --prompts "
        "it makes the trace first, into OUT/trace. With --live it generates instead, and writes live.json.",
    )
    measure.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where to put the report")
    measure.add_argument("--trace", type=Path, metavar="FOLDER", help="made by `dflash2 trace`")
    measure.add_argument("--drafter", action="append", metavar="[NAME=]DRAFTER",
                         help="folder, hub id or name; may be repeated (default: the packaged one)")  # fmt: skip
    measure.add_argument("--target", help="where a target is needed (default: the trace's, else the embedded one)")
    measure.add_argument("--widest-only", action="store_true", help="only rounds of as many drafts as the block has")
    measure.add_argument("--costs", help="for speeds: a file of what rounds cost, or the word measure")
    measure.add_argument("--live-check", type=int, default=0, metavar="N",
                         help="decode N of the prompts with drafts, and compare every round")  # fmt: skip
    measure.add_argument("--live", action="store_true", help="generate, do not replay")
    measure.add_argument("--num-draft-tokens", type=int, help="with --live: drafts per round (default: the widest)")
    measure.add_argument("--drafter-int8", action="store_true", help="weight-only int8 for the drafter's own linears")
    int8_head = "pick drafts by an int8 copy of the target's head (the target decides by its own)"
    measure.add_argument("--draft-int8-head", action="store_true", help=int8_head)
    _decoding(measure)
    add_place(measure, auto="the trace's; for a new one bfloat16 on GPUs, else float32")
    measure.set_defaults(run=_eval)


def _decoding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", nargs="+", metavar="SOURCE", help=PROMPTS_HELP)
    helps = {
        "limit": "first so many prompts of each set, 0 for all",
        "max_new_tokens": "budget of an answer",
        "temperature": "of the answers, 0 is greedy",
        "seed": "of sampling",
        "batch_size": "prompts at a time",
    }
    for name, default in DECODING.items():
        help_ = f"{helps[name]} (default: {default})"
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), help=help_)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in DECODING}
    settings = {**DECODING, **{k: v for k, v in given.items() if v is not None}}
    for name, low in (("limit", 0), ("max_new_tokens", 1), ("temperature", 0), ("batch_size", 1)):
        if not low <= settings[name] < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {settings[name]}: expected at least {low}.")
    return {"prompts": args.prompts, **settings}


def _refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    given = ["--" + name.replace("_", "-") for name in names if getattr(args, name) not in (None, False, 0)]
    if given:
        raise ConfigError(f"{why}. Leave out {', '.join(given)}.")


def _trace(args: argparse.Namespace) -> int:
    from dflash2.config import DFlash2Config
    from dflash2.evaluation.sources import trace_prompts, trace_shards
    from dflash2.loading import load_target, pick_device

    settings = _settings(args)
    if (args.prompts is None) == (args.shards is None):
        raise ConfigError("give either --prompts to be answered, or --shards of answers.")
    if args.shards:
        _refuse(args, ("max_new_tokens", "temperature", "seed"), "--shards were decoded before")
    if args.layers and args.drafter:
        raise ConfigError("give --layers or --drafter: the layers of a drafter are those that it reads.")
    layers = args.layers or [
        i for d in args.drafter or [DEFAULT_DRAFTER] for i in DFlash2Config.from_pretrained(d).target_layer_ids
    ]
    device, dtype = pick_device(args.device, args.dtype)
    target, tokenizer = load_target(args.target, device, dtype)
    if args.shards:
        made = trace_shards(
            target, args.target, args.shards, args.out, layers, settings["limit"], settings["batch_size"]
        )
    else:
        made = trace_prompts(target, tokenizer, args.target, args.out, layers, settings)
    print(f"{made.folder}: {made.about['shards']} shards, layers {list(made.layer_ids)}")
    return 0


def _eval(args: argparse.Namespace) -> int:
    if args.live:
        return _live(args)
    if (args.prompts is None) == (args.trace is None):
        raise ConfigError("give either --trace, a folder of `dflash2 trace`, or --prompts to make one of.")
    _refuse(args, ["num_draft_tokens"], "replay reports every number of drafts, one of them goes with --live")
    if args.trace is not None:
        _refuse(args, DECODING, "a trace was decoded before")
    from dflash2.evaluation.session import evaluate

    report, ok = evaluate(args, _named(args.drafter), _settings(args))
    for run, lengths in report["acceptance_length"].items():
        print(f"{run}: acceptance length " + ", ".join(f"{name} {value:.3f}" for name, value in lengths.items()))
    print(args.out / "report.html")
    return 0 if ok else FAILED


def _named(drafters: list[str] | None) -> dict[str, str]:
    """Drafters by the name that a report gives them: NAME=DRAFTER, or the last part of a path or id."""
    named: dict[str, str] = {}
    for given in drafters or [DEFAULT_DRAFTER]:
        name, equals, path = given.partition("=")
        name, path = (name, path) if equals else (Path(given).name, given)
        if name in named:
            raise ConfigError(f"--drafter: two of them are called {name}. Tell them apart with NAME=DRAFTER.")
        named[name] = path
    return named


def _live(args: argparse.Namespace) -> int:
    _refuse(args, ("trace", "costs", "live_check", "widest_only"), "--live generates and replays nothing")
    if args.prompts is None or len(args.drafter or [""]) != 1:
        raise ConfigError("--live takes --prompts and one --drafter.")
    from dflash2.evaluation.acceptance import live_report
    from dflash2.evaluation.sources import load_sets
    from dflash2.loading import load_pair

    settings = _settings(args) | {"num_draft_tokens": args.num_draft_tokens}
    sets, sources = load_sets(settings.pop("prompts"), settings.pop("limit"))
    (drafter_path,) = _named(args.drafter).values()
    target_name = args.target or EMBEDDED_TARGET
    target, tokenizer, drafter = load_pair(
        target_name, drafter_path, args.device, args.dtype,
        int8_linears=args.drafter_int8, draft_int8_head=args.draft_int8_head,
    )  # fmt: skip
    origin = {"prompts": sources, "target": Path(target_name).name, "drafter": Path(drafter_path).name}
    report = live_report(target, tokenizer, drafter, sets, origin, **settings)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "live.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(args.out / "live.json")
    return 0
