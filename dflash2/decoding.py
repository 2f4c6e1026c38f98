"""The rounds of decoding with drafts over a Transformers causal LM: draft, verify, commit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash2.drafter import DFlash2Drafter
from dflash2.proposal import Proposal
from dflash2.target import TargetRunner
from dflash2.verification import Verification, verify
from dflash2.width import Acceptance, AutoWidth
from dflash2.window_kv import WindowKV

__all__ = ["DecodingLoop", "Ending", "GenerationStats", "Request", "StopIds"]

#: Prompt tokens per target pass: bounds the activations and taps of long prompts.
PREFILL_TOKENS = 2048
#: Rounds without drafts whose taps wait for the next draft: one append of many rows costs little more than of one.
WAITING_ROUNDS = 64


@dataclass
class GenerationStats:
    """Counters of one call, over all its requests.

    Attributes:
        target_passes: forward passes of the target, the prompt's included.
        rounds, round_tokens: verify rounds and the tokens they produced, summed over requests.
        proposed, accepted: drafts made and drafts that stood (those cut by a stop included).
        new_tokens: tokens produced.
        widths: verify passes by the number of drafts that they checked.
        prefill_s, decode_s: wall-clock seconds.
    """

    target_passes: int = 0
    rounds: int = 0
    round_tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    new_tokens: int = 0
    widths: Counter[int] = field(default_factory=Counter)
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def drafts_per_pass(self) -> float:
        """Mean width of a verify pass; 0 when there was none."""
        return sum(k * n for k, n in self.widths.items()) / max(self.widths.total(), 1)

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify round, bonus included; 0 when there was none."""
        return self.round_tokens / self.rounds if self.rounds else 0.0

    def count(self, requests: Sequence[Request]) -> None:
        """Add up what the requests recorded."""
        self.rounds = sum(len(r.lengths) for r in requests)
        self.round_tokens = sum(sum(r.lengths) for r in requests)
        self.new_tokens = sum(len(r.produced) for r in requests)


@dataclass(eq=False)
class Request:
    """One prompt on its way.

    Attributes:
        row: of the prompts.
        seq: in the drafter's KV.
        position: of its newest token.
        produced: its new tokens.
        streamed: how many of them the streamer has.
        lengths: tokens that each verify round produced.
        acceptance: its recent acceptance.
    """

    row: int
    seq: int
    position: int
    produced: list[int] = field(default_factory=list)
    streamed: int = 0
    lengths: list[int] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)


class Ending(Protocol):
    """Where a request ends."""

    def __call__(self, request: Request, tokens: list[int]) -> tuple[list[int], bool]:
        """Those of the request's newest ``tokens`` that it keeps, and whether it ends with them."""


@dataclass(frozen=True)
class StopIds:
    """A request ends with one of these ids, which it keeps."""

    ids: set[int]

    def __call__(self, request: Request, tokens: list[int]) -> tuple[list[int], bool]:
        """See `Ending`."""
        for i, t in enumerate(tokens):
            if t in self.ids:
                return tokens[: i + 1], True
        return tokens, False


#: (requests, drafts ``[R, k]``, logits ``[R, k+1, V]``) -> the logits that decide.
ShapeLogits = Callable[[Sequence[Request], Tensor, Tensor], Tensor]


class DecodingLoop:
    """One call's requests, from their prompts to their ends.

    Args:
        target: a Transformers causal LM.
        drafter: bound to it.
        ending: where a request ends, besides its budget.
        budget: new tokens of a request at most.
        sampling: temperature, top-p and top-k of the target's distribution.
        k: drafts per round at most; 0 is plain decoding.
        width: chooses how many; None: always k.
        generators: noise of drafts and of verification.
        streamer: of the first request, or None.
        shape_logits: what else becomes of the target's logits (penalties, masks), or None.
        draft_temperature: of the drafts, by default the target's.
    """

    def __init__(
        self, target: Any, drafter: DFlash2Drafter, ending: Ending, budget: int,
        sampling: tuple[float, float, int], k: int, width: AutoWidth | None = None,
        generators: Sequence[torch.Generator | None] = (None, None), streamer: Any = None,
        shape_logits: ShapeLogits | None = None, draft_temperature: float | None = None,
    ):  # fmt: skip
        self.target, self.drafter, self.ending, self.budget, self.k = target, drafter, ending, budget, k
        self.sampling, self.width, self.generators, self.streamer = sampling, width, generators, streamer
        self.shape_logits = shape_logits
        self.draft_temperature = sampling[0] if draft_temperature is None else draft_temperature
        self.stats = GenerationStats()
        self.waiting: list[Tensor] = []  # taps [R, 1, T*H] of rounds without drafts, not appended yet

    def answer(self, input_ids: Tensor, prompts: Tensor, lengths: list[int], pad: int) -> tuple[Tensor, list[Request]]:
        """`run`; then the prompts as they were given with the new tokens behind, int64 ``[R, S + new]``, padded."""
        with torch.inference_mode():  # a pass over one row of a 135M target: 111.4 ms, without it 115.7
            requests = self.run(prompts, lengths)
        if self.streamer is not None:
            self.streamer.end()
        width = max((len(r.produced) for r in requests), default=0)
        answers = torch.full((len(requests), width), pad, dtype=input_ids.dtype)
        for r in requests:
            answers[r.row, : len(r.produced)] = torch.tensor(r.produced, dtype=input_ids.dtype)
        return torch.cat((input_ids, answers.to(input_ids.device)), 1), requests

    def run(self, prompts: Tensor, lengths: list[int]) -> list[Request]:
        """Answer all prompts: ``[R, S]``, right-aligned, of these lengths."""
        kv = None
        if self.k:
            # A request close to its budget may accept a whole block because another one still has room for it.
            kv = self.drafter.new_kv(len(lengths), max(lengths) + self.budget + self.k)
        requests = [Request(i, -1 if kv is None else kv.open(), n) for i, n in enumerate(lengths)]
        layer_ids = self.drafter.config.target_layer_ids if self.k else ()
        padding = [prompts.shape[1] - n for n in lengths]
        last = [n + self.budget - 2 for n in lengths]  # of the last token that is run: the answer's last one is not
        runner = TargetRunner(self.target, layer_ids, padding, last, prompts.device)
        began = time.perf_counter()
        logits = self._prefill(runner, kv, requests, prompts)
        first = self._verify(requests, _no_drafts(len(requests), prompts.device), logits[:, -1:])
        live = self._commit(requests, [[t] for t in first.next_token.tolist()], runner, 0)
        self._stream(requests[0])
        self.stats.prefill_s = time.perf_counter() - began
        while live:
            live = self._round(runner, kv, live)
            self._stream(requests[0])
        self.stats.decode_s = time.perf_counter() - began - self.stats.prefill_s
        self.stats.count(requests)
        return requests

    def _prefill(self, runner: TargetRunner, kv: WindowKV | None, live: list[Request], prompts: Tensor) -> Tensor:
        logits = prompts
        for at in range(0, prompts.shape[1], PREFILL_TOKENS):
            part = prompts[:, at : at + PREFILL_TOKENS]
            logits, taps = runner.run(part, last_only=True)
            self.stats.target_passes += 1
            if kv is not None and taps is not None:
                seen = [max(at - p, 0) for p in runner.padding]
                skip = [min(max(p - at, 0), part.shape[1]) for p in runner.padding]
                real = torch.cat([rows[n:] for rows, n in zip(taps, skip, strict=True)])
                self.drafter.append(kv, [r.seq for r in live], real, seen, [part.shape[1] - n for n in skip])
        return logits

    def _round(self, runner: TargetRunner, kv: WindowKV | None, live: list[Request]) -> list[Request]:
        """Draft, verify and commit once for every live request."""
        began, most = time.perf_counter(), min(self.k, max(self.budget - len(r.produced) for r in live) - 1)
        k = most if self.width is None else self.width.choose([r.acceptance for r in live], most)
        anchors = torch.tensor([r.produced[-1] for r in live], device=runner.device)
        proposal = _no_drafts(len(live), runner.device)
        if kv is not None and (k > 0 or len(self.waiting) == WAITING_ROUNDS):
            self._append_waiting(kv, live)
        seqs, starts = [r.seq for r in live], [r.position for r in live]
        if kv is not None and k > 0:
            proposal = self.drafter.propose(kv, seqs, anchors, starts, k, self.draft_temperature, self.generators[0])
        logits, taps = runner.run(torch.cat((anchors[:, None], proposal.tokens), 1))
        out = self._verify(live, proposal, logits)
        table = torch.cat((out.accepted[:, None], out.next_token[:, None], proposal.tokens), 1).tolist()
        accepted = [row[0] for row in table]
        new = [[*drafts[:n], token] for n, token, *drafts in table]
        self._count(k, accepted)
        if taps is not None and k == 0 and self.width is not None:
            self.waiting.append(taps)
        elif kv is not None and taps is not None:
            self.drafter.append(kv, seqs, taps.flatten(0, 1), starts, [k + 1] * len(live), [len(t) for t in new])
        remaining = self._commit(live, new, runner, k)
        if self.width is not None:
            self.width.observe([r.acceptance for r in live], k, accepted, time.perf_counter() - began)
        if kv is not None and len(remaining) < len(live):
            self._close(kv, live, remaining)
        return remaining

    def _verify(self, live: list[Request], proposal: Proposal, logits: Tensor) -> Verification:
        if self.shape_logits is not None:
            logits = self.shape_logits(live, proposal.tokens, logits)
        return verify(proposal, logits, *self.sampling, self.generators[1])

    def _count(self, k: int, accepted: list[int]) -> None:
        self.stats.target_passes += 1
        self.stats.widths[k] += 1
        self.stats.proposed += k * len(accepted)
        self.stats.accepted += sum(accepted)

    def _append_waiting(self, kv: WindowKV, live: list[Request]) -> None:
        """Give the drafter its context of the rounds that made no drafts."""
        if n := len(self.waiting):
            taps, self.waiting = torch.cat(self.waiting, 1).flatten(0, 1), []
            self.drafter.append(kv, [r.seq for r in live], taps, [r.position - n for r in live], [n] * len(live))

    def _close(self, kv: WindowKV, live: list[Request], remaining: list[Request]) -> None:
        """Forget what is finished."""
        self.waiting = [taps[[r in remaining for r in live]] for taps in self.waiting]
        for r in live:
            if r not in remaining:
                kv.close(r.seq)

    def _commit(self, live: list[Request], new: list[list[int]], runner: TargetRunner, k: int) -> list[Request]:
        """Take each request's new tokens up to its stop, and drop what is finished or rejected from the cache."""
        remaining, drop = [], []
        for r, tokens in zip(live, new, strict=True):
            kept, done = self.ending(r, tokens[: self.budget - len(r.produced)])
            first = not r.produced
            r.produced += kept
            done = done or len(r.produced) == self.budget
            if not first:
                r.lengths.append(len(kept))
                r.position += len(tokens)
            if not done:
                remaining.append(r)
                drop.append(0 if first else k + 1 - len(tokens))
        if remaining:
            runner.keep([i for i, r in enumerate(live) if r in remaining], drop)
        return remaining

    def _stream(self, r: Request) -> None:
        """The streamer's time is not the round's."""
        if self.streamer is not None:
            self.streamer.put(torch.tensor(r.produced[r.streamed :]))
            r.streamed = len(r.produced)


def _no_drafts(requests: int, device: torch.device) -> Proposal:
    """K = 0: the target decides alone."""
    none = torch.zeros(requests, 0, dtype=torch.int64, device=device)
    return Proposal(none, None, None, torch.ones(requests, dtype=torch.bool, device=device))
