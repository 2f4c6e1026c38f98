"""Where the documents of a trace come from: prompts to be answered, or token shards written before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash2.errors import ConfigError
from dflash2.evaluation.definition import template_sha256
from dflash2.evaluation.record import Document, Question, record_answers, record_documents
from dflash2.evaluation.trace import Trace
from dflash2.prompts import all_prompt_ids, load_prompts
from dflash2.training.data import load_shards

__all__ = ["load_sets", "trace_prompts", "trace_shards"]

Sets = dict[str, list[dict[str, Any]]]


def load_sets(sources: Sequence[str], limit: int = 0) -> tuple[Sets, dict[str, dict[str, Any]]]:
    """Prompts by name of their set, and of each set its source, its size and what identifies it.

    Args:
        sources: for `load_prompts`, each as it is or as ``NAME=SOURCE``.
        limit: the first so many of each; 0 is all.

    Raises:
        ConfigError: a source cannot be read, or two sets have one name.
    """
    sets: Sets = {}
    about: dict[str, dict[str, Any]] = {}
    for given in sources:
        name, equals, source = given.partition("=")
        if not equals:
            source, name = given, Path(given).name.removesuffix(".gz").removesuffix(".jsonl")
        if name in sets:
            raise ConfigError(f"--prompts: two sets are called {name}. Tell them apart with NAME=SOURCE.")
        sets[name] = load_prompts(source, limit)
        digest = hashlib.sha256(json.dumps(sets[name], sort_keys=True).encode()).hexdigest()
        about[name] = {"source": Path(source).name, "count": len(sets[name]), "sha256": digest}
    return sets, about


def trace_prompts(
    target: Any, tokenizer: Any, name: str, folder: Path, layers: Sequence[int], settings: dict[str, Any]
) -> Trace:
    """Let a target answer sets of prompts, the first turn of each.

    Args:
        target, tokenizer: from `load_target`.
        name: of the target.
        folder: of the trace.
        layers: decoder layers to record.
        settings: ``prompts``, ``limit``, ``max_new_tokens``, ``temperature``, ``seed``, ``batch_size``.
    """
    sets, about = load_sets(settings["prompts"], settings["limit"])
    questions = [
        Question(ids, source, p.get("domain") or "", str(p.get("id", i)))
        for source, prompts in sets.items()
        for i, (ids, p) in enumerate(zip(all_prompt_ids(tokenizer, prompts), prompts, strict=True))
    ]
    return record_answers(
        target, name, questions, folder, layer_ids=layers, max_new_tokens=settings["max_new_tokens"],
        temperature=settings["temperature"], stops=stop_ids(target), seed=settings["seed"],
        batch_size=settings["batch_size"],
        about={"prompts": about, "turns": "first only", "template_sha256": template_sha256(tokenizer)},
    )  # fmt: skip


def trace_shards(
    target: Any, name: str, files: Sequence[str], folder: Path, layers: Sequence[int], limit: int, batch_size: int
) -> Trace:
    """Record token shards, the first ``limit`` documents of each file (0: all)."""
    documents: list[Document] = []
    budget = 0
    for file in files:
        read, origin = load_shards([file]), Path(file).with_suffix(".json")
        known = json.loads(origin.read_text(encoding="utf-8")).get("max_new_tokens", 0) if origin.exists() else 0
        budget = max(budget, known, int((read.lens - read.plens).max(initial=0)))
        for i in range(min(limit or len(read), len(read))):
            tokens, cut = read.document(i).tolist(), int(read.plens[i])
            question = Question(tokens[:cut], Path(file).stem, id=str(i))
            documents.append(Document(question, tokens[cut:], round(float(read.temps[i]), 3)))
    about = {"token_shards": [Path(f).name for f in files]}
    return record_documents(
        target, name, documents, folder, layer_ids=layers, max_new_tokens=budget, batch_size=batch_size, about=about
    )


def stop_ids(target: Any) -> list[int]:
    """What ends an answer, by the target's generation config."""
    found = getattr(getattr(target, "generation_config", None), "eos_token_id", None)
    return [] if found is None else [int(i) for i in (found if isinstance(found, list | tuple) else [found])]
