"""The target writes training documents: ``python -m dflash2.training.synth --target T --prompts P --out FOLDER``."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash2.command import run_command
from dflash2.loading import load_target
from dflash2.prompts import prompt_ids, read_prompts
from dflash2.provenance import provenance
from dflash2.training.decode import LlamaDecoder

__all__ = ["Request", "Answer", "answer", "main", "requests", "write_shard"]

#: Decode steps between two looks at which rows have ended: each look waits for the device.
STRIDE = 16


@dataclass(frozen=True)
class Request:
    """A prompt to answer: token ids and a temperature."""

    prompt: list[int]
    temperature: float


@dataclass(frozen=True)
class Answer:
    """A finished request; ``tokens`` ends with the end-of-turn id unless the budget cut it."""

    request: Request
    tokens: list[int]


def requests(
    tokenizer: Any, prompts: Sequence[dict[str, Any]], *, temperatures: dict[float, float], max_prompt: int, seed: int
) -> list[Request]:
    """Each prompt once, at a temperature drawn with the given shares. Prompts that are too long are left out.

    Args:
        tokenizer: the target's.
        prompts: from `read_prompts`.
        temperatures: share of each.
        max_prompt: tokens.
        seed: of the order and the temperatures.
    """
    rng = np.random.default_rng(seed)
    values, shares = list(temperatures), np.array(list(temperatures.values()), float)
    drawn = rng.choice(len(values), len(prompts), p=shares / shares.sum())
    order = rng.permutation(len(prompts))
    made = (
        Request(prompt_ids(tokenizer, prompts[i]["turns"][0], prompts[i].get("system")), values[drawn[i]])
        for i in order
    )
    return [r for r in made if len(r.prompt) <= max_prompt]


def answer(decoder: LlamaDecoder, todo: Sequence[Request], *, deadline: float = float("inf")) -> Iterator[Answer]:
    """Answer requests, refilling rows as they end. Answers come in the order in which they finish.

    Short prompts come first, so that the rows in flight have similar lengths and the cache that is read stays short.

    Args:
        decoder: its rows are all used.
        todo: the requests.
        deadline: on `time.monotonic`; then what is in flight is dropped.
    """
    queue = sorted(todo, key=lambda r: len(r.prompt), reverse=True)
    rows, budget = decoder.done.shape[0], decoder.answers.shape[1]
    running: dict[int, Request] = {}
    while (queue or running) and time.monotonic() < deadline:
        free = [i for i in range(rows) if i not in running]
        # A prefill interrupts everybody, so it waits until it pays.
        if queue and (len(free) >= max(rows // 8, 1) or not running):
            taken = [queue.pop() for _ in range(min(len(free), len(queue)))]
            slots = free[: len(taken)]
            running.update(zip(slots, taken, strict=True))
            heat = torch.tensor([r.temperature for r in taken], dtype=torch.float32)
            decoder.start(torch.tensor(slots), [r.prompt for r in taken], heat)
        longest = max(len(r.prompt) for r in running.values()) + budget
        decoder.steps(STRIDE, min(longest, int(decoder.lengths.max()) + STRIDE + 1))
        ended = [i for i, d in enumerate(decoder.done.tolist()) if d and i in running]
        if ended:
            index = torch.tensor(ended, device=decoder.done.device)
            texts, counts = decoder.answers[index].tolist(), decoder.written[index].tolist()
            for slot, text, count in zip(ended, texts, counts, strict=True):
                yield Answer(running.pop(slot), text[:count])


def write_shard(path: Path, answers: Sequence[Answer], origin: dict[str, Any]) -> None:
    """An ``.npz`` token shard (`dflash2.training.data`) and where it comes from beside it; both appear whole."""
    whole = [a.request.prompt + a.tokens for a in answers]
    tokens = np.concatenate([np.array(w) for w in whole])
    arrays: dict[str, Any] = {
        "tokens": tokens.astype(np.uint16 if tokens.max() < 2**16 else np.uint32),
        "lens": np.array([len(w) for w in whole], np.int32),
        "plens": np.array([len(a.request.prompt) for a in answers], np.int32),
        "temps": np.array([a.request.temperature for a in answers], np.float16),
    }
    temporary = path.with_suffix(".part.npz")
    np.savez_compressed(temporary, **arrays)
    path.with_suffix(".json").write_text(json.dumps(origin, indent=2) + "\n")
    os.replace(temporary, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Answer the prompts that the command line names, shard by shard."""
    args = _arguments(argv)
    # cuDNN's attention is planned anew for every shape, and here shapes change all the time.
    torch.backends.cuda.enable_cudnn_sdp(False)
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model, tokenizer = load_target(args.target, torch.device(args.device), dtype)
    todo = requests(
        tokenizer,
        read_prompts(args.prompts),
        temperatures=args.temperatures,
        max_prompt=args.max_prompt,
        seed=args.seed,
    )
    eos = model.generation_config.eos_token_id
    decoder = LlamaDecoder(
        model,
        rows=args.rows or (1536 if args.device.startswith("cuda") else 32),
        max_tokens=args.max_prompt + args.max_new_tokens,
        max_new_tokens=args.max_new_tokens,
        eos=tuple(eos) if isinstance(eos, list) else (eos,),
        graphs=args.device.startswith("cuda") and not args.no_graphs,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    deadline = started + args.max_seconds if args.max_seconds else float("inf")
    shards = [todo[i : i + args.shard] for i in range(0, len(todo), args.shard)]
    for number, part in enumerate(shards):
        path = args.out / f"{args.name}{number:04d}.npz"
        if path.exists():
            continue
        if time.monotonic() >= deadline:
            break
        _shard(decoder, part, path, args, number, deadline)


def _shard(
    decoder: LlamaDecoder, part: list[Request], path: Path, args: argparse.Namespace, number: int, deadline: float
) -> None:
    torch.manual_seed(args.seed * 100_003 + number)  # a shard written after a restart is the same shard
    started, finished, written = time.monotonic(), [], 0
    for done in answer(decoder, part, deadline=deadline):
        finished.append(done)
        written += len(done.tokens)
    seconds = time.monotonic() - started
    origin = {
        "target": str(args.target),
        "prompts": {p: hashlib.sha256(Path(p).read_bytes()).hexdigest() for p in args.prompts},
        "seed": args.seed,
        "shard": number,
        "temperatures": {str(t): s for t, s in args.temperatures.items()},
        "max_new_tokens": args.max_new_tokens,
        "documents": len(finished),
        "complete": len(finished) == len(part),
        "answer_tokens": written,
        "tokens_per_second": round(written / seconds),
        **provenance(decoder.done.device),
    }
    if finished:
        write_shard(path, finished, origin)
    print(f"{path}: {len(finished)} documents, {written} answer tokens, {written / seconds:.0f} tok/s", flush=True)


def _shares(text: str) -> dict[float, float]:
    pairs = [item.split(":") for item in text.split(",")]
    return {float(t): float(s) for t, s in pairs}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dflash2.training.synth",
        description="Let the target, one of Llama's architecture, answer chat prompts, and keep the tokens as shards "
        "for dflash2.training.train.",
    )
    parser.add_argument("--target", required=True, help="folder, hub id or name of the target")
    parser.add_argument(
        "--prompts",
        required=True,
        nargs="+",
        help='JSONL files, gzipped or not, of lines like {"turns": ["the prompt"]}, "system" optional',
    )
    parser.add_argument("--out", required=True, type=Path, help="folder for the shards; finished ones are kept")
    parser.add_argument("--name", default="synth", help="first part of the shards' names (default: %(default)s)")
    parser.add_argument(
        "--rows",
        type=int,
        help="requests in flight; costs memory and time even if idle (default: 1536 on a GPU, 32 on a CPU)",
    )
    parser.add_argument("--shard", type=int, default=10000, help="requests per shard (default: %(default)s)")
    parser.add_argument(
        "--max-prompt", type=int, default=1024, help="longer prompts are left out (tokens) (default: %(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=400, help="longest answer, in tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--temperatures", type=_shares, default="0:0.6,0.7:0.25,1:0.15", help="T:share,... (default: %(default)s)"
    )
    parser.add_argument(
        "--max-seconds", type=float, default=0, help="stop then and write what is finished; 0: no limit"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of the order (default: %(default)s)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda ... (default: %(default)s)"
    )
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel from Python")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(run_command("dflash2.training.synth", main))
