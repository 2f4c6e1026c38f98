"""Let a target answer prompts, and keep what it did as a trace."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from dflash2.decoding import PREFILL_TOKENS
from dflash2.errors import ConfigError
from dflash2.evaluation.trace import Shard, Trace, TraceWriter
from dflash2.lm_head import DenseLMHead, as_lm_head
from dflash2.proposal import Proposal
from dflash2.provenance import provenance
from dflash2.target import TargetRunner, tapped
from dflash2.verification import verify

__all__ = ["Document", "Question", "answer", "record_answers", "record_documents"]

#: Greedy documents are the target's own if it would have said so many of their tokens. In 16 bits a pass over whole
#: documents and one over single rows differ at a percent or two of them; another target's agree at a third.
LEAST_AGREEMENT = 0.9
#: Tokens in a pass over whole documents.
PASS_TOKENS = {"cpu": 2048, "cuda": 16384}
#: Rows of logits in memory at a time.
LOGITS_ROWS = 256


@dataclass(frozen=True)
class Question:
    """A prompt's token ids, and where it is from."""

    tokens: list[int]
    dataset: str = ""
    domain: str = ""
    id: str = ""


@dataclass(frozen=True)
class Document:
    """A question and the target's answer.

    Attributes:
        question: the prompt.
        answer: token ids; ends with a stop id, or where the budget did.
        temperature: the answer was sampled at; 0 is greedy.
    """

    question: Question
    answer: list[int]
    temperature: float

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return self.question.tokens + self.answer


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
        shard, agreement = _observe(target, head, made, layers)
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


@torch.no_grad()
def answer(
    target: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    temperature: float,
    stops: Sequence[int],
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Decode a batch without drafts, one row per pass, as plain decoding does.

    Args:
        target: a Transformers causal LM.
        prompts: token ids.
        max_new_tokens, temperature, stops, generator: as in `record_answers`.

    Returns:
        The answer of each, its stop id included.
    """
    device, longest = target.device, max(map(len, prompts))
    padding = [longest - len(p) for p in prompts]
    last = [len(p) + max_new_tokens - 2 for p in prompts]
    runner = TargetRunner(target, (), padding, last, device)
    tokens = torch.tensor([[0] * n + p for n, p in zip(padding, prompts, strict=True)], device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    for part in tokens.split(PREFILL_TOKENS, 1):
        logits, _ = runner.run(part, last_only=True)
    while live:
        none = torch.zeros(len(live), 0, dtype=torch.int64, device=device)
        valid = torch.ones(len(live), dtype=torch.bool, device=device)
        drawn = verify(Proposal(none, None, None, valid), logits[:, -1:], temperature, generator=generator).next_token
        for i, token in zip(live, drawn.tolist(), strict=True):
            answers[i].append(token)
        going = [n for n, i in enumerate(live) if answers[i][-1] not in stops and len(answers[i]) < max_new_tokens]
        if going and len(going) < len(live):
            runner.keep(going, [0] * len(going))
        live = [live[n] for n in going]
        if live:
            logits, _ = runner.run(drawn[going, None])
    return answers


@torch.no_grad()
def _observe(target: Any, head: DenseLMHead, documents: list[Document], layers: Sequence[int]) -> tuple[Shard, float]:
    """Run whole documents through the target; also how many of the greedy tokens it would have said, 1.0 if none."""
    budget, groups = PASS_TOKENS.get(target.device.type, PASS_TOKENS["cpu"]), list[list[Document]]()
    for d in documents:
        if not groups or (len(groups[-1]) + 1) * max(len(x.tokens) for x in [*groups[-1], d]) > budget:
            groups.append([])
        groups[-1].append(d)
    passes = [_pass(target, [d.tokens for d in group], layers) for group in groups]
    taps, states = (torch.cat(column) for column in zip(*passes, strict=True))
    heat = torch.tensor([d.temperature for d in documents], dtype=torch.float32)
    shard = Shard(
        tokens=torch.tensor([t for d in documents for t in d.tokens]),
        lengths=torch.tensor([len(d.tokens) for d in documents]),
        prompt_lengths=torch.tensor([len(d.question.tokens) for d in documents]),
        temperatures=heat,
        taps=taps,
        states=states if bool((heat > 0).any()) else None,
        about=[{"dataset": d.question.dataset, "domain": d.question.domain, "id": d.question.id} for d in documents],
    )
    if shard.states is not None:
        _check_head(target, head, documents[0].tokens, states[len(documents[0].tokens) - 1])
    return shard, _agreement(head, shard, states)


def _pass(target: Any, texts: Sequence[list[int]], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Taps ``[N, T*H]`` and final states ``[N, H]`` of N tokens, on the CPU."""
    ids = pad_sequence([torch.tensor(t) for t in texts], batch_first=True).to(target.device)
    real = torch.arange(ids.shape[1]) < torch.tensor([[len(t)] for t in texts])
    with tapped(target, layers) as taps:
        mask = real.to(target.device, torch.int64)
        out = target.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)
    joined = torch.cat([taps[i].cpu() for i in layers], -1)
    return joined[real], out.last_hidden_state.cpu()[real]


def _check_head(target: Any, head: DenseLMHead, tokens: list[int], state: Tensor) -> None:
    """Probabilities come from state and head, so the target must do nothing more with its logits."""
    whole = target(input_ids=torch.tensor([tokens], device=target.device)).logits[0, -1].float()
    ours = head.logits(state[None].to(head.weight.device), len(head.weight))[0].float()
    step = 4 * torch.finfo(head.weight.dtype).eps * whole.abs().max() + 1e-4 * whole.abs().max()
    if bool((whole - ours).abs().max() > step):
        raise ConfigError(
            f"{type(target).__name__} changes its logits after the head (a softcap or a scale), which replay at a "
            "temperature does not know. Trace greedily."
        )


def _agreement(head: DenseLMHead, shard: Shard, states: Tensor) -> float:
    """Share of greedy answer tokens that are the target's argmax in this pass."""
    spans = zip(shard.starts.tolist(), shard.lengths.tolist(), shard.prompt_lengths.tolist(), strict=True)
    greedy = [h <= 0 for h in shard.temperatures.tolist()]
    rows = [torch.arange(s + p - 1, s + n - 1) for (s, n, p), cold in zip(spans, greedy, strict=True) if cold]
    index = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
    if not len(index):
        return 1.0
    same = 0
    for part in index.split(LOGITS_ROWS):
        best = head.logits(states[part].to(head.weight.device), len(head.weight)).argmax(-1).cpu()
        same += int((best == shard.tokens[part + 1]).sum())
    if same < LEAST_AGREEMENT * len(index):
        raise ConfigError(
            f"the target says {same} of the {len(index)} greedy tokens of these documents: another target wrote them. "
            "Trace with the one that did."
        )
    return same / len(index)
