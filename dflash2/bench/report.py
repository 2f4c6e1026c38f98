"""A result file for people: the README's table, and a plot. ``python -m dflash2.bench.report --help``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash2.command import run_command
from dflash2.errors import ConfigError

__all__ = ["into_readme", "load", "main", "plot", "table"]

BEGIN, END = "<!-- gpu-speed -->", "<!-- /gpu-speed -->"
#: Rows of the README, in its words.
ROWS = {
    "head.int8.topk.rows7": "int8 head + top 16, 7 rows",
    "head.int8.topk.rows56": "the same, 56 rows",
    "head.bf16.topk.rows7": "bf16 head + top 16, 7 rows",
    "propose.27b.c1.int8head": "round, bf16 drafter, int8 head",
    "propose.27b.c1.int8all": "round, all int8",
    "propose.27b.c32.int8head": "round, 32 sequences",
    "propose.30b.c1.int8head": "round, Muse 30B drafter",
    "propose.flash.c1.int8head": "round, GLM-5.3-Flash drafter",
    "context.27b.2k": "round at 2 k tokens of context",
    "context.27b.256k": "round at 256 k tokens of context",
    "append.27b.2048": "append 2,048 tokens",
    "append.27b.8192": "append 8,192 tokens",
}
PEERS = {
    "cublas_bf16_topk": "cuBLAS bf16 + topk",
    "torch_compile_int8_topk": "torch.compile int8 + topk",
    "dflash_eager": "published modules",
    "dflash_cuda_graph": "the same in a CUDA graph",
    "reference_eager": "our PyTorch reference",
    "reference_torch_compile": "the same, torch.compile",
}
FIELDS = ("case", "median_us", "p20_us", "p80_us", "bytes", "floor_us", "over_floor", "share_of_read", "peers")


def load(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read as a result file: {e}") from e
    missing = {"ceilings", "provenance", "cases"} - set(report)
    missing |= {name for case in report.get("cases", []) for name in FIELDS if name not in case}
    if missing:
        raise ConfigError(f"{path} is no result file of `dflash2 bench`: {', '.join(sorted(missing))} is missing.")
    return report


def table(report: dict[str, Any]) -> str:
    """Markdown: what was measured where, and a row for each case that the README shows."""
    origin, roof = report["provenance"], report["ceilings"]
    cases = {c["case"]: c for c in report["cases"]}
    read, copy = (roof[f"{way}_bytes_per_s"] / 1e12 for way in ("read", "copy"))
    where = f"{origin['device']}, torch {origin['torch']}, triton {origin['triton']}, commit {origin['commit']}."
    return "\n".join(
        [
            f"{where} Measured in the same run: read {read:.2f} TB/s, copy {copy:.2f} TB/s.",
            "",
            "| | µs (20-80 %) | MB that must move | time over floor | of read bandwidth, or arithmetic | beside, µs |",
            "|---|---|---|---|---|---|",
            *[_row(words, cases[name]) for name, words in ROWS.items() if name in cases],
        ]
    )


def _row(words: str, c: dict[str, Any]) -> str:
    peers = [f"{PEERS.get(name, name)} {us:,.0f} ({us / c['median_us']:.1f}x)" for name, us in c["peers"].items() if us]
    cells = (
        words,
        f"{c['median_us']:,.0f} ({c['p20_us']:,.0f}-{c['p80_us']:,.0f})",
        f"{c['bytes'] / 1e6:,.0f}",
        *_reached(c),
        "; ".join(peers),
    )
    return f"| {' | '.join(cells)} |"


def _reached(c: dict[str, Any]) -> tuple[str, str]:
    """Time over the floor and share of bandwidth; operations by time where arithmetic and not bytes set the pace."""
    if "operations" in c:
        return "", f"{c['operations'] / c['median_us'] / 1e6:,.0f} TFLOP/s"
    return f"{c['over_floor']:.2f}", f"{c['share_of_read']:.0%}"


def into_readme(text: str, report: dict[str, Any]) -> str:
    """The README's text with the table of ``report`` between its markers.

    Raises:
        ConfigError: it has no markers.
    """
    if BEGIN not in text or END not in text:
        raise ConfigError(f"the file has no {BEGIN} ... {END} to put the table between.")
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table(report)}\n{END}", text, flags=re.S)


def plot(report: dict[str, Any], path: Path) -> None:
    """Shares of the read bandwidth of the cases that it bounds, and the round's time over the length of the context.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'dflash2[notebooks]'") from None
    figure = Figure(figsize=(11, 0.26 * len(report["cases"]) + 2), layout="constrained")
    bars, curve = figure.subplots(1, 2, width_ratios=(3, 2))
    cases = [c for c in report["cases"][::-1] if "operations" not in c]
    bars.barh([c["case"] for c in cases], [100 * c["share_of_read"] for c in cases], color="tab:blue")
    bars.axvline(100, color="black", linewidth=1)
    bars.set_xlabel("bytes that must move / time, % of the measured read bandwidth")
    bars.set_title(f"{report['provenance']['device']}: {report['ceilings']['read_bytes_per_s'] / 1e12:.2f} TB/s read")
    context = [c for c in report["cases"] if c["case"].startswith("context.")]
    if context:
        names = [c["case"].rpartition(".")[2] for c in context]
        curve.plot(names, [c["median_us"] for c in context], "o-", label="measured")
        curve.plot(names, [c["floor_us"] for c in context], "k--", label="floor")
        curve.set_ylim(bottom=0)
        curve.set_xlabel("tokens of context")
        curve.set_ylabel("µs a round, one sequence")
        curve.legend()
    figure.savefig(path, dpi=120)


def _run(argv: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dflash2.bench.report",
        description="Show a result of dflash2 bench: print the README table.",
    )
    parser.add_argument("results", type=Path, help="the JSON file")
    parser.add_argument("--readme", type=Path, help=f"rewrite what stands between {BEGIN} and {END} in this file")
    parser.add_argument("--plot", type=Path, help="draw this picture (needs matplotlib)")
    args = parser.parse_args(argv)
    report = load(args.results)
    if args.readme:
        args.readme.write_text(into_readme(args.readme.read_text(encoding="utf-8"), report), encoding="utf-8")
    if args.plot:
        plot(report, args.plot)
    if not args.readme and not args.plot:
        print(table(report))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command("dflash2.bench.report", lambda: _run(argv))


if __name__ == "__main__":
    raise SystemExit(main())
