"""Let a target answer prompts, and keep what it did as a trace."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash2.decoding import DecodingLoop, StopIds
from dflash2.errors import ConfigError
from dflash2.evaluation.observe import Document, Question, observe
from dflash2.evaluation.trace import Trace, TraceWriter
from dflash2.lm_head import DenseLMHead, as_lm_head
from dflash2.provenance import provenance

__all__ = ["Document", "Question", "answer", "record_answers", "record_documents"]


def record_answers(
    target: Any,
    name: str,
    questions: Sequence[Question],
    folder: Path,
    *,
    layer_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    stops: Iterable[int] = (),
    seed: int = 0,
    batch_size: int = 32,
    about: dict[str, Any] | None = None,
) -> Trace:
    """Decode an answer to every question, one token at a time, and record it.

    Args:
        target: a Transformers causal LM.
        name: what to call it.
        questions: prompts; those of similar length are answered together.
        folder: of the trace. One that was interrupted goes on.
        layer_ids: decoder layers to tap.
        max_new_tokens: budget of each answer.
        temperature: of the target's distribution; 0 is greedy.
        stops: ids that end an answer, kept in it.
        seed: of sampling.
        batch_size: documents per shard, decoded together.
        about: more of what makes this trace this one, like where the prompts are from.

    Raises:
        ConfigError: another trace lies in the folder, or the target cannot be traced.
    """
    ordered = sorted(questions, key=lambda q: len(q.tokens))
    parts = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    ends = sorted(set(stops))

    def documents(number: int) -> list[Document]:
        generator = torch.Generator(target.device).manual_seed(seed * 100_003 + number)
        prompts = [q.tokens for q in parts[number]]
        answers = answer(target, prompts, max_new_tokens, temperature, ends, generator)
        return [Document(q, a, temperature) for q, a in zip(parts[number], answers, strict=True)]

    asked = hashlib.sha256(repr([q.tokens for q in ordered]).encode()).hexdigest()[:16]
    settings = {"temperature": temperature, "seed": seed if temperature > 0 else None, "stops": ends}
    more = {"decoding": settings, "prompt_tokens_sha256": asked, **(about or {})}
    return _record(target, name, folder, layer_ids, max_new_tokens, len(parts), documents, more)


def record_documents(
    target: Any,
    name: str,
    documents: Sequence[Document],
    folder: Path,
    *,
    layer_ids: Sequence[int],
    max_new_tokens: int | None = None,
    batch_size: int = 32,
    about: dict[str, Any] | None = None,
) -> Trace:
    """Record what the target wrote before.

    Args:
        target, name, folder, layer_ids, batch_size, about: see `record_answers`.
        documents: prompts with the target's answers, at whatever temperature each.
        max_new_tokens: the budget that they were written with; by default their longest answer.

    Raises:
        ConfigError: the greedy ones are not what this target says; or as `record_answers`.
    """
    ordered = sorted(documents, key=lambda d: len(d.tokens))
    parts = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    budget = max_new_tokens or max((len(d.answer) for d in documents), default=0)
    read = hashlib.sha256(repr([(d.tokens, d.temperature) for d in ordered]).encode()).hexdigest()[:16]
    more = {"documents_sha256": read, **(about or {})}
    return _record(target, name, folder, layer_ids, budget, len(parts), parts.__getitem__, more)


def _record(
    target: Any, name: str, folder: Path, layer_ids: Sequence[int], max_new_tokens: int, shards: int,
    documents: Callable[[int], list[Document]], more: dict[str, Any],
) -> Trace:  # fmt: skip
    """Make and store what is missing of a trace."""
    if not shards:
        raise ConfigError("there is nothing to trace: no prompt, no document.")
    config, embedding, head = target.config.get_text_config(), target.get_input_embeddings().weight, _head(target)
    layers = sorted(set(layer_ids))
    if not layers or layers[0] < 0 or layers[-1] >= config.num_hidden_layers:
        raise ConfigError(f"layers {layers}: {name} has layers 0 to {config.num_hidden_layers - 1}. Name some of them.")
    sizes = {"hidden_size": config.hidden_size, "num_layers": config.num_hidden_layers, "vocab_size": len(head.weight)}
    about = {
        "target": {"name": name, **sizes},
        "layer_ids": layers,
        "max_new_tokens": max_new_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "shards": shards,
        **more,
    }
    writer = TraceWriter(folder, about, provenance(target.device))
    writer.write_tables(embedding, head.weight, head.bias)
    for number in tqdm(writer.missing, initial=shards - len(writer.missing), total=shards, unit="shard", disable=None):
        made = documents(number)
        shard, agreement = observe(target, head, made, layers)
        writer.write(number, shard, {"agreement": agreement})
    return Trace(folder)


def _head(target: Any) -> DenseLMHead:
    head = target.get_output_embeddings()
    reader = None if head is None else as_lm_head(head)
    if not isinstance(reader, DenseLMHead):
        raise ConfigError(
            f"{type(target).__name__}'s head is {type(head).__name__}: a trace stores the weight of a linear head of "
            "16 or 32 bits. Load the target unquantised."
        )
    return reader


def answer(
    target: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    temperature: float,
    stops: Sequence[int],
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Decode a batch without drafts, one row per pass.

    Args:
        target: a Transformers causal LM.
        prompts: token ids.
        max_new_tokens, temperature, stops, generator: as in `record_answers`.

    Returns:
        The answer of each, its stop id included.
    """
    lengths = [len(p) for p in prompts]
    aligned = [[0] * (max(lengths) - len(p)) + p for p in prompts]
    nobody: Any = None  # without drafts the loop has nothing to ask of a drafter
    loop = DecodingLoop(
        target, nobody, StopIds(set(stops)), max_new_tokens, (temperature, 1.0, 0), 0, generators=(None, generator)
    )
    with torch.inference_mode():
        return [r.produced for r in loop.run(torch.tensor(aligned, device=target.device), lengths)]
