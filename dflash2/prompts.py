"""Prompts: from files, and into a target's chat template."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash2.errors import ConfigError

__all__ = ["prompt_ids", "read_prompts"]


def read_prompts(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """JSON lines (``.jsonl`` or ``.jsonl.gz``) with ``turns``, of which the first is used, and optionally ``system``.

    Raises:
        ConfigError: a file cannot be read, holds no prompt, or a line is no such object.
    """
    prompts: list[dict[str, Any]] = []
    for path in paths:
        before = len(prompts)
        opener = gzip.open if str(path).endswith(".gz") else open
        try:
            with opener(path, "rt", encoding="utf-8") as lines:
                prompts += [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError) as e:
            raise ConfigError(f"prompts: {path} cannot be read as JSON lines ({e}).") from e
        bad = [i + 1 for i, p in enumerate(prompts[before:]) if not isinstance(p, dict) or not p.get("turns")]
        if bad or len(prompts) == before:
            where = f"line {bad[0]} has no turns" if bad else "there is no line"
            raise ConfigError(f"prompts: {path}: {where}. Expected lines like {{'id': .., 'turns': ['..']}}.")
    return prompts


def prompt_ids(tokenizer: Any, text: str, system: str | None = None, raw: bool = False) -> list[int]:
    """Token ids of a user's turn in the chat template, up to where the answer begins; or of the bare text.

    Args:
        tokenizer: the target's.
        text: the user's turn.
        system: system turn; the template's own default if None.
        raw: no template, as for base models and completions. Also where the tokenizer has no template.

    Raises:
        ConfigError: the prompt has no tokens.
    """
    if raw or not getattr(tokenizer, "chat_template", None):
        ids = tokenizer(text)["input_ids"]
    else:
        turns = [{"role": "system", "content": system}] if system else []
        turns.append({"role": "user", "content": text})
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    if not ids:
        raise ConfigError("the prompt has no tokens. Write something.")
    return ids
