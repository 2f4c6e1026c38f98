"""The subcommands ``dflash2 synth`` and ``dflash2 train``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflash2.command import add_place
from dflash2.errors import ConfigError
from dflash2.targets import EMBEDDED_TARGET
from dflash2.training.config_file import config_yaml, help_text, load_config
from dflash2.training.synth_options import SynthOptions as Defaults

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add them to the subparsers of the command ``dflash2``."""
    _add_synth(commands)
    _add_train(commands)


def _add_synth(commands: Any) -> None:
    synth = commands.add_parser(
        "synth",
        help="let a target answer prompts: documents to train on",
        description="The target answers prompts at mixed temperatures. Its answers are kept as token shards (.npz), "
        "each with a .json that says where it comes from. Run the same command again to go on after an interruption.",
    )
    synth.add_argument("--target", default=EMBEDDED_TARGET, help="folder, hub id or name (default: %(default)s)")
    synth.add_argument(
        "--prompts", required=True, nargs="+", metavar="SOURCE",
        help="builtin; a set's name like gsm8k:train or ultrachat; hub:owner/name[:split[:column]]; JSONL files of "
        'lines like {"turns": ["the prompt"]}; or self: the target writes --count prompts itself',
    )  # fmt: skip
    synth.add_argument("--out", required=True, type=Path, help="folder for the shards; finished ones are kept")
    synth.add_argument(
        "--count", type=int, default=Defaults.count, help="prompts to write, or to take of each source (default: all)"
    )
    synth.add_argument("--name", default=Defaults.name, help="first part of the shards' names (default: %(default)s)")
    synth.add_argument("--rows", type=int, help="requests in flight (default: what fits into the GPU, up to 2048)")
    synth.add_argument("--shard", type=int, help="requests per shard (default: 20000 on a GPU, 500 elsewhere)")
    synth.add_argument(
        "--max-prompt",
        type=int,
        default=Defaults.max_prompt,
        help="longer prompts are left out, in tokens (default: %(default)s)",
    )
    synth.add_argument(
        "--max-new-tokens",
        type=int,
        default=Defaults.max_new_tokens,
        help="longest answer, in tokens (default: %(default)s)",
    )
    synth.add_argument(
        "--temperatures", type=_shares, default="0:0.6,0.7:0.25,1:0.15", help="T:share,... (default: %(default)s)"
    )
    synth.add_argument(
        "--max-seconds",
        type=float,
        default=Defaults.max_seconds,
        help="write what is finished then (default: no limit)",
    )
    synth.add_argument(
        "--seed", type=int, default=Defaults.seed, help="of prompts, order and sampling (default: %(default)s)"
    )
    add_place(synth)
    synth.add_argument("--no-graphs", action="store_true", help="launch every kernel from Python")
    synth.set_defaults(run=_synth)


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a drafter on token shards, from a file of settings",
        description="Train a drafter for a frozen target. The same command goes on where a run was stopped or killed.\n"
        "On several GPUs:\naccelerate launch --multi_gpu -m dflash2 train ...",
        epilog="settings (default):\n" + help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("--config", type=Path, help="YAML or JSON file of settings; a run's train.json, too")
    train.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE",
        help="change settings (drafter.FIELD=VALUE: one of the drafter's)",
    )  # fmt: skip
    train.add_argument(
        "--write-config", type=Path, metavar="FILE", help="write a file of all settings, explained; do nothing else"
    )
    train.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    if args.write_config is not None:
        if args.write_config.exists():
            raise ConfigError(f"--write-config {args.write_config} exists already. Name another file.")
        args.write_config.write_text(config_yaml())
        print(f"{args.write_config}: set target, shards, out, drafter.mask_token_id and max_steps")
        return 0
    settings = load_config(args.config, args.set)
    from dflash2.training.train import train

    train(settings)
    return 0


def _synth(args: argparse.Namespace) -> int:
    from dflash2.training.synth import SynthOptions, synth

    given = {k: v for k, v in vars(args).items() if k not in ("command", "run", "no_graphs")}
    synth(SynthOptions(**given | {"prompts": tuple(args.prompts), "graphs": not args.no_graphs}))
    return 0


def _shares(text: str) -> dict[float, float]:
    try:
        return {float(t): float(share) for t, share in (item.split(":") for item in text.split(","))}
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 0:0.6,0.7:0.4 (temperature:share)") from e
