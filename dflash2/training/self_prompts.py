"""Prompts that the target writes: it continues an open user turn of its chat template (Magpie, arXiv 2406.08464)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash2.errors import ConfigError
from dflash2.training.requests import Answer, Decoder, Request
from dflash2.training.synth_options import SELF

__all__ = ["PROMPT_TOKENS", "open_turn", "stop_ids", "usable", "write_prompts"]

TEMPERATURE = 1.0
#: Budget of the decoder; a longer prompt is cut, and then left out.
PROMPT_TOKENS = 320
#: Of a usable prompt.
LEAST_WORDS, MOST_WORDS = 4, 300
#: Distinct words among all: less is a loop.
LEAST_DISTINCT = 0.3
#: The target is asked so often; each time for what is missing, and half as many more.
ATTEMPTS = 8

_MARK = "DFLASH2-USER-TEXT"


def open_turn(tokenizer: Any) -> list[int]:
    """Token ids of the chat template up to where the user's text begins.

    Raises:
        ConfigError: the tokenizer has no chat template, or one without a user's text.
    """
    return tokenizer(_template(tokenizer)[0], add_special_tokens=False)["input_ids"]


def stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a turn: the target's end-of-sequence ids, and what its template puts behind a user's text.

    Raises:
        ConfigError: there is none.
    """
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = tokenizer.eos_token_id if eos is None else eos
    found = [] if eos is None else list(eos) if isinstance(eos, list | tuple) else [eos]
    if getattr(tokenizer, "chat_template", None):
        behind = tokenizer(_template(tokenizer)[1], add_special_tokens=False)["input_ids"]
        found += [i for i in behind[:1] if i in tokenizer.all_special_ids]
    if not found:
        raise ConfigError("the target names no end-of-sequence id. Set generation_config.eos_token_id in its folder.")
    return tuple(dict.fromkeys(found))


def _template(tokenizer: Any) -> tuple[str, str]:
    """What stands before and behind a user's text."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"prompts={SELF}: the target's tokenizer has no chat template. Give prompts instead.")
    turns = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    before, mark, behind = text.partition(_MARK)
    if not mark:
        raise ConfigError(f"prompts={SELF}: the chat template does not show the user's text. Give prompts instead.")
    return before, behind


def usable(text: str) -> bool:
    """Whether a text is worth asking: neither a fragment, nor endless, nor a loop."""
    words = text.split()
    distinct = len({word.lower() for word in words})
    return LEAST_WORDS <= len(words) <= MOST_WORDS and distinct >= LEAST_DISTINCT * len(words)


def write_prompts(
    decoder: Decoder, tokenizer: Any, path: Path, count: int, seed: int, run: Mapping[str, Any], deadline: float
) -> None:
    """Let the target write prompts into a JSONL file, and how it went into a ``.json`` beside it.

    Args:
        decoder: of the target; its ``eos`` ends a turn (`stop_ids`).
        tokenizer: the target's.
        path: of the file. It appears whole, with fewer prompts where the attempts ran out.
        count: prompts wanted; no two are equal up to case and spaces.
        seed: of the noise.
        run: to keep in the ``.json``.
        deadline: on `time.monotonic`.

    Raises:
        ConfigError: none was usable, or the time ran out.
    """
    found: dict[str, str] = {}
    rng, prefix, tried = np.random.default_rng(seed), open_turn(tokenizer), 0
    for _ in range(ATTEMPTS):
        missing = count - len(found)
        if missing <= 0:
            break
        seeds = rng.integers(-(2**63), 2**63, missing + missing // 2 + 1, dtype=np.int64)
        tried += len(seeds)
        asked = [Request(prefix, TEMPERATURE, int(s)) for s in seeds]
        # By seed, not in the order in which they finish, which favours the short.
        written = sorted(decoder.answer(asked, deadline=deadline), key=lambda a: a.request.seed)
        for text in _texts(written, tokenizer):
            found.setdefault(" ".join(text.lower().split()), text)
    if time.monotonic() >= deadline:
        raise ConfigError(f"prompts={SELF}: the time ran out at {len(found)} of {count} prompts. Raise max_seconds.")
    if not found:
        raise ConfigError(f"prompts={SELF}: none of {tried} texts was usable. Is the target a chat model?")
    lines = [{"id": f"{SELF}/{i}", "domain": SELF, "turns": [t]} for i, t in enumerate([*found.values()][:count])]
    print(f"{path}: {len(lines)} of {count} prompts, from {tried} texts", flush=True)
    facts = {**run, "complete": True, "prompts": len(lines), "texts": tried, "temperature": TEMPERATURE}
    path.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    os.replace(part, path)


def _texts(answers: list[Answer], tokenizer: Any) -> Iterator[str]:
    special = set(tokenizer.all_special_ids)
    for each in answers:
        *body, last = each.tokens
        # A turn that was cut, or that runs into another, is no prompt.
        if last in special and not special.intersection(body):
            text = tokenizer.decode(body).strip()
            if usable(text):
                yield text
