"""The main job on real input: draft and verify answers, beside plain decoding by the same target."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dflash2.comparison import Difference, first_difference
from dflash2.drafter import DFlash2Drafter
from dflash2.generation import generate
from dflash2.prompts import prompt_ids
from dflash2.provenance import provenance

__all__ = ["PROMPTS", "Answer", "plain_greedy", "run_demo", "timed"]

PROMPTS = (
    ("code", "Write a Python function that checks whether a string is a palindrome, and explain it."),
    ("math", "A baker makes 12 trays of 15 rolls and sells 140 of them. How many rolls are left? Think step by step."),
    ("chat", "Give me three tips for growing tomatoes on a balcony."),
)


@dataclass
class Answer:
    """One prompt, decoded with and without drafts.

    Attributes:
        acceptance_length, target_passes, drafts_per_pass: of the last repetition.
        plain_s, drafted_s: wall-clock seconds of each repetition; the two alternate.
        difference: where the outputs part; None if they are the same.
    """

    name: str
    prompt: str
    text: str
    tokens: int
    acceptance_length: float
    target_passes: int
    drafts_per_pass: float
    plain_s: list[float]
    drafted_s: list[float]
    difference: Difference | None

    @property
    def ratio(self) -> float:
        """How many times as fast as plain decoding, median over the repetitions."""
        return statistics.median(p / d for p, d in zip(self.plain_s, self.drafted_s, strict=True))


def timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of a call and its wall-clock seconds, the device's work included."""
    began = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - began


def plain_greedy(target: Any, ids: Tensor, max_new_tokens: int) -> list[int]:
    """What ``target.generate`` of Transformers adds to one prompt ``[1, S]``."""
    neutral = {"do_sample": False, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}  # whatever its config says
    out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **neutral)
    return out[0, ids.shape[1] :].tolist()


def answer(
    target: Any,
    tokenizer: Any,
    drafter: DFlash2Drafter,
    name: str,
    prompt: str,
    max_new_tokens: int,
    repeats: int = 1,
    num_draft_tokens: int | Literal["auto"] = "auto",
) -> Answer:
    """Decode greedily without and with drafts, one after the other in this process, and compare."""
    device = drafter.device
    ids = torch.tensor([prompt_ids(tokenizer, prompt)], device=device)
    plain_s, drafted_s = [], []
    for _ in range(repeats):
        plain, seconds = timed(partial(plain_greedy, target, ids, max_new_tokens), device)
        plain_s.append(seconds)
        run = partial(generate, target, drafter, ids, None, max_new_tokens, num_draft_tokens=num_draft_tokens)
        drafted, seconds = timed(run, device)
        drafted_s.append(seconds)
    tokens = drafted.sequences[0, ids.shape[1] :].tolist()
    return Answer(
        name, prompt, tokenizer.decode(tokens, skip_special_tokens=True).strip(), len(tokens),
        drafted.stats.acceptance_length, drafted.stats.target_passes, drafted.stats.drafts_per_pass,
        plain_s, drafted_s, first_difference(target, ids, plain, tokens),
    )  # fmt: skip


def run_demo(
    target: Any,
    tokenizer: Any,
    drafter: DFlash2Drafter,
    prompts: Sequence[tuple[str, str]] = PROMPTS,
    max_new_tokens: int = 128,
    repeats: int = 1,
    num_draft_tokens: int | Literal["auto"] = "auto",
    json_path: Path | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Answer prompts, and end with acceptance, speed and the proof that the output is the target's own.

    Args:
        prompts: (name, text) pairs.
        max_new_tokens: per answer.
        repeats: how often to decode each answer; times are medians.
        num_draft_tokens: as in `generate`.
        json_path: where to write the numbers, if anywhere.
        say: takes each line.

    Returns:
        Whether every output was identical to plain greedy decoding.
    """
    answer(target, tokenizer, drafter, "warm-up", "Hello!", 12, 1, num_draft_tokens)
    answers = []
    for name, prompt in prompts:
        say(f"\n[{name}] {prompt}")
        answers.append(answer(target, tokenizer, drafter, name, prompt, max_new_tokens, repeats, num_draft_tokens))
        say("\n".join(f"    {line}" for line in answers[-1].text.splitlines()))
    _table(answers, drafter.device, say)
    if json_path is not None:
        settings = {
            "max_new_tokens": max_new_tokens,
            "num_draft_tokens": num_draft_tokens,
            "dtype": str(drafter.dtype),
            "threads": torch.get_num_threads(),
        }
        rows = [{**asdict(a), "ratio": round(a.ratio, 3)} for a in answers]
        report = {"answers": rows, "settings": settings, "provenance": provenance(drafter.device)}
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return not any(a.difference for a in answers)


def _table(answers: Sequence[Answer], device: torch.device, say: Callable[[str], None]) -> None:
    widths = {"tokens": 7, "drafts": 8, "acceptance": 12, "target passes": 15, "plain tok/s": 13, "drafted": 10}
    say(f"\n{'':12}" + "".join(f"{name:>{n}}" for name, n in widths.items()) + f"{'ratio':>8}")
    for a in answers:
        share = f"{a.target_passes} of {a.tokens}"
        plain, drafted = (a.tokens / statistics.median(s) for s in (a.plain_s, a.drafted_s))
        say(
            f"{a.name:12}{a.tokens:>7}{a.drafts_per_pass:>8.1f}{a.acceptance_length:>12.2f}{share:>15}{plain:>13.1f}"
            f"{drafted:>10.1f}{a.ratio:>7.2f}x"
        )
    ratio = statistics.median(a.ratio for a in answers)
    tokens, passes = sum(a.tokens for a in answers), sum(a.target_passes for a in answers)
    say("\ndrafts: proposed per verify pass; acceptance: tokens per verify pass, the target's own bonus token included")
    say(f"target passes saved: {tokens - passes} of {tokens} ({1 - passes / tokens:.0%})")
    hint = _why_slow(ratio, answers, device)
    say(f"speed beside plain greedy decoding on this {device.type}, median: {ratio:.2f}x{hint}")
    different = [a for a in answers if a.difference]
    if not different:
        say(f"outputs identical to plain greedy decoding: yes, {len(answers)} of {len(answers)} answers")
    for a in different:
        d = a.difference
        assert d is not None
        gap = "one ended" if d.logit_gap is None else f"the target's own logits put them {d.logit_gap:.2g} apart"
        say(f"outputs identical: NO, [{a.name}] differs from token {d.index} on: {d.tokens}; {gap}")


def _why_slow(ratio: float, answers: Sequence[Answer], device: torch.device) -> str:
    if statistics.mean(a.acceptance_length for a in answers) < 1.2:
        return "\n  (hardly any draft is accepted: was this drafter trained for this target?)"
    if ratio >= 1 or device.type != "cpu":
        return ""
    return (
        "\n  (on a small CPU one pass over 8 rows of so small a target costs 1.5 to 3 passes over one row: only what"
        "\n   is easy to draft gains)"
    )
