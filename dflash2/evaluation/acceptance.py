"""Acceptance length by real generation: what `dflash2 eval --live` measures, and what replay must agree with.

A verify round yields the drafts that stood and one token of the target's own. The acceptance length is tokens from
verify rounds by number of rounds: per prompt, then the mean over prompts. The prompt's own pass yields the first token
and is no round. A round that a stop or the budget cuts counts with the tokens that were kept.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import dflash2
from dflash2.evaluation.definition import DEFINITION, MIN_PROMPTS, bucket, bucket_name, template_sha256
from dflash2.int8_linear import has_int8_linears
from dflash2.lm_head import Int8LMHead
from dflash2.prompts import all_prompt_ids
from dflash2.provenance import provenance

__all__ = ["Measurement", "live_report", "measure", "summarise"]


@dataclass(frozen=True)
class Measurement:
    """What generating for one set of prompts showed.

    Attributes:
        acceptance_length: mean over prompts of each prompt's tokens per round.
        acceptance_length_micro: all tokens by all rounds.
        rounds, tokens: sums; tokens are those of verify rounds.
        accepted_by_row: share of the rounds that reached draft i and kept it.
        by_context: per range of context lengths, tokens / rounds as ``acceptance_length``, ``rounds`` and ``prompts``.
            Ranges seen by fewer than 5 prompts are left out.
        prompts: how many had at least one round.
        seconds: wall clock, everything included.
    """

    acceptance_length: float
    acceptance_length_micro: float
    rounds: int
    tokens: int
    accepted_by_row: list[float]
    by_context: dict[str, dict[str, float]]
    prompts: int
    seconds: float


def measure(
    target: Any,
    drafter: dflash2.DFlash2Drafter,
    tokenizer: Any,
    prompts: Sequence[dict[str, Any]],
    *,
    max_new_tokens: int = 256,
    batch_size: int = 16,
    num_draft_tokens: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> Measurement:
    """Generate for every prompt and count.

    Args:
        target: a Transformers causal LM.
        drafter: trained for it.
        tokenizer: the target's.
        prompts: dictionaries with ``turns`` and optionally ``system``.
        max_new_tokens: budget of each answer.
        batch_size: prompts at a time; prompts of similar length go together.
        num_draft_tokens: k; the drafter's most by default.
        temperature: of the target's distribution; 0 is greedy.
        seed: of sampling.

    Raises:
        ConfigError: the drafter does not fit the target, or a prompt has no tokens.
    """
    began = time.perf_counter()
    encoded = sorted(all_prompt_ids(tokenizer, prompts), key=len)
    lengths: list[list[int]] = []
    with tqdm(total=len(encoded), unit="prompt", disable=None) as bar:
        for ids, mask in _batches(encoded, batch_size, target.device):
            out = dflash2.generate(
                target,
                drafter,
                ids,
                mask,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                num_draft_tokens=num_draft_tokens,
                seed=seed,
            )
            lengths += out.acceptance_lengths
            bar.update(len(ids))
    k = drafter.config.max_draft_tokens if num_draft_tokens is None else num_draft_tokens
    return summarise(lengths, [len(ids) for ids in encoded], k, time.perf_counter() - began)


def _batches(encoded: list[list[int]], size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Left-padded ids and masks, ``[n, S]``."""
    for at in range(0, len(encoded), size):
        part = encoded[at : at + size]
        ids = torch.zeros(len(part), max(map(len, part)), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(part):
            ids[i, -len(prompt) :] = torch.tensor(prompt)
            mask[i, -len(prompt) :] = 1
        yield ids.to(device), mask.to(device)


def summarise(lengths: Sequence[list[int]], prompt_lengths: Sequence[int], k: int, seconds: float) -> Measurement:
    """From the tokens of every round of every prompt.

    Args:
        lengths: per prompt, tokens per round.
        prompt_lengths: tokens of each prompt.
        k: drafts per round.
        seconds: wall clock to report.
    """
    by_context = _by_context(lengths, prompt_lengths)
    lengths = [n for n in lengths if n]
    rounds, tokens = sum(map(len, lengths)), sum(map(sum, lengths))
    flat = [n for per_prompt in lengths for n in per_prompt]
    by_row = [round(sum(n > i + 1 for n in flat) / max(sum(n > i for n in flat), 1), 4) for i in range(k)]
    macro = sum(sum(n) / len(n) for n in lengths) / max(len(lengths), 1)
    micro = tokens / max(rounds, 1)
    return Measurement(
        round(macro, 4), round(micro, 4), rounds, tokens, by_row, by_context, len(lengths), round(seconds, 1)
    )


def _by_context(lengths: Sequence[list[int]], prompt_lengths: Sequence[int]) -> dict[str, dict[str, float]]:
    """Rounds sorted by the context they drafted from: below 128, then a range per doubling."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for prompt, (rounds, context) in enumerate(zip(lengths, prompt_lengths, strict=True)):
        for produced in rounds:
            found[bucket(context)].append((prompt, produced))
            context += produced
    table = {}
    for level, seen in sorted(found.items()):
        prompts = len({prompt for prompt, _ in seen})
        if prompts >= MIN_PROMPTS:
            mean = sum(produced for _, produced in seen) / len(seen)
            table[bucket_name(level)] = {
                "acceptance_length": round(mean, 4),
                "rounds": len(seen),
                "prompts": prompts,
            }
    return table


def live_report(
    target: Any,
    tokenizer: Any,
    drafter: dflash2.DFlash2Drafter,
    sets: Mapping[str, Sequence[dict[str, Any]]],
    origin: Mapping[str, Any],
    **settings: Any,
) -> dict[str, Any]:
    """Measure prompt sets, one line of output each.

    Args:
        target, tokenizer, drafter: from `load_pair`.
        sets: prompts by name.
        origin: where prompts and models are from.
        settings: of `measure`.

    Returns:
        JSON values: ``acceptance_length`` by set, ``definition``, ``details`` (`Measurement`), settings, provenance.
    """
    # cuDNN's attention is planned anew for every shape, and here shapes change all the time.
    torch.backends.cuda.enable_cudnn_sdp(False)
    measured = {}
    for name, prompts in sets.items():
        m = measured[name] = measure(target, drafter, tokenizer, prompts, **settings)
        line = f"{name}: acceptance length {m.acceptance_length:.3f} over {m.prompts} prompts, {m.seconds:.0f} s"
        print(line, flush=True)
    dtype, head = str(drafter.dtype).removeprefix("torch."), drafter._head[0]
    return {
        "acceptance_length": {name: m.acceptance_length for name, m in measured.items()},
        "definition": DEFINITION,
        "details": {name: asdict(m) for name, m in measured.items()},
        **origin,
        "settings": {
            **settings,
            "dtype": dtype,
            "drafter_linears": "int8" if has_int8_linears(drafter) else dtype,
            "draft_head": "int8" if isinstance(head, Int8LMHead) else dtype,
            "target_head": dtype,
            "block_size": drafter.config.block_size,
            "turns": "first only",
            "template_sha256": template_sha256(tokenizer),
        },
        "provenance": provenance(drafter.device),
    }
