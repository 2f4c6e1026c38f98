"""The subcommands ``dflash2 stress`` and ``dflash2 bench-serve``."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from dflash2.command import FAILED
from dflash2.errors import ConfigError

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add both to the subparsers of the command ``dflash2``."""
    stress = commands.add_parser(
        "stress",
        help="many mixed requests against a server; compare its greedy answers with a run without drafts",
        description="Concurrent greedy, sampled, long and aborted requests, half of them with shared prefixes, against "
        "an OpenAI-compatible server. Run it once against the server without a drafter (--out plain.json), then "
        "against the one with (--compare plain.json). Exit code 1: an answer differed, a request failed, or the server "
        "went away.",
    )
    _server(stress)
    stress.add_argument("--requests", type=_at_least_1, default=200, help="how many (default: %(default)s)")
    stress.add_argument("--concurrency", type=_at_least_1, default=16, help="at a time (default: %(default)s)")
    stress.add_argument("--max-tokens", type=_at_least_1, default=96, help="longest answer (default: %(default)s)")
    stress.add_argument("--long-words", type=_at_least_1, default=1500, help="words of long prompts "
                        "(default: %(default)s)")  # fmt: skip
    stress.add_argument("--seed", type=int, default=0, help="of the requests (default: %(default)s)")
    stress.add_argument("--pid", type=int, help="also sample the memory of this process")
    stress.add_argument("--compare", type=Path, metavar="FILE", help="answers of an earlier run with --out")
    stress.add_argument("--allow-different", type=int, default=0, metavar="N", help="differing answers that are no "
                        "failure: 16-bit targets break ties by a batch's shape (default: %(default)s)")  # fmt: skip
    stress.set_defaults(run=_stress)

    bench = commands.add_parser(
        "bench-serve",
        help="tokens per second, time to first token and time per token of a server",
        description="Streams the same prompts at several numbers of concurrent requests. Medians with 20 and 80 %.",
    )
    _server(bench)
    bench.add_argument("--concurrency", type=_at_least_1, nargs="+", default=[1, 4, 16], help="(default: 1 4 16)")
    bench.add_argument("--prompts", nargs="+", default=["builtin"], metavar="SOURCE", help="sets of prompts: a name "
                       "like gsm8k or builtin, or a .jsonl file (default: builtin)")  # fmt: skip
    bench.add_argument("--limit", type=_at_least_1, default=32, help="prompts of each set (default: %(default)s)")
    bench.add_argument("--max-tokens", type=_at_least_1, default=128, help="longest answer (default: %(default)s)")
    bench.add_argument("--repeats", type=_at_least_1, default=3, help="of every measurement (default: %(default)s)")
    bench.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    bench.set_defaults(run=_bench)


def _server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="of the server, like http://localhost:8000")
    parser.add_argument("--model", help="name to ask for (default: the first that the server lists)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all results to this file, as JSON")


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _check_out(out: Path | None) -> None:
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no such folder to write to. Make it first.")


def _stress(args: argparse.Namespace) -> int:
    from dflash2.serving.client import Server
    from dflash2.serving.stress import compare, jobs, load, run

    _check_out(args.out)
    reference = None if args.compare is None else load(args.compare)
    work = jobs(args.requests, args.seed, args.max_tokens, args.long_words)
    found = run(Server(args.url, args.model), work, args.concurrency, args.pid)
    if reference is not None:
        found["comparison"] = compare(found["answers"], reference)
    if args.out is not None:
        args.out.write_text(json.dumps(found))
    print(json.dumps({k: v for k, v in found.items() if k != "answers"}))
    different = found.get("comparison", {}).get("different", [])
    return FAILED if found["errors"] or not found["alive"] or len(different) > args.allow_different else 0


def _bench(args: argparse.Namespace) -> int:
    from dflash2.prompts import load_prompts
    from dflash2.serving.bench import measure, table
    from dflash2.serving.client import Server

    _check_out(args.out)
    prompts = [p["turns"][0] for source in args.prompts for p in load_prompts(source, args.limit)]
    server = Server(args.url, args.model)
    measure(server, prompts[:4], min(4, len(prompts)), 16, 1, 0.0)  # the server's first requests compile its kernels
    rows = [measure(server, prompts, n, args.max_tokens, args.repeats, args.temperature) for n in args.concurrency]
    found = {"url": args.url, "model": server.model, "prompts": args.prompts, "date": time.strftime("%Y-%m-%d")}
    found |= {"max_tokens": args.max_tokens, "temperature": args.temperature, "results": rows}
    print(table(rows))
    print(json.dumps(found))
    if args.out is not None:
        args.out.write_text(json.dumps(found))
    return 0
