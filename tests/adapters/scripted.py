"""A made-up engine: prefix cache, chunked prefill, verification, preemption, aborts and reused ids; nothing of ours.

Its target is a recurrence over the tokens, so that taps depend on the whole prefix, and what it will say next is fixed
beforehand (each request has its text). It keeps the rows that any drafter could have seen, for a test to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dflash2.adapters.chunks import Chunk, Drafts


@dataclass
class Request:
    """One request. ``text`` is the prompt and everything it will say; ``computed`` rows have been run."""

    name: str
    text: list[int]
    prompt: int
    temperature: float = 0.0
    computed: int = 0
    known: int = 0  # tokens that exist: the prompt, then what was sampled
    drafts: list[int] = field(default_factory=list)
    running: bool = False

    @property
    def done(self) -> bool:
        return self.known == len(self.text)


class ScriptedEngine:
    """Runs requests through ``step``, a callable from chunks and taps to drafts.

    Args:
        step: the adapter under test.
        taps_width: T*H.
        vocab: of the tokens.
        block: tokens per block of the prefix cache; 0 for no cache.
        chunk: most rows of a prompt per step.
        share_answers: whether what a request says can be hit by others before it ends; vLLM lets them, SGLang does not.
    """

    def __init__(
        self,
        step: Callable[[Sequence[Chunk], Tensor], Drafts],
        *,
        taps_width: int,
        vocab: int,
        block: int = 4,
        chunk: int = 5,
        share_answers: bool = True,
    ):
        self.run_drafter, self.block, self.chunk, self.share_answers = step, block, chunk, share_answers
        mix = torch.Generator().manual_seed(11)
        self.table = torch.randn(vocab, taps_width, generator=mix)
        self.turn = torch.linspace(-1, 1, taps_width)
        self.cached: set[tuple[int, ...]] = set()
        self.checked = 0

    def taps(self, tokens: Sequence[int]) -> Tensor:
        """``[n, T*H]`` of a text from position 0."""
        state, rows = torch.zeros(self.table.shape[1]), []
        for t in tokens:
            state = torch.tanh(0.6 * state.roll(1) + self.table[t] + 0.1 * self.turn)
            rows.append(state)
        return torch.stack(rows) if rows else state.new_zeros(0, len(state))

    def admit(self, r: Request) -> None:
        """Begin or resume at the longest cached prefix, which leaves at least one token to compute."""
        r.running, r.drafts, r.computed = True, [], 0
        r.known = max(r.known, r.prompt)
        while self.block:
            end = r.computed + self.block
            if end >= r.known or tuple(r.text[:end]) not in self.cached:
                break
            r.computed = end

    def preempt(self, r: Request) -> None:
        """Its cache is gone; drafts that were not verified too."""
        r.running, r.drafts = False, []

    def step(self, requests: Sequence[Request], check: Callable[[Request, list[int]], None] | None = None) -> Drafts:
        """Run these requests once, in this order, and hand what was computed to the drafter."""
        chunks, taps = [], []
        plan = [(r, self._chunk(r)) for r in requests]
        for _, c in plan:  # blocks can be hit from now on, by requests of this same step too
            chunks.append(c[0])
            taps.append(c[1])
        out = self.run_drafter(chunks, torch.cat(taps) if taps else self.table[:0])
        for i, (r, (c, _)) in enumerate(plan):
            r.drafts = []
            if c.anchor is not None and bool(out.drafted[i]):
                r.drafts = out.tokens[i].tolist()
                if check is not None:
                    check(r, r.drafts)
                    self.checked += 1
        return out

    def _chunk(self, r: Request) -> tuple[Chunk, Tensor]:
        start, drafts = r.computed, r.drafts
        if drafts and r.known - start == 1:
            # The anchor and its drafts; of these the ones that agree with the text stand.
            room = len(r.text) - r.known
            right = next((i for i, d in enumerate(drafts) if i >= room or d != r.text[r.known + i]), len(drafts))
            rows, valid = [r.text[start], *drafts], 1 + min(right, room)
            r.known = min(r.known + right + 1, len(r.text))
        else:
            rows = r.text[start : min(r.known, start + self.chunk)]
            valid = len(rows)
            if start + valid == r.known and r.known < len(r.text):
                r.known += 1
        r.computed = start + valid
        shared = r.computed if self.share_answers else min(r.computed, r.prompt)
        for end in range(self.block, shared + 1, self.block) if self.block else ():
            self.cached.add(tuple(r.text[:end]))
        real = self.taps(r.text[: r.computed])[start:]
        noise = torch.full((len(rows) - valid, real.shape[1]), float("nan"))
        # No engine drafts before a prompt's end: its last token is run with the prompt, not as an anchor.
        wants = r.known - r.computed == 1 and r.computed >= r.prompt and not r.done
        chunk = Chunk(
            r.name,
            start,
            rows,
            len(rows),
            valid,
            r.text[r.computed] if wants else None,
            r.temperature,
            lambda: r.text[:start],
        )
        return chunk, torch.cat((real, noise))


def texts(seed: int, count: int, vocab: int, shared: int, longest: int) -> list[list[int]]:
    """Random texts, half of which share their first ``shared`` tokens."""
    rng = np.random.default_rng(seed)
    head = rng.integers(0, vocab, shared).tolist()
    made = []
    for i in range(count):
        own = rng.integers(0, vocab, int(rng.integers(2, longest))).tolist()
        made.append(head + own if i % 2 == 0 else own)
    return made
