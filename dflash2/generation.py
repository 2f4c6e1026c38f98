"""The stand-alone loop: draft, verify, commit, over any Transformers causal LM."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from dflash2.decoding import DecodingLoop, GenerationStats, StopIds
from dflash2.drafter import DFlash2Drafter
from dflash2.errors import ConfigError
from dflash2.positions import integer_ids, is_integer
from dflash2.target import misfits
from dflash2.width import AutoWidth, RoundCosts

__all__ = ["Generation", "GenerationStats", "check_pair", "check_streamer", "generate", "right_aligned", "round_costs"]

#: What rounds of each pair cost here, for calls to come.
_costs: WeakKeyDictionary[DFlash2Drafter, dict[Any, RoundCosts]] = WeakKeyDictionary()


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
    prompts, lengths = right_aligned(input_ids, attention_mask, max_new_tokens)
    auto = num_draft_tokens == "auto"
    k: Any = drafter.config.max_draft_tokens if auto or num_draft_tokens is None else num_draft_tokens
    _check_sampling(temperature, top_p, top_k, k, drafter.config.max_draft_tokens)
    if auto and seed is not None and temperature > 0:
        raise ValueError(
            f"seed={seed} with num_draft_tokens='auto': its widths depend on the clock, so no seed makes sampling "
            "repeatable. Give a number of drafts, or leave the seed out."
        )
    check_streamer(streamer, len(input_ids))
    check_pair(target, drafter)
    _check_range(target, prompts)
    stops = _stop_ids(target, eos_token_id)
    generators = _generators(seed, input_ids.device)
    auto_width = AutoWidth(round_costs(target, drafter)) if auto else None
    sampling = (temperature, top_p, top_k)
    loop = DecodingLoop(target, drafter, StopIds(stops), max_new_tokens, sampling, k, auto_width, generators, streamer)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    sequences, requests = loop.answer(input_ids, prompts, lengths, _pad_id(target, stops))
    return Generation(sequences, [r.lengths for r in requests], loop.stats)


def check_streamer(streamer: Any, requests: int) -> None:
    """Refuse a streamer beside several requests."""
    if streamer is not None and requests != 1:
        raise ValueError(f"a streamer takes one request, input_ids has {requests}. Leave it out, or loop.")


def round_costs(target: Any, drafter: DFlash2Drafter) -> RoundCosts:
    """What was learned of this pair, as it is now, on this device and with as many threads."""
    setting = (ref(target), target.dtype, drafter.dtype, drafter.device, torch.get_num_threads())
    return _costs.setdefault(drafter, {}).setdefault(setting, RoundCosts())


def right_aligned(input_ids: Tensor, attention_mask: Tensor | None, budget: int) -> tuple[Tensor, list[int]]:
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


def check_pair(target: Any, drafter: DFlash2Drafter) -> None:
    """Refuse a drafter that was trained for another target, and bind it if it is not bound."""
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
