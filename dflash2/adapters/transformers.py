"""Transformers: drafts inside ``model.generate``, and drafters through ``AutoModel``.

``model.generate(**inputs, custom_generate=dflash2.adapters.transformers.generate, drafter=drafter)``, with the usual
arguments: what they make of the target's distribution (penalties, masks, temperature, top-p) and where they end a
sequence holds, and the output is what `generate` gives without a drafter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, GenerationConfig, LogitsProcessorList, Qwen3Config, Qwen3Model, StoppingCriteriaList

from dflash2.decoding import DecodingLoop, Request
from dflash2.drafter import DFlash2Drafter
from dflash2.errors import ConfigError
from dflash2.generation import check_pair, check_streamer, right_aligned, round_costs
from dflash2.width import AutoWidth

__all__ = ["generate", "register"]

#: What `generate` of Transformers prepares for any decoder-only model, and this one has no use for.
PREPARED = {
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "cache",
    "past_key_values",
    "token_type_ids",
}
#: Settings of a generation config that ask for another kind of decoding.
OTHER_DECODING = (
    "num_beams",
    "num_beam_groups",
    "penalty_alpha",
    "guidance_scale",
    "dola_layers",
    "prompt_lookup_num_tokens",
)


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: DFlash2Drafter | None = None,
    num_draft_tokens: int | str | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """A decoding method for ``model.generate(custom_generate=...)``; not called by users themselves.

    Args:
        model: the target.
        input_ids: int64 ``[R, S]``.
        logits_processor, stopping_criteria, generation_config: prepared by ``model.generate``.
        drafter: trained for the target.
        num_draft_tokens: as in `dflash2.generate`.
        **model_kwargs: prepared by ``model.generate``; the attention mask is used.

    Returns:
        int64 ``[R, S + new]``, padded as ``model.generate`` does.

    Raises:
        ConfigError: no drafter, one for another target, or a kind of decoding that has no drafts.
    """
    streamer = _streamer_of_caller()
    if drafter is None:
        raise ConfigError("custom_generate=dflash2.adapters.transformers.generate needs drafter=..., a DFlash2Drafter.")
    _check_request(generation_config, model_kwargs, streamer, len(input_ids))
    check_pair(model, drafter)
    auto = num_draft_tokens == "auto"
    most = drafter.config.max_draft_tokens
    k: Any = most if auto or num_draft_tokens is None else num_draft_tokens
    if not isinstance(k, int) or not 0 <= k <= most:
        raise ConfigError(f"num_draft_tokens={k!r}: expected 0 to {most}, or 'auto'.")
    mask = model_kwargs.get("attention_mask")
    prompts, lengths = right_aligned(input_ids, mask, 1)
    budget = generation_config.max_length - input_ids.shape[1]
    sampled = bool(generation_config.do_sample)
    heat = generation_config.temperature if sampled and generation_config.temperature else float(sampled)
    loop = DecodingLoop(
        model, drafter, _Criteria(input_ids, stopping_criteria), budget, (float(sampled), 1.0, 0), k,
        AutoWidth(round_costs(model, drafter)) if auto else None,
        streamer=streamer,
        shape_logits=_Processors(input_ids, logits_processor) if logits_processor else None,
        draft_temperature=heat,
    )  # fmt: skip
    pad = generation_config._pad_token_tensor
    return loop.answer(input_ids, prompts, lengths, 0 if pad is None else int(pad))[0]


class _Criteria:
    """Stopping criteria, asked after every token as without drafts."""

    def __init__(self, prompts: Tensor, criteria: StoppingCriteriaList):
        self.prompts, self.criteria = prompts, criteria

    def __call__(self, request: Request, tokens: list[int]) -> tuple[list[int], bool]:
        row = _row(self.prompts, request, tokens)
        before = row.shape[1] - len(tokens)
        for i in range(len(tokens)):
            if bool(self.criteria(row[:, : before + i + 1], None).all()):
                return tokens[: i + 1], True
        return tokens, False


class _Processors:
    """Logits processors, shown for every row of a verify pass the tokens before it.

    Requests are at different lengths, and some processors know the rows of the batch by their index: so each is shown
    alone, in a batch of its copies.
    """

    def __init__(self, prompts: Tensor, processors: LogitsProcessorList):
        self.prompts, self.processors = prompts, processors

    def __call__(self, live: Sequence[Request], drafts: Tensor, logits: Tensor) -> Tensor:
        shaped = logits.float().clone()
        copies = len(self.prompts)
        for i, request in enumerate(live):
            row = _row(self.prompts, request, drafts[i].tolist()).expand(copies, -1)
            before = row.shape[1] - drafts.shape[1]
            for j in range(logits.shape[1]):
                scores = shaped[i, j].expand(copies, -1).clone()  # processors may write into them
                shaped[i, j] = self.processors(row[:, : before + j], scores)[request.row]
        return shaped


def _row(prompts: Tensor, request: Request, tokens: list[int]) -> Tensor:
    """``[1, n]``: the prompt with its padding, what was produced, and ``tokens``."""
    more = torch.tensor([[*request.produced, *tokens]], dtype=prompts.dtype, device=prompts.device)
    return torch.cat((prompts[request.row : request.row + 1], more), 1)


def _streamer_of_caller() -> Any:
    """The ``streamer`` given to ``model.generate``, which (in 5.17 to 5.24) does not hand it on to a custom method."""
    caller = sys._getframe(2)
    return caller.f_locals.get("streamer") if caller.f_code.co_name == "generate" else None


def _check_request(config: GenerationConfig, model_kwargs: dict[str, Any], streamer: Any, requests: int) -> None:
    off = (None, 1, 1.0, 0, 0.0)
    asked = [f"{n}={getattr(config, n)}" for n in OTHER_DECODING if getattr(config, n, None) not in off]
    if config.return_dict_in_generate:
        asked.append("return_dict_in_generate=True")
    if asked:
        raise ConfigError(
            f"{', '.join(asked)}: decoding with drafts knows greedy and sampled decoding to a tensor only."
        )
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length():
        raise ConfigError("a cache that already holds tokens: the drafter has not seen them. Give the whole prompt.")
    if unknown := sorted(k for k, v in model_kwargs.items() if k not in PREPARED and v is not None):
        raise ConfigError(f"model arguments {unknown} do not reach the target in decoding with drafts: text only.")
    check_streamer(streamer, requests)


class DFlash2DraftModel:
    """What `AutoModel` finds for a drafter's folder. `from_pretrained` gives a `DFlash2Drafter`."""

    @classmethod
    def from_pretrained(cls, path: str | Path, *_: Any, **kwargs: Any) -> DFlash2Drafter:
        """Args: path; of the keywords ``dtype`` (or ``torch_dtype``) and ``device_map`` (one device) are used."""
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
        if isinstance(dtype, str):
            dtype = None if dtype == "auto" else getattr(torch, dtype)
        device = kwargs.get("device_map") or "cpu"
        if not isinstance(device, str | int | torch.device) or device == "auto":
            raise ConfigError(f"device_map={device!r}: a drafter lies on one device, such as 'cuda'.")
        return DFlash2Drafter.from_pretrained(path, dtype=dtype, device=torch.device(device))


class DFlashDraftModel(DFlash2DraftModel):
    """The same for the first version, which the published layout names so."""


def register() -> None:
    """Let ``AutoModel.from_pretrained(folder)`` give the drafter, without remote code. Importing this module does it.

    The published layout says model type ``qwen3``; which class it is follows from ``architectures``, and Qwen3 itself
    stays what it is.
    """
    AutoModel.register(Qwen3Config, (Qwen3Model, DFlash2DraftModel, DFlashDraftModel), exist_ok=True)


register()
