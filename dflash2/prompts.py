"""Prompts: from files, by name, and into a target's chat template."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash2.errors import ConfigError

__all__ = ["BUILTIN", "all_prompt_ids", "load_prompts", "prompt_ids", "read_prompts"]

#: The source that needs neither files nor a network.
BUILTIN = "builtin"


def load_prompts(source: str | Path, limit: int = 0) -> list[dict[str, Any]]:
    """Prompts by name or from a file.

    Args:
        source: ``builtin`` (some fifty prompts that ship with the package, in several domains); a set's name, like
            ``gsm8k`` or ``gsm8k:train`` (`dflash2.prompt_sets`); ``hub:owner/name[:split[:column]]`` for any other data
            set that ``datasets`` can load; or a ``.jsonl`` or ``.jsonl.gz`` file (`read_prompts`).
        limit: the first so many; 0 is all.

    Returns:
        Dictionaries with ``turns`` (the user's turns, at least one) and, where known, ``system``, ``domain``, ``id``.

    Raises:
        ConfigError: there is no such source, it cannot be read or reached, or it holds something else than prompts.
    """
    if limit < 0:
        raise ConfigError(f"prompts: limit={limit}. Expected at least 1, or 0 for all.")
    if str(source) == BUILTIN:
        return _some(read_prompts([Path(__file__).with_name("builtin_prompts.jsonl")]), limit)
    from dflash2.prompt_sets import is_named, load_named, nearest

    if isinstance(source, str) and is_named(source):
        return load_named(source, limit)
    if isinstance(source, str) and not Path(source).exists():
        raise ConfigError(
            f"prompts: {source!r} is no file and no known set. {nearest(source)} Other data sets are "
            "hub:owner/name[:split[:column]]."
        )
    return _some(read_prompts([source]), limit)


def _some(prompts: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    return prompts[:limit] if limit else prompts


def read_prompts(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """JSON lines (``.jsonl`` or ``.jsonl.gz``) with ``turns`` and optionally ``system``, ``domain`` and ``id``.

    Raises:
        ConfigError: a file cannot be read, holds no prompt, or a line is no such object.
    """
    return [prompt for path in paths for prompt in _read(path)]


def _read(path: str | Path) -> list[dict[str, Any]]:
    opener = gzip.open if str(path).endswith(".gz") else open
    prompts = []
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    prompts.append(_prompt(line, f"{path}: line {number}"))
    except (OSError, EOFError, UnicodeDecodeError) as e:
        raise ConfigError(f"prompts: {path} cannot be read as JSON lines ({e}).") from e
    if not prompts:
        raise ConfigError(f"prompts: {path}: there is no line. Expected lines like {{'id': .., 'turns': ['..']}}.")
    return prompts


def _prompt(line: str, where: str) -> dict[str, Any]:
    expected = "Expected a JSON object like {'id': .., 'turns': ['..']}."
    try:
        prompt = json.loads(line)
    except ValueError as e:
        raise ConfigError(f"prompts: {where} cannot be read as JSON ({e}). {expected}") from e
    turns = prompt.get("turns") if isinstance(prompt, dict) else None
    if not turns:
        raise ConfigError(f"prompts: {where} has no turns. {expected}")
    if not isinstance(turns, list) or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ConfigError(f"prompts: {where} has turns={turns!r}, which is no list of texts. {expected}")
    return prompt


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
    return all_prompt_ids(tokenizer, [{"turns": [text], "system": system}], raw)[0]


def all_prompt_ids(tokenizer: Any, prompts: Sequence[dict[str, Any]], raw: bool = False) -> list[list[int]]:
    """`prompt_ids` of the first turn of many prompts at once: fast tokenizers use all cores.

    Args:
        tokenizer: the target's.
        prompts: from `load_prompts`.
        raw: no template.

    Raises:
        ConfigError: a prompt has no tokens.
    """
    if not prompts:
        return []
    if raw or not getattr(tokenizer, "chat_template", None):
        found = tokenizer([p["turns"][0] for p in prompts])["input_ids"]
    else:
        talks = [
            ([{"role": "system", "content": p["system"]}] if p.get("system") else [])
            + [{"role": "user", "content": p["turns"][0]}]
            for p in prompts
        ]
        found = tokenizer.apply_chat_template(talks, add_generation_prompt=True, return_dict=True)["input_ids"]
    if not all(found):
        raise ConfigError("the prompt has no tokens. Write something.")
    return [list(ids) for ids in found]
