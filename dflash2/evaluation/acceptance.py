"""Acceptance length by real generation: ``python -m dflash2.evaluation.acceptance --help``.

A verify round yields the drafts that stood and one token of the target's own. The acceptance length is tokens from
verify rounds by number of rounds: per prompt, then the mean over prompts. The prompt's own pass yields the first token
and is no round. A round that a stop or the budget cuts counts with the tokens that were kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import dflash2
from dflash2.checkpoint_files import DEFAULT_DRAFTER
from dflash2.command import run_command
from dflash2.errors import ConfigError
from dflash2.int8_linear import has_int8_linears
from dflash2.prompts import prompt_ids, read_prompts
from dflash2.provenance import provenance
from dflash2.targets import EMBEDDED_TARGET

__all__ = ["Measurement", "main", "measure", "summarise"]

#: Fewer prompts than this say more about the prompts than about the context length.
MIN_PROMPTS = 5
FIRST_BUCKET = 128
DEFINITION = "tokens of verify rounds (bonus included) / rounds; per prompt, then the mean over prompts"


@dataclass(frozen=True)
class Measurement:
    """What generating for one set of prompts showed.

    Attributes:
        acceptance_length: mean over prompts of each prompt's tokens per round.
        acceptance_length_micro: all tokens by all rounds.
        rounds, tokens: sums; tokens are those of verify rounds.
        accepted_by_row: share of the rounds that reached draft i and kept it.
        by_context: per range of context lengths, tokens / rounds as ``acceptance_length``, ``rounds`` and ``prompts``.
            Ranges seen by fewer than 5 prompts are left out.
        prompts: how many had at least one round.
        seconds: wall clock, everything included.
    """

    acceptance_length: float
    acceptance_length_micro: float
    rounds: int
    tokens: int
    accepted_by_row: list[float]
    by_context: dict[str, dict[str, float]]
    prompts: int
    seconds: float


def measure(
    target: Any,
    drafter: dflash2.DFlash2Drafter,
    tokenizer: Any,
    prompts: Sequence[dict[str, Any]],
    *,
    max_new_tokens: int = 256,
    batch_size: int = 16,
    num_draft_tokens: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> Measurement:
    """Generate for every prompt and count.

    Args:
        target: a Transformers causal LM.
        drafter: trained for it.
        tokenizer: the target's.
        prompts: dictionaries with ``turns`` and optionally ``system``.
        max_new_tokens: budget of each answer.
        batch_size: prompts at a time; prompts of similar length go together.
        num_draft_tokens: k; the drafter's most by default.
        temperature: of the target's distribution; 0 is greedy.
        seed: of sampling.

    Raises:
        ConfigError: the drafter does not fit the target, or a prompt has no tokens.
    """
    began = time.perf_counter()
    encoded = sorted((prompt_ids(tokenizer, p["turns"][0], p.get("system")) for p in prompts), key=len)
    lengths: list[list[int]] = []
    with tqdm(total=len(encoded), unit="prompt", disable=None) as bar:
        for ids, mask in _batches(encoded, batch_size, target.device):
            out = dflash2.generate(
                target,
                drafter,
                ids,
                mask,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                num_draft_tokens=num_draft_tokens,
                seed=seed,
            )
            lengths += out.acceptance_lengths
            bar.update(len(ids))
    k = drafter.config.max_draft_tokens if num_draft_tokens is None else num_draft_tokens
    return summarise(lengths, [len(ids) for ids in encoded], k, time.perf_counter() - began)


def _batches(encoded: list[list[int]], size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Left-padded ids and masks, ``[n, S]``."""
    for at in range(0, len(encoded), size):
        part = encoded[at : at + size]
        ids = torch.zeros(len(part), max(map(len, part)), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(part):
            ids[i, -len(prompt) :] = torch.tensor(prompt)
            mask[i, -len(prompt) :] = 1
        yield ids.to(device), mask.to(device)


def summarise(lengths: Sequence[list[int]], prompt_lengths: Sequence[int], k: int, seconds: float) -> Measurement:
    """From the tokens of every round of every prompt.

    Args:
        lengths: per prompt, tokens per round.
        prompt_lengths: tokens of each prompt.
        k: drafts per round.
        seconds: wall clock to report.
    """
    by_context = _by_context(lengths, prompt_lengths)
    lengths = [n for n in lengths if n]
    rounds, tokens = sum(map(len, lengths)), sum(map(sum, lengths))
    flat = [n for per_prompt in lengths for n in per_prompt]
    by_row = [round(sum(n > i + 1 for n in flat) / max(sum(n > i for n in flat), 1), 4) for i in range(k)]
    macro = sum(sum(n) / len(n) for n in lengths) / max(len(lengths), 1)
    micro = tokens / max(rounds, 1)
    return Measurement(
        round(macro, 4), round(micro, 4), rounds, tokens, by_row, by_context, len(lengths), round(seconds, 1)
    )


def _by_context(lengths: Sequence[list[int]], prompt_lengths: Sequence[int]) -> dict[str, dict[str, float]]:
    """Rounds sorted by the context they drafted from: below 128, then a range per doubling."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for prompt, (rounds, context) in enumerate(zip(lengths, prompt_lengths, strict=True)):
        for produced in rounds:
            found[(context // FIRST_BUCKET).bit_length()].append((prompt, produced))
            context += produced
    table = {}
    for level, seen in sorted(found.items()):
        prompts = len({prompt for prompt, _ in seen})
        if prompts >= MIN_PROMPTS:
            low = FIRST_BUCKET * 2 ** (level - 1) if level else 0
            mean = sum(produced for _, produced in seen) / len(seen)
            table[f"{low}-{FIRST_BUCKET * 2**level - 1}"] = {
                "acceptance_length": round(mean, 4),
                "rounds": len(seen),
                "prompts": prompts,
            }
    return table


def _sets(specs: Sequence[str], limit: int) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """``NAME=FILE`` arguments; the first ``limit`` prompts of each file, 0 for all."""
    sets = {}
    for spec in specs:
        name, equals, file = spec.partition("=")
        if not equals:
            raise ConfigError(f"--prompts {spec!r}: expected NAME=FILE.")
        sets[name] = (Path(file), read_prompts([file])[: limit or None])
    return sets


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the prompt sets that the command line names, and write the report."""
    args = _arguments(argv)
    # cuDNN's attention is planned anew for every shape, and here shapes change all the time.
    torch.backends.cuda.enable_cudnn_sdp(False)
    from dflash2.loading import load_pair

    sets = _sets(args.prompts, args.limit)
    target, tokenizer, drafter = load_pair(
        args.target, args.drafter, args.device, args.dtype,
        int8_linears=args.drafter_int8, draft_int8_head=args.draft_int8_head,
    )  # fmt: skip
    dtype = str(drafter.dtype).removeprefix("torch.")
    names = ("max_new_tokens", "batch_size", "num_draft_tokens", "temperature", "seed")
    settings = {name: getattr(args, name) for name in names}
    measured = {}
    for name, (_, prompts) in sets.items():
        m = measured[name] = measure(target, drafter, tokenizer, prompts, **settings)
        line = f"{name}: acceptance length {m.acceptance_length:.3f} over {m.prompts} prompts, {m.seconds:.0f} s"
        print(line, flush=True)
    report = {
        "acceptance_length": {name: m.acceptance_length for name, m in measured.items()},
        "definition": DEFINITION,
        "details": {name: asdict(m) for name, m in measured.items()},
        "prompts": {
            name: {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "count": len(prompts)}
            for name, (file, prompts) in sets.items()
        },
        "settings": {
            **settings,
            "dtype": dtype,
            "drafter_linears": "int8" if has_int8_linears(drafter) else dtype,
            "draft_head": "int8" if args.draft_int8_head else dtype,
            "target_head": dtype,
            "block_size": drafter.config.block_size,
            "turns": "first only",
            "template_sha256": _template(tokenizer),
        },
        "provenance": {
            "target": Path(args.target).name,
            "drafter": Path(args.drafter).name,
            **provenance(drafter.device),
        },
    }
    args.out.write_text(json.dumps(report, indent=2) + "\n")


def _template(tokenizer: Any) -> str | None:
    """Acceptance under another chat template is another number, so the report says which it was."""
    template = getattr(tokenizer, "chat_template", None)
    return None if not template else hashlib.sha256(str(template).encode()).hexdigest()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dflash2.evaluation.acceptance",
        description="Measure a drafter's acceptance length by generating.",
    )
    parser.add_argument("--target", default=EMBEDDED_TARGET, help="folder, hub id or name (default: %(default)s)")
    parser.add_argument("--drafter", default=DEFAULT_DRAFTER, help="the same for the drafter")
    parser.add_argument(
        "--prompts", required=True, nargs="+", metavar="NAME=FILE",
        help='JSONL files of lines like {"turns": ["the prompt"]}, "system" optional',
    )  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, help="JSON report")
    parser.add_argument("--limit", type=int, default=0, help="first so many prompts of each file; 0: all")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-draft-tokens", type=int, help="drafts per round (default: all the block has room for)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafter-int8", action="store_true", help="weight-only int8 for the drafter's own linears")
    parser.add_argument(
        "--draft-int8-head", action="store_true",
        help="pick drafts by an int8 copy of the target's head (the target decides by its own)",
    )  # fmt: skip
    parser.add_argument("--dtype", default="auto", help="auto: bfloat16 on GPUs, else float32")
    parser.add_argument("--device", default="auto")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(run_command("dflash2.evaluation.acceptance", main))
