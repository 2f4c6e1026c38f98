"""The command ``dflash2``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dflash2
from dflash2.bench import command as bench
from dflash2.checkpoint_files import DEFAULT_DRAFTER
from dflash2.command import FAILED, add_place, run_command
from dflash2.evaluation import command as evaluation
from dflash2.serving import command as serving
from dflash2.targets import EMBEDDED_TARGET
from dflash2.training import command as training

__all__ = ["main"]

DRAFTS_HELP = "drafts per round, 0 is plain decoding; auto: as many as pay on this machine and text"
PAIR_HELP = "a folder, a hub id like owner/name, or the name of what ships with the package (default: %(default)s)"
EXAMPLES = """examples:
  dflash2 demo                                       answers from the embedded model, drafted and verified
  dflash2 generate "Why is the sky blue?"            stream one answer
  dflash2 generate --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --file prompt.txt
  dflash2 inspect path/to/drafter --target path/to/target
  dflash2 head-report --target path/to/target --text my.txt    what an int8 head would change
  dflash2 synth --prompts ultrachat --out shards     documents to train on: the target answers prompts
  dflash2 trace --prompts gsm8k humaneval --out trace     what the target does, recorded once
  dflash2 eval --trace trace --drafter path/to/drafter --out report      acceptance, by replay
  dflash2 stress --url http://localhost:8000         mixed requests to a server that drafts; bench-serve times it
  dflash2 tune && dflash2 bench                      launch settings of this GPU, then its speed

exit codes: 0 done, 1 an output differed or a check failed, 2 the input was wrong (the message says what to change)
"""


def _drafts(text: str) -> int | str:
    if text != "auto" and not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto")
    return text if text == "auto" else int(text)


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _pair(parser: argparse.ArgumentParser, dtype: str = "auto") -> None:
    parser.add_argument("--target", default=EMBEDDED_TARGET, help=f"the model that decides: {PAIR_HELP}")
    parser.add_argument("--drafter", default=DEFAULT_DRAFTER, help=f"the model that drafts: {PAIR_HELP}")
    add_place(parser, dtype)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash2",
        description="Exact LLM decoding with a DFlash2 drafter: it proposes a block, the target verifies it in one "
        "pass, and the output is the target's own.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dflash2 {dflash2.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    demo = commands.add_parser("demo", help="answer three prompts with and without drafts, and compare")
    # In 16 bits a target's pass over several rows rounds apart from one over a single row now and then: not a proof.
    _pair(demo, dtype="float32")
    demo.add_argument("--prompt", action="append", help="ask this instead; may be repeated")
    demo.add_argument("--max-new-tokens", type=_at_least_1, default=128, help="per answer (default: %(default)s)")
    demo.add_argument("--repeats", type=_at_least_1, default=1, help="decode each answer so often, for steadier times")
    demo.add_argument("--num-draft-tokens", type=_drafts, default="auto", help=f"{DRAFTS_HELP} (default: %(default)s)")
    demo.add_argument("--json", type=Path, help="write the numbers to this file")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="answer a prompt with your own target and drafter")
    generate.add_argument("prompt", nargs="?", help="the prompt; without it --file, else standard input")
    _pair(generate)
    generate.add_argument("--file", type=Path, help="read the prompt from a file")
    generate.add_argument("--system", help="system turn of the chat template")
    generate.add_argument("--raw", action="store_true", help="no chat template: continue the text as it is")
    generate.add_argument("--max-new-tokens", type=_at_least_1, default=256, help="budget (default: %(default)s)")
    generate.add_argument(
        "--num-draft-tokens",
        type=_drafts,
        help=f"{DRAFTS_HELP} (default: auto; with --seed all the block has room for, since auto goes by the clock)",
    )
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-p", type=float, default=1.0, help="of the target's distribution (default: off)")
    generate.add_argument("--top-k", type=int, default=0, help="of the target's distribution (default: off)")
    generate.add_argument("--seed", type=int, help="makes sampling repeatable")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    generate.set_defaults(run=_generate)

    inspect = commands.add_parser("inspect", help="what a checkpoint is, and whether it fits a target")
    inspect.add_argument("drafter", nargs="?", default=DEFAULT_DRAFTER, help=PAIR_HELP)
    inspect.add_argument("--target", help="check the fit with this target (its config is enough)")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)

    head = commands.add_parser(
        "head-report",
        help="how an int8 output head would change a target, on real text",
        description="Run a target over text and compare its next-token distributions with those under an int8 copy of "
        "its head: argmax flips, KL divergence, bytes. What to know before target and drafter share an int8 head.",
    )
    head.add_argument("--target", default=EMBEDDED_TARGET, help=f"the model whose head it is: {PAIR_HELP}")
    head.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE",
        help='text files, or .jsonl of prompts like {"turns": [".."]}, which go into the chat template '
        "(default: a model card and a module of this package)",
    )  # fmt: skip
    head.add_argument("--max-tokens", type=_at_least_1, default=4096, help="stop after so many (default: %(default)s)")
    add_place(head)
    head.add_argument("--json", action="store_true", help="print only the JSON line")
    head.set_defaults(run=_head_report)

    doctor = commands.add_parser("doctor", help="what is here, what will be used and why not, and a short self-test")
    doctor.add_argument("--device", default="auto", help="of the self-test (default: a GPU if there is one)")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)

    bench.add_commands(commands)
    evaluation.add_commands(commands)
    training.add_commands(commands)
    serving.add_commands(commands)
    return parser


def _demo(args: argparse.Namespace) -> int:
    from dflash2.demo import PROMPTS, run_demo
    from dflash2.loading import load_pair

    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise dflash2.ConfigError(f"--json {args.json}: there is no such folder to write to. Make it first.")
    pair = load_pair(args.target, args.drafter, args.device, args.dtype)
    prompts = [(f"prompt {i + 1}", p) for i, p in enumerate(args.prompt or [])] or PROMPTS
    same = run_demo(*pair, prompts, args.max_new_tokens, args.repeats, args.num_draft_tokens, args.json)
    return 0 if same else FAILED


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.file is not None:
        raise dflash2.ConfigError("both a prompt and --file were given. Give one.")
    if args.file is not None:
        try:
            return args.file.read_text()
        except OSError as e:
            raise dflash2.ConfigError(f"--file {args.file} cannot be read: {e.strerror}.") from e
    if args.prompt not in (None, "-"):
        return args.prompt
    if sys.stdin.isatty():
        print("prompt (end with Ctrl-D):", file=sys.stderr)
    return sys.stdin.read()


def _generate(args: argparse.Namespace) -> int:
    prompt = _prompt(args)
    if not prompt.strip():
        raise dflash2.ConfigError("the prompt is empty. Give it as an argument, with --file, or on standard input.")
    import torch
    from transformers import TextStreamer

    from dflash2.loading import load_pair
    from dflash2.prompts import prompt_ids

    target, tokenizer, drafter = load_pair(args.target, args.drafter, args.device, args.dtype)
    ids = torch.tensor([prompt_ids(tokenizer, prompt, args.system, args.raw)], device=drafter.device)
    streamer = None if args.json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    drafts = args.num_draft_tokens
    if drafts is None and args.seed is None:
        drafts = "auto"
    out = dflash2.generate(
        target, drafter, ids, max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p,
        top_k=args.top_k, num_draft_tokens=drafts, seed=args.seed, streamer=streamer,
    )  # fmt: skip
    s = out.stats
    numbers = {
        "new_tokens": s.new_tokens,
        "target_passes": s.target_passes,
        "acceptance_length": round(s.acceptance_length, 3),
        "drafts_per_pass": round(s.drafts_per_pass, 3),
        "prefill_s": round(s.prefill_s, 3),
        "decode_tokens_per_s": round((s.new_tokens - 1) / s.decode_s, 2) if s.decode_s else None,
    }
    if args.json:
        text = tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        print(json.dumps({"text": text, **numbers}))
    else:
        print(", ".join(f"{k} {v}" for k, v in numbers.items()), file=sys.stderr)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from dflash2.inspection import describe
    from dflash2.target import misfits

    drafter = dflash2.DFlash2Drafter.from_pretrained(args.drafter)
    facts: dict[str, Any] = {"checkpoint": str(args.drafter), **describe(drafter)}
    problems: list[str] = []
    if args.target:
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(dflash2.resolve_target(args.target))
        except (OSError, ValueError) as e:
            raise dflash2.CheckpointError(f"target {args.target}: its config cannot be loaded ({e}).") from e
        problems = misfits(drafter.config, config)
        facts["fits target"] = {"target": args.target, "fits": not problems, "problems": problems}
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_lines(facts)))
    return FAILED if problems else 0


def _head_report(args: argparse.Namespace) -> int:
    from dflash2.evaluation.head_report import default_texts, report, table

    found = report(args.target, args.text or default_texts(), args.max_tokens, args.device, args.dtype)
    if not args.json:
        print(table(found))
    print(json.dumps(found))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from dflash2.doctor import examine, table

    report = examine(args.device)
    print(json.dumps(report.as_dict(), indent=2) if args.json else table(report))
    return 0 if report.ok else FAILED


def _lines(facts: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict) and len(value) > 2:
            total = f"  {sum(value.values()):,}" if all(isinstance(v, int) for v in value.values()) else ""
            lines += [f"{indent}{name}{total}", *_lines(value, indent + "  ")]
        else:
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value > 9999 else value
            lines.append(f"{indent}{name:<38}{'-' if shown is None else shown}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    args = _parser().parse_args(argv)
    return run_command("dflash2", lambda: args.run(args))


if __name__ == "__main__":
    raise SystemExit(main())
