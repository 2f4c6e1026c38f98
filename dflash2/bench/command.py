"""The subcommands ``dflash2 bench`` and ``dflash2 tune``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflash2.command import FAILED

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add both to the subparsers of the command ``dflash2``."""
    bench = commands.add_parser(
        "bench",
        help="measure kernels and drafter on this GPU against its memory bandwidth",
        description="Runs the operations' tests, measures the GPU's read and copy bandwidth, then every case on a "
        "published drafter's shapes with random weights, against the bytes that must move and beside what one would "
        "otherwise run. Writes one JSON file; `python -m dflash2.bench.report` draws it.",
    )
    bench.add_argument("--cases", nargs="+", default=[], metavar="PATTERN", help="names, like 'head.*' (default: all)")
    bench.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    bench.add_argument("--out", type=Path, help="the result file (default: the GPU's name in this folder)")
    bench.add_argument("--quick", action="store_true", help="few samples and no peers; the file says so")
    bench.add_argument("--skip-tests", action="store_true", help="measure what may be wrong; the file says so")
    bench.set_defaults(run=_bench)

    tune = commands.add_parser(
        "tune",
        help="measure the kernels' launch settings on this GPU, once",
        description="Times every candidate setting of each kernel on the published drafters' shapes and keeps the best "
        "in your cache folder, where the kernels look first.",
    )
    tune.add_argument("--ops", nargs="+", default=[], metavar="OP", help="only these operations (default: all)")
    tune.add_argument("--quick", action="store_true", help="only the shapes of the 27B drafter, fewer samples")
    tune.add_argument("--out", type=Path, help="the settings file (default: in your cache folder)")
    tune.set_defaults(run=_tune)


def _bench(args: argparse.Namespace) -> int:
    from dflash2.bench.cases import select
    from dflash2.bench.run import run_bench

    if args.list:
        print("\n".join(case.name for case in select(args.cases)))
        return 0
    return 0 if run_bench(args.cases, args.out, quick=args.quick, skip_tests=args.skip_tests) else FAILED


def _tune(args: argparse.Namespace) -> int:
    from dflash2.bench.tuning import tune

    tune(args.ops, args.out, quick=args.quick)
    return 0
