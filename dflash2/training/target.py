"""The frozen target: one pass over packed documents gives taps and final hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash2.config import SLIDING
from dflash2.errors import ConfigError
from dflash2.loading import load_target
from dflash2.target import decoder_layers, tapped

__all__ = ["FrozenTarget", "document_mask"]

FULL = "full_attention"
#: Name under which Transformers finds `_spans_forward`; with "flash" in it, it would look for another package.
SPANS = "spans_of_keys"


def document_mask(document: Tensor, window: int | None = None) -> Tensor:
    """Causal, and closed to other documents. Padding sees itself, so that no row of the softmax is empty.

    Args:
        document: int64 ``[R, S]``, ordinal per token.
        window: W of a sliding layer, counting the token itself; None for full attention.

    Returns:
        bool ``[R, 1, S, S]``.
    """
    same = document.unsqueeze(-1) == document.unsqueeze(-2)
    seen = same.tril() if window is None else same.tril().triu(1 - window)
    return seen.unsqueeze(1)


class FrozenTarget:
    """A Transformers causal LM that is only read.

    Args:
        model: the LM, in evaluation mode on its device.
        layer_ids: decoder layers whose output is tapped.

    Raises:
        ConfigError: its logits are not its final state times a matrix, or documents in one row would see each other.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]):
        self.model, self.layer_ids = model.eval().requires_grad_(False), tuple(layer_ids)
        self.decoder = model.get_decoder()
        head = model.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise ConfigError("target: its output head is missing or has a bias, which is not implemented.")
        odd = [
            n for n in ("final_logit_softcapping", "logit_scale", "logits_scaling") if getattr(model.config, n, None)
        ]
        if odd:
            raise ConfigError(
                f"target: {odd} changes its logits after the head, which distillation does not implement."
            )
        self.head: Tensor = head.weight
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.windows = _windows(model.config)
        self.fast, self._tokens = False, 0
        model.set_attn_implementation("sdpa")

    @classmethod
    def from_pretrained(cls, name: str, layer_ids: Sequence[int], *, dtype: torch.dtype, device: str) -> FrozenTarget:
        """Load a target by name, folder or hub id, as `load_target` does."""
        model, _ = load_target(name, torch.device(device), dtype)
        return cls(model, layer_ids)

    def speed_up(self, tokens: int) -> None:
        """From now on attend by ranges (`attend_spans`) and run compiled layers, in passes filled up to so many tokens.

        For GPUs. Hooks on parts of a layer are lost.
        """
        self.fast, self._tokens = True, tokens
        _register_spans()
        self.model.set_attn_implementation(SPANS)
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return decoder_layers(self.model)

    @torch.no_grad()
    def __call__(self, tokens: Tensor, positions: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
        """Packed rows in, flat states out.

        Args:
            tokens, positions, document: int64 ``[R, S]``.

        Returns:
            taps ``[R*S, T*H]`` and the states that the head reads (after the final norm) ``[R*S, H]``.
        """
        size = tokens.numel()
        if self.fast:
            tokens, positions, document = self._one_row(tokens, positions, document)
        masks = {kind: self._mask(document, window) for kind, window in self.windows.items()}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        with tapped(self.model, self.layer_ids) as taps:
            out = self.decoder(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False)
        joined = torch.cat([taps[i] for i in self.layer_ids], dim=-1)
        return joined.flatten(0, 1)[:size], out.last_hidden_state.flatten(0, 1)[:size]

    def _mask(self, document: Tensor, window: int | None) -> Any:
        if not self.fast:
            return document_mask(document, window)
        from dflash2.training.spans import document_spans, span_mask

        return span_mask([document_spans(document.flatten(), window)], document.numel())

    def _one_row(self, *arrays: Tensor) -> list[Tensor]:
        """All rows one after the other, filled up to the longest seen: one shape to compile for."""
        self._tokens = max(self._tokens, arrays[0].numel())
        missing = self._tokens - arrays[0].numel()
        return [F.pad(x.flatten(), (0, missing), value=fill)[None] for x, fill in zip(arrays, (0, 0, -1), strict=True)]


def _windows(config: Any) -> dict[str, int | None]:
    """Kinds of attention layers, and the window of each."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or [FULL if window is None else SLIDING])
    if kinds - {FULL, SLIDING}:
        raise ConfigError(
            f"target: layers of kind {sorted(kinds - {FULL, SLIDING})} carry state from one document of a row into the "
            "next. Only full and sliding attention can be trained on packed documents."
        )
    return {kind: window if kind == SLIDING else None for kind in sorted(kinds)}


def _register_spans() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(SPANS, _spans_forward)


def _spans_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as Transformers calls it: heads before rows in, rows before heads out."""
    from dflash2.training.spans import attend_spans

    odd = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if odd:
        raise ConfigError(f"target: its attention has {odd}, which the fast path does not implement. Set fast=false.")
    return attend_spans(query, key, value, attention_mask, scaling).transpose(1, 2), None
