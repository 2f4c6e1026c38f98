"""Answers of any causal LM, by Transformers' own ``generate``: every architecture, several times slower."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dflash2.ops.gumbel_sample import exponential_noise
from dflash2.training.requests import Answer, Request

__all__ = ["GeneralDecoder"]


class GeneralDecoder:
    """Batches of prompts of similar length, padded on the left. A batch ends with its longest answer.

    Args:
        model: a Transformers causal LM. What its own settings say about generation is not used.
        rows: requests in a batch.
        max_new_tokens: longest answer.
        eos: ids that end an answer.
    """

    def __init__(self, model: Any, *, rows: int, max_new_tokens: int, eos: tuple[int, ...]):
        self.model, self.rows, self.budget, self.eos = model, rows, max_new_tokens, eos

    def answer(self, todo: Sequence[Request], *, deadline: float = float("inf")) -> Iterator[Answer]:
        """Answers batch by batch, short prompts first.

        Args:
            todo: the requests.
            deadline: on `time.monotonic`; then the batch in flight is dropped.
        """
        queue = sorted(todo, key=lambda r: len(r.prompt))
        for first in range(0, len(queue), self.rows):
            batch = queue[first : first + self.rows]
            rows = self._generate(batch, deadline)
            if time.monotonic() >= deadline:
                return
            for request, tokens in zip(batch, rows, strict=True):
                yield Answer(request, self._cut(tokens))

    def _generate(self, batch: list[Request], deadline: float) -> list[list[int]]:
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        longest = max(len(r.prompt) for r in batch)
        device, pad = self.model.device, self.eos[0]
        ids = torch.tensor([[pad] * (longest - len(r.prompt)) + r.prompt for r in batch], device=device)
        mask = torch.tensor([[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in batch], device=device)

        def late(tokens: Tensor, _scores: Any, **_: Any) -> Tensor:
            return torch.full((len(tokens),), time.monotonic() >= deadline, device=tokens.device)

        own, self.model.generation_config = self.model.generation_config, GenerationConfig()
        try:
            out = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=self.budget,
                eos_token_id=list(self.eos),
                pad_token_id=pad,
                logits_processor=LogitsProcessorList([_noise(batch, longest, device)]),
                stopping_criteria=StoppingCriteriaList([late]),
            )
        finally:
            self.model.generation_config = own
        return out[:, longest:].tolist()

    def _cut(self, tokens: list[int]) -> list[int]:
        """Up to the first end-of-turn id; behind it is padding."""
        ends = [i for i, token in enumerate(tokens) if token in self.eos]
        return tokens[: ends[0] + 1] if ends else tokens


def _noise(batch: list[Request], prompt_tokens: int, device: torch.device) -> Any:
    """A logits processor after which the best token is a draw at the row's temperature (`ops.gumbel_sample`)."""
    heat = torch.tensor([[r.temperature] for r in batch], dtype=torch.float32, device=device)
    seeds = torch.tensor([r.seed for r in batch], device=device)

    def add(tokens: Tensor, scores: Tensor) -> Tensor:
        if not heat.any():
            return scores
        at = torch.full_like(seeds, tokens.shape[1] - prompt_tokens)
        return scores - heat * exponential_noise(seeds, at, scores.shape[1]).log()

    return add
