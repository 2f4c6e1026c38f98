"""The stand-alone loop: draft, verify, commit, over any Transformers causal LM."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from dflash2.drafter import DFlash2Drafter
from dflash2.errors import ConfigError
from dflash2.positions import integer_ids, is_integer
from dflash2.proposal import Proposal
from dflash2.target import TargetRunner, misfits
from dflash2.verification import verify
from dflash2.width import Acceptance, AutoWidth, RoundCosts
from dflash2.window_kv import WindowKV

__all__ = ["Generation", "GenerationStats", "generate"]

#: Prompt tokens per target pass: bounds the activations and taps of long prompts.
PREFILL_TOKENS = 2048
#: Rounds without drafts whose taps wait for the next draft: one append of many rows costs little more than of one.
WAITING_ROUNDS = 64

#: What rounds of each pair cost here, for calls to come.
_costs: WeakKeyDictionary[DFlash2Drafter, dict[Any, RoundCosts]] = WeakKeyDictionary()


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

    def count(self, requests: Sequence[_Request]) -> None:
        """Add up what the requests recorded."""
        self.rounds = sum(len(r.lengths) for r in requests)
        self.round_tokens = sum(sum(r.lengths) for r in requests)
        self.new_tokens = sum(len(r.produced) for r in requests)


@dataclass
class Generation:
    """What `generate` returns.

    Attributes:
        sequences: int64 ``[R, S + new]``, prompts as given, then the answers, padded on the right.
        acceptance_lengths: per request, the tokens each verify round produced: accepted drafts + 1, cut by a stop.
        stats: counters and times.
    """

    sequences: Tensor
    acceptance_lengths: list[list[int]]
    stats: GenerationStats


@dataclass(eq=False)
class _Request:
    """One prompt on its way."""

    row: int
    seq: int
    position: int
    produced: list[int] = field(default_factory=list)
    streamed: int = 0
    lengths: list[int] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)


@torch.no_grad()
def generate(
    target: Any,
    drafter: DFlash2Drafter,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    num_draft_tokens: int | Literal["auto"] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    seed: int | None = None,
    streamer: Any = None,
) -> Generation:
    """Decode with drafts; the output is the target's own.

    Args:
        target: a Transformers causal LM whose layers all cache plain keys and values.
        drafter: trained for this target. It is bound to the target if it is not bound yet.
        input_ids: int64 ``[R, S]``.
        attention_mask: ``[R, S]``, 0 for padding, on either side. Default: no padding.
        max_new_tokens: budget of each request.
        temperature, top_p, top_k: of the target's distribution; temperature 0 is greedy. Nothing else shapes it: what
            the target's generation config says of sampling and penalties is not read.
        num_draft_tokens: k per round, at most the trained block_size - 1, which is the default. 0: plain decoding.
            ``"auto"``: for each round as many as pay, by measured times and recent acceptance (`dflash2.width`).
        eos_token_id: ids that end a request (kept in the output). Default: the target's generation config; ``[]`` or
            a negative id: none.
        seed: makes sampling repeatable. Drafting and verification use independent streams of it. Not with ``"auto"``,
            whose widths, and so the use of the random numbers, depend on the clock.
        streamer: a Transformers streamer (``put``, ``end``); one request only.

    Raises:
        ConfigError: the drafter does not fit this target, or the target's state cannot be rolled back.
        ValueError: shapes or arguments do not fit.
    """
    prompts, lengths = _right_aligned(input_ids, attention_mask, max_new_tokens)
    auto = num_draft_tokens == "auto"
    k: Any = drafter.config.max_draft_tokens if auto or num_draft_tokens is None else num_draft_tokens
    _check_sampling(temperature, top_p, top_k, k, drafter.config.max_draft_tokens)
    if auto and seed is not None and temperature > 0:
        raise ValueError(
            f"seed={seed} with num_draft_tokens='auto': its widths depend on the clock, so no seed makes sampling "
            "repeatable. Give a number of drafts, or leave the seed out."
        )
    if streamer is not None and len(input_ids) != 1:
        raise ValueError(f"a streamer takes one request, input_ids has {len(input_ids)}. Leave it out, or loop.")
    _check_pair(target, drafter)
    _check_range(target, prompts)
    stops = _stop_ids(target, eos_token_id)
    generators = _generators(seed, input_ids.device)
    auto_width = AutoWidth(_round_costs(target, drafter)) if auto else None
    sampling = (temperature, top_p, top_k)
    loop = _Loop(target, drafter, stops, max_new_tokens, sampling, k, auto_width, generators, streamer)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    with torch.inference_mode():  # a pass over one row of a 135M target: 111.4 ms, without it 115.7
        requests = loop.run(prompts, lengths)
    if streamer is not None:
        streamer.end()
    pad = _pad_id(target, stops)
    width = max((len(r.produced) for r in requests), default=0)
    answers = torch.full((len(requests), width), pad, dtype=input_ids.dtype)
    for r in requests:
        answers[r.row, : len(r.produced)] = torch.tensor(r.produced, dtype=input_ids.dtype)
    return Generation(
        torch.cat((input_ids, answers.to(input_ids.device)), 1), [r.lengths for r in requests], loop.stats
    )


class _Loop:
    def __init__(
        self, target: Any, drafter: DFlash2Drafter, stops: set[int], budget: int,
        sampling: tuple[float, float, int], k: int, width: AutoWidth | None,
        generators: list[torch.Generator | None], streamer: Any,
    ):  # fmt: skip
        self.target, self.drafter, self.stops, self.budget, self.k = target, drafter, stops, budget, k
        self.sampling, self.width, self.generators, self.streamer = sampling, width, generators, streamer
        self.stats = GenerationStats()
        self.waiting: list[Tensor] = []  # taps [R, 1, T*H] of rounds without drafts, not appended yet

    def run(self, prompts: Tensor, lengths: list[int]) -> list[_Request]:
        """Answer all prompts: ``[R, S]``, right-aligned, of these lengths."""
        kv = None
        if self.k:
            # A request close to its budget may accept a whole block because another one still has room for it.
            kv = self.drafter.new_kv(len(lengths), max(lengths) + self.budget + self.k)
        requests = [_Request(i, -1 if kv is None else kv.open(), n) for i, n in enumerate(lengths)]
        layer_ids = self.drafter.config.target_layer_ids if self.k else ()
        padding = [prompts.shape[1] - n for n in lengths]
        last = [n + self.budget - 2 for n in lengths]  # of the last token that is run: the answer's last one is not
        runner = TargetRunner(self.target, layer_ids, padding, last, prompts.device)
        began = time.perf_counter()
        logits = self._prefill(runner, kv, requests, prompts)
        first = verify(_no_drafts(len(requests), prompts.device), logits[:, -1:], *self.sampling, self.generators[1])
        live = self._commit(requests, [[t] for t in first.next_token.tolist()], runner, 0)
        self._stream(requests[0])
        self.stats.prefill_s = time.perf_counter() - began
        while live:
            live = self._round(runner, kv, live)
            self._stream(requests[0])
        self.stats.decode_s = time.perf_counter() - began - self.stats.prefill_s
        self.stats.count(requests)
        return requests

    def _prefill(self, runner: TargetRunner, kv: WindowKV | None, live: list[_Request], prompts: Tensor) -> Tensor:
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

    def _round(self, runner: TargetRunner, kv: WindowKV | None, live: list[_Request]) -> list[_Request]:
        """Draft, verify and commit once for every live request."""
        began, most = time.perf_counter(), min(self.k, max(self.budget - len(r.produced) for r in live) - 1)
        k = most if self.width is None else self.width.choose([r.acceptance for r in live], most)
        anchors = torch.tensor([r.produced[-1] for r in live], device=runner.device)
        proposal = _no_drafts(len(live), runner.device)
        if kv is not None and (k > 0 or len(self.waiting) == WAITING_ROUNDS):
            self._append_waiting(kv, live)
        seqs, starts = [r.seq for r in live], [r.position for r in live]
        if kv is not None and k > 0:
            proposal = self.drafter.propose(kv, seqs, anchors, starts, k, self.sampling[0], self.generators[0])
        logits, taps = runner.run(torch.cat((anchors[:, None], proposal.tokens), 1))
        out = verify(proposal, logits, *self.sampling, self.generators[1])
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

    def _count(self, k: int, accepted: list[int]) -> None:
        self.stats.target_passes += 1
        self.stats.widths[k] += 1
        self.stats.proposed += k * len(accepted)
        self.stats.accepted += sum(accepted)

    def _append_waiting(self, kv: WindowKV, live: list[_Request]) -> None:
        """Give the drafter its context of the rounds that made no drafts."""
        if n := len(self.waiting):
            taps, self.waiting = torch.cat(self.waiting, 1).flatten(0, 1), []
            self.drafter.append(kv, [r.seq for r in live], taps, [r.position - n for r in live], [n] * len(live))

    def _close(self, kv: WindowKV, live: list[_Request], remaining: list[_Request]) -> None:
        """Forget what is finished."""
        self.waiting = [taps[[r in remaining for r in live]] for taps in self.waiting]
        for r in live:
            if r not in remaining:
                kv.close(r.seq)

    def _commit(self, live: list[_Request], new: list[list[int]], runner: TargetRunner, k: int) -> list[_Request]:
        """Take each request's new tokens up to its stop, and drop what is finished or rejected from the cache."""
        remaining, drop = [], []
        for r, tokens in zip(live, new, strict=True):
            kept, done = self._cut(tokens, self.budget - len(r.produced))
            first = not r.produced
            r.produced += kept
            if not first:
                r.lengths.append(len(kept))
                r.position += len(tokens)
            if not done:
                remaining.append(r)
                drop.append(0 if first else k + 1 - len(tokens))
        if remaining:
            runner.keep([i for i, r in enumerate(live) if r in remaining], drop)
        return remaining

    def _stream(self, r: _Request) -> None:
        """The streamer's time is not the round's."""
        if self.streamer is not None:
            self.streamer.put(torch.tensor(r.produced[r.streamed :]))
            r.streamed = len(r.produced)

    def _cut(self, tokens: list[int], left: int) -> tuple[list[int], bool]:
        tokens = tokens[:left]
        for i, t in enumerate(tokens):
            if t in self.stops:
                return tokens[: i + 1], True
        return tokens, len(tokens) == left


def _round_costs(target: Any, drafter: DFlash2Drafter) -> RoundCosts:
    """What was learned of this pair, as it is now, on this device and with as many threads."""
    setting = (ref(target), target.dtype, drafter.dtype, drafter.device, torch.get_num_threads())
    return _costs.setdefault(drafter, {}).setdefault(setting, RoundCosts())


def _no_drafts(requests: int, device: torch.device) -> Proposal:
    """K = 0: the target decides alone."""
    none = torch.zeros(requests, 0, dtype=torch.int64, device=device)
    return Proposal(none, None, None, torch.ones(requests, dtype=torch.bool, device=device))


def _right_aligned(input_ids: Tensor, attention_mask: Tensor | None, budget: int) -> tuple[Tensor, list[int]]:
    """Tokens ``[R, S]`` with all padding on the left, and how many of each row are real; the longest has no padding."""
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}: expected [requests, tokens], both at least 1.")
    integer_ids("input_ids", input_ids)
    if not is_integer(budget) or budget < 1:
        raise ValueError(f"max_new_tokens={budget!r}: must be a whole number of at least 1.")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if mask.shape != input_ids.shape or not bool(mask.any(1).all()):
        raise ValueError(f"attention_mask {list(mask.shape)} must match input_ids and leave each request a token.")
    ends = mask.shape[1] - mask.flip(1).to(torch.int8).argmax(1)
    lengths = mask.sum(1)
    if bool((ends - mask.to(torch.int8).argmax(1) != lengths).any()):
        raise ValueError("attention_mask has holes between real tokens: padding belongs on one side.")
    order = mask.to(torch.int8).argsort(dim=1, stable=True)
    return input_ids.gather(1, order)[:, -int(lengths.max()) :], lengths.tolist()


def _check_sampling(temperature: float, top_p: float, top_k: int, k: int, most: int) -> None:
    if not (temperature >= 0 and 0 < top_p <= 1 and top_k >= 0):  # so that NaN fails
        raise ValueError(
            f"temperature={temperature}, top_p={top_p}, top_k={top_k}: expected temperature >= 0, 0 < top_p <= 1 and "
            "top_k >= 0."
        )
    if not is_integer(k) or not 0 <= k <= most:
        raise ConfigError(
            f"num_draft_tokens={k!r}: expected 0 (plain decoding) to {most}, the trained block_size - 1, or 'auto'."
        )


def _check_pair(target: Any, drafter: DFlash2Drafter) -> None:
    if problems := misfits(drafter.config, target.config):
        raise ConfigError(
            f"the drafter was trained for another target: {'; '.join(problems)}. Use one made for this target."
        )
    if not drafter.is_bound:
        head = target.get_output_embeddings()
        if head is None:
            raise ConfigError(f"{type(target).__name__} has no output head: expected a causal LM.")
        drafter.bind_target(target.get_input_embeddings(), head)


def _stop_ids(target: Any, eos_token_id: int | Sequence[int] | None) -> set[int]:
    if eos_token_id is None:
        eos_token_id = getattr(getattr(target, "generation_config", None), "eos_token_id", None)
    if eos_token_id is None:
        return set()
    ids = list(eos_token_id) if isinstance(eos_token_id, Set) else eos_token_id
    return {i for i in integer_ids("eos_token_id", ids).flatten().tolist() if i >= 0}


def _check_range(target: Any, prompts: Tensor) -> None:
    """On a GPU an id without a row in the embedding would take the process down."""
    rows, (low, high) = target.config.get_text_config().vocab_size, (int(x) for x in prompts.aminmax())
    if low < 0 or high >= rows:
        raise ValueError(f"input_ids hold {low} to {high}, padding included: expected ids in [0, {rows}).")


def _pad_id(target: Any, stops: set[int]) -> int:
    pad = getattr(getattr(target, "generation_config", None), "pad_token_id", None)
    return pad if pad is not None else min(stops, default=0)


def _generators(seed: int | None, device: torch.device) -> list[torch.Generator | None]:
    """One for drafts, one for verification. `uniform` separates their numbers even though the seed is one."""
    if seed is None:
        return [None, None]
    return [torch.Generator(device).manual_seed(seed) for _ in range(2)]
