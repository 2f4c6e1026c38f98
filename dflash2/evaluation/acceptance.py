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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dflash2
from dflash2.errors import ConfigError

__all__ = ["Measurement", "main", "measure", "prompt_ids"]


@dataclass(frozen=True)
class Measurement:
    """What generating for one set of prompts showed.

    Attributes:
        acceptance_length: mean over prompts of each prompt's tokens per round.
        acceptance_length_micro: all tokens by all rounds.
        rounds, tokens: sums; tokens are those of verify rounds.
        accepted_by_row: share of the rounds that reached draft i and kept it.
        prompts: how many had at least one round.
        seconds: wall clock, everything included.
    """

    acceptance_length: float
    acceptance_length_micro: float
    rounds: int
    tokens: int
    accepted_by_row: list[float]
    prompts: int
    seconds: float


def prompt_ids(tokenizer: Any, prompt: dict[str, Any]) -> list[int]:
    """The first turn, and the system message if there is one, in the chat template up to where the answer begins."""
    messages = [{"role": "user", "content": prompt["turns"][0]}]
    if prompt.get("system"):
        messages.insert(0, {"role": "system", "content": prompt["system"]})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


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
        tokenizer: the target's, with a chat template.
        prompts: dictionaries with ``turns`` and optionally ``system``.
        max_new_tokens: budget of each answer.
        batch_size: prompts at a time; prompts of similar length go together.
        num_draft_tokens: k; the drafter's most by default.
        temperature: of the target's distribution; 0 is greedy.
        seed: of sampling.
    """
    began = time.perf_counter()
    encoded = sorted((prompt_ids(tokenizer, p) for p in prompts), key=len)
    lengths: list[list[int]] = []
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
    k = drafter.config.max_draft_tokens if num_draft_tokens is None else num_draft_tokens
    return _summary(lengths, k, time.perf_counter() - began)


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


def _summary(lengths: list[list[int]], k: int, seconds: float) -> Measurement:
    lengths = [n for n in lengths if n]
    rounds, tokens = sum(map(len, lengths)), sum(map(sum, lengths))
    flat = [n for per_prompt in lengths for n in per_prompt]
    by_row = [sum(n > i + 1 for n in flat) / max(sum(n > i for n in flat), 1) for i in range(k)]
    macro = sum(sum(n) / len(n) for n in lengths) / max(len(lengths), 1)
    rates = [round(r, 4) for r in by_row]
    return Measurement(
        round(macro, 4), round(tokens / max(rounds, 1), 4), rounds, tokens, rates, len(lengths), round(seconds, 1)
    )


def read_sets(specs: Sequence[str], limit: int) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """``NAME=FILE`` of JSON lines with ``turns``; the first ``limit`` prompts of each, 0 for all."""
    sets = {}
    for spec in specs:
        name, equals, file = spec.partition("=")
        if not equals:
            raise ConfigError(f"--prompts {spec!r}: expected NAME=FILE.")
        lines = [json.loads(line) for line in Path(file).read_text().splitlines() if line.strip()]
        if not lines or not all(p.get("turns") for p in lines):
            raise ConfigError(f"{file}: expected one JSON object with 'turns' per line.")
        sets[name] = (Path(file), lines[: limit or None])
    return sets


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the prompt sets that the command line names, and write the report."""
    args = _arguments(argv)
    # cuDNN's attention is planned anew for every shape, and here shapes change all the time.
    torch.backends.cuda.enable_cudnn_sdp(False)
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

    sets = read_sets(args.prompts, args.limit)
    folder = dflash2.resolve_target(args.target)
    dtype = getattr(torch, args.dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device).eval()
    drafter = dflash2.DFlash2Drafter.from_pretrained(args.drafter, dtype=dtype, device=args.device)
    settings = {
        k: getattr(args, k) for k in ("max_new_tokens", "batch_size", "num_draft_tokens", "temperature", "seed")
    }
    measured = {}
    for name, (_, prompts) in sets.items():
        measured[name] = measure(target, drafter, tokenizer, prompts, **settings)
        m = measured[name]
        print(
            f"{name}: acceptance length {m.acceptance_length:.3f} over {m.prompts} prompts, {m.seconds:.0f} s",
            flush=True,
        )
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    report = {
        "acceptance_length": {name: m.acceptance_length for name, m in measured.items()},
        "details": {name: asdict(m) for name, m in measured.items()},
        "prompts": {
            name: {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "count": len(prompts)}
            for name, (file, prompts) in sets.items()
        },
        "settings": settings | {"dtype": args.dtype, "block_size": drafter.config.block_size, "turns": "first only"},
        "definition": "tokens of verify rounds (bonus included) / rounds; per prompt, then the mean over prompts",
        "provenance": {
            "target": Path(args.target).name,
            "drafter": Path(args.drafter).name,
            "device": device,
            "torch": torch.__version__,
            "transformers": __version__,
            "dflash2": dflash2.__version__,
        },
    }
    args.out.write_text(json.dumps(report, indent=2) + "\n")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure a drafter's acceptance length by generating.")
    parser.add_argument("--target", required=True, help="Transformers folder, hub id, or smollm2-135m")
    parser.add_argument("--drafter", required=True, help="folder of the drafter")
    parser.add_argument("--prompts", required=True, nargs="+", metavar="NAME=FILE", help="JSONL files with turns")
    parser.add_argument("--out", required=True, type=Path, help="JSON report")
    parser.add_argument("--limit", type=int, default=0, help="first so many prompts of each file; 0: all")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-draft-tokens", type=int, default=None)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
