"""Replay beside real generation: the same tokens, the same rounds, and how much faster it was."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from dflash2.comparison import first_difference
from dflash2.drafter import DFlash2Drafter
from dflash2.errors import ConfigError
from dflash2.evaluation.evaluate import replay_trace
from dflash2.evaluation.trace import Trace
from dflash2.generation import generate

__all__ = ["LiveCheck", "live_check"]


@dataclass(frozen=True)
class LiveCheck:
    """Greedy documents of a trace, decoded once more with drafts, one at a time, and replayed.

    Attributes:
        prompts: how many.
        same_tokens: of how many the output is the recorded one.
        same_rounds: how many of those took the same rounds, token for token.
        acceptance_live, acceptance_replay: mean over the prompts.
        live_s, live_tokens: wall clock of generating, and the tokens it made.
        replay_s, replay_tokens: of replaying the whole trace at the widest, and the answer tokens that it holds.
        times_faster: tokens per second of replay by that of generating.
        differences: for each prompt that differs, which and where: ``logit_gap`` is how close the call was where the
            tokens part (passes over one row and over several round differently), ``round`` is the first that differs
            where they do not.
    """

    prompts: int
    same_tokens: int
    same_rounds: int
    acceptance_live: float
    acceptance_replay: float
    live_s: float
    live_tokens: int
    replay_s: float
    replay_tokens: int
    times_faster: float
    differences: list[dict[str, Any]]


def live_check(target: Any, drafter: DFlash2Drafter, trace: Trace, prompts: int) -> LiveCheck:
    """Decode again what a trace recorded. Greedy documents only, spread over the trace.

    Documents are decoded one by one: in a batch, how the last block before the end of the budget is shortened depends
    on the other requests.

    Args:
        target: what the trace is of.
        drafter: bound to the trace's tables or the target's.
        trace: greedy, of prompts.
        prompts: how many at most.

    Raises:
        ConfigError: the trace has no greedy document, or was not decoded from prompts.
    """
    replayed = replay_trace(trace, drafter)
    documents = [
        (shard.tokens[a : a + n], int(p))
        for shard in trace.shards()
        for a, n, p in zip(shard.starts.tolist(), shard.lengths.tolist(), shard.prompt_lengths.tolist(), strict=True)
    ]
    greedy = [i for i, a in enumerate(replayed.about) if a["temperature"] <= 0]
    decoding = trace.about.get("decoding")
    if not greedy or decoding is None:
        raise ConfigError("a live check needs greedy answers to prompts: make a trace with --prompts at temperature 0.")
    chosen = [greedy[i] for i in np.unique(np.linspace(0, len(greedy) - 1, min(prompts, len(greedy))).astype(int))]
    live_s, live_tokens, same_tokens = 0.0, 0, 0
    pairs: list[tuple[list[int], list[int]]] = []
    differences: list[dict[str, Any]] = []
    for i in tqdm(chosen, unit="prompt", disable=None):
        tokens, prompt = documents[i]
        ids = tokens[None, :prompt].to(target.device)
        began = time.perf_counter()
        out = generate(target, drafter, ids, max_new_tokens=trace.max_new_tokens, eos_token_id=decoding["stops"])
        made, recorded = out.sequences[0, prompt:].tolist(), tokens[prompt:].tolist()
        live_s, live_tokens = live_s + time.perf_counter() - began, live_tokens + len(made)
        rounds = out.acceptance_lengths[0]
        pairs.append((rounds, replayed.lengths[i]))
        same_tokens += made == recorded
        if (difference := first_difference(target, ids, recorded, made)) is not None:
            differences.append({**replayed.about[i], "token": difference.index, "logit_gap": difference.logit_gap})
        elif rounds != replayed.lengths[i]:
            same = [a == b for a, b in zip(rounds, replayed.lengths[i], strict=False)]
            differences.append({**replayed.about[i], "round": (*same, False).index(False)})
    answers = int(replayed.tallies[replayed.widest].anchors.sum()) + len(documents)
    return LiveCheck(
        prompts=len(chosen),
        same_tokens=same_tokens,
        same_rounds=same_tokens - sum("round" in d for d in differences),
        acceptance_live=_mean([live for live, _ in pairs]),
        acceptance_replay=_mean([replay for _, replay in pairs]),
        live_s=live_s,
        live_tokens=live_tokens,
        replay_s=replayed.seconds,
        replay_tokens=answers,
        times_faster=(answers / replayed.seconds) / (live_tokens / live_s),
        differences=differences,
    )


def _mean(lengths: list[list[int]]) -> float:
    per_prompt = [sum(n) / len(n) for n in lengths if n]
    return sum(per_prompt) / max(len(per_prompt), 1)
