"""A target's pass over whole documents: taps of its layers, and whether the documents are its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash2.errors import ConfigError
from dflash2.evaluation.trace import Shard
from dflash2.lm_head import DenseLMHead
from dflash2.target import tapped

__all__ = ["Document", "Question", "observe"]

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


@torch.no_grad()
def observe(target: Any, head: DenseLMHead, documents: list[Document], layers: Sequence[int]) -> tuple[Shard, float]:
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
