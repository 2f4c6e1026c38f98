"""The target writes training documents: token shards, each with where it comes from, in runs that can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from dflash2.errors import ConfigError
from dflash2.loading import load_target, pick_device
from dflash2.prompts import load_prompts, read_prompts
from dflash2.provenance import provenance
from dflash2.training.decode import LlamaDecoder, rows_that_fit
from dflash2.training.general_decode import GeneralDecoder
from dflash2.training.llama import why_not
from dflash2.training.requests import Answer, Decoder, Request, make_requests
from dflash2.training.self_prompts import PROMPT_TOKENS, open_turn, stop_ids, write_prompts
from dflash2.training.synth_options import SELF, SynthOptions

__all__ = ["Answer", "Request", "SynthOptions", "answer", "synth", "write_shard"]

#: Rows of the general decoder: its batches end with their longest answer.
GENERAL_ROWS = 64
#: Requests per shard, by kind of device.
SHARD_REQUESTS = {"cuda": 20_000}
SHARD_REQUESTS_ELSEWHERE = 500


def synth(options: SynthOptions) -> list[Path]:
    """Answer prompts, shard by shard. Finished shards of the same run are kept; one that was interrupted is redone.

    Returns:
        The shards that are there now, complete or cut by ``max_seconds``.

    Raises:
        ConfigError: the prompts are none or too long, or the folder holds shards of another run.
        CheckpointError: the target cannot be loaded.
    """
    o, started = options, time.monotonic()
    deadline = started + o.max_seconds if o.max_seconds else float("inf")
    device, dtype = pick_device(o.device, o.dtype)
    model, tokenizer = load_target(o.target, device, dtype)
    stops = stop_ids(model, tokenizer)
    o.out.mkdir(parents=True, exist_ok=True)
    prompts = _prompts(o, model, tokenizer, stops, deadline)
    todo = make_requests(tokenizer, prompts, temperatures=o.temperatures, max_prompt=o.max_prompt, seed=o.seed)
    longest = max(len(r.prompt) for r in todo)
    _check_room(model, longest, o.max_new_tokens)
    size = o.shard or SHARD_REQUESTS.get(device.type, SHARD_REQUESTS_ELSEWHERE)
    run = {**_settings(o, prompts), "requests_per_shard": size}
    parts = [todo[i : i + size] for i in range(0, len(todo), size)]
    paths = [o.out / f"{o.name}{number:04d}.npz" for number in range(len(parts))]
    waiting = [i for i, path in enumerate(paths) if not _finished(path, run)]
    print(f"{len(todo)} requests from {len(prompts)} prompts; {len(waiting)} of {len(parts)} shards to do", flush=True)
    if waiting:
        decoder = _decoder(o, model, longest, o.max_new_tokens, stops)
        with tqdm(total=sum(len(parts[i]) for i in waiting), unit="doc", disable=None if o.progress else True) as bar:
            for i in waiting:
                if time.monotonic() < deadline:
                    _shard(decoder, parts[i], paths[i], {**run, "shard": i}, deadline, bar, device)
    return [path for path in paths if path.exists()]


def answer(decoder: Decoder, todo: Sequence[Request], *, deadline: float = float("inf")) -> Iterator[Answer]:
    """Answers of a decoder as they finish; at ``deadline`` (`time.monotonic`) the rest is dropped."""
    return decoder.answer(todo, deadline=deadline)


def write_shard(path: Path, answers: Sequence[Answer], origin: Mapping[str, Any]) -> None:
    """An ``.npz`` token shard (`dflash2.training.data`) and where it comes from beside it.

    Both appear whole or not at all, the shard last.
    """
    whole = [a.request.prompt + a.tokens for a in answers]
    tokens = np.concatenate([np.array(w) for w in whole])
    arrays: dict[str, Any] = {
        "tokens": tokens.astype(np.uint16 if tokens.max() < 2**16 else np.uint32),
        "lens": np.array([len(w) for w in whole], np.int32),
        "plens": np.array([len(a.request.prompt) for a in answers], np.int32),
        "temps": np.array([a.request.temperature for a in answers], np.float16),
    }
    data, text = path.with_suffix(".part.npz"), path.with_suffix(".part.json")
    try:
        np.savez_compressed(data, **arrays)
        text.write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        path.unlink(missing_ok=True)  # of a run that was cut: never a shard beside what is said of another
        os.replace(text, path.with_suffix(".json"))
        os.replace(data, path)
    finally:  # a disk that is full
        data.unlink(missing_ok=True)
        text.unlink(missing_ok=True)


def _prompts(
    o: SynthOptions, model: Any, tokenizer: Any, stops: tuple[int, ...], deadline: float
) -> list[dict[str, Any]]:
    if o.prompts != (SELF,):
        return [prompt for source in o.prompts for prompt in load_prompts(source, o.count)]
    path = o.out / f"{o.name}-prompts.jsonl"
    run = {"target": o.target, "count": o.count, "seed": o.seed}
    if not _finished(path, run):
        decoder = _decoder(o, model, len(open_turn(tokenizer)), PROMPT_TOKENS, stops)
        write_prompts(decoder, tokenizer, path, o.count, o.seed, run, deadline)
    return read_prompts([path])


def _check_room(model: Any, longest: int, budget: int) -> None:
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if room is not None and longest + budget > room:
        raise ConfigError(
            f"a prompt of {longest} tokens and an answer of up to {budget} exceed the target's {room} positions. "
            f"Lower max_new_tokens, or max_prompt to {max(room - budget, 0)}."
        )


def _decoder(o: SynthOptions, model: Any, longest: int, budget: int, stops: tuple[int, ...]) -> Decoder:
    """The fast one where it can read the model, else Transformers' own generation."""
    if reason := why_not(model):
        print(
            f"{o.target}: {reason}, which the fast decoder does not read. Transformers' generate is used, which is "
            "several times slower.",
            file=sys.stderr,
        )
        return GeneralDecoder(model, rows=o.rows or GENERAL_ROWS, max_new_tokens=budget, eos=stops)
    most = longest + budget
    return LlamaDecoder(
        model,
        rows=o.rows or rows_that_fit(model, most),
        max_tokens=most,
        max_new_tokens=budget,
        eos=stops,
        graphs=model.device.type == "cuda" and o.graphs,
    )


def _settings(o: SynthOptions, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """What makes two runs the same."""
    return {
        "target": o.target,
        "prompts": list(o.prompts),
        "prompts_sha256": hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest(),
        "seed": o.seed,
        "temperatures": {str(t): share for t, share in o.temperatures.items()},
        "max_prompt": o.max_prompt,
        "max_new_tokens": o.max_new_tokens,
    }


def _finished(path: Path, run: Mapping[str, Any]) -> bool:
    """Whether a file of this run is there whole.

    Raises:
        ConfigError: it is there, from another run.
    """
    if not path.exists():
        return False
    text = path.with_suffix(".json")
    made = json.loads(text.read_text(encoding="utf-8")) if text.exists() else {}
    differing = [name for name, value in run.items() if made.get(name) != value]
    if differing:
        raise ConfigError(
            f"{path} is there already, from a run with another {', '.join(differing)}. Choose another folder or name, "
            "or move it away."
        )
    return bool(made["complete"])


def _shard(
    decoder: Decoder, part: list[Request], path: Path, run: Mapping[str, Any], deadline: float, bar: Any,
    device: torch.device,
) -> None:  # fmt: skip
    started, finished, written = time.monotonic(), [], 0
    for done in answer(decoder, part, deadline=deadline):
        finished.append(done)
        written += len(done.tokens)
        bar.set_postfix_str(f"{written / (time.monotonic() - started):,.0f} tok/s", refresh=False)
        bar.update()
    seconds = time.monotonic() - started
    measured = {
        "documents": len(finished),
        "complete": len(finished) == len(part),
        "prompt_tokens": sum(len(a.request.prompt) for a in finished),
        "answer_tokens": written,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(written / seconds),
        "decoder": type(decoder).__name__,
        "rows": decoder.rows,
    }
    if finished:
        write_shard(path, finished, {**run, **measured, **provenance(device)})
    bar.clear()
    print(f"{path}: {len(finished)} documents, {written} answer tokens, {written / seconds:.0f} tok/s", flush=True)
