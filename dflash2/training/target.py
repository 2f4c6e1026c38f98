"""The frozen target: one pass over packed documents gives taps and final hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash2.errors import ConfigError
from dflash2.loading import load_target
from dflash2.target import decoder_layers, tapped

__all__ = ["FrozenTarget", "document_mask"]


def document_mask(document: Tensor) -> Tensor:
    """Causal, and closed to other documents. Padding sees itself, so that no row of the softmax is empty.

    Args:
        document: int64 ``[R, S]``, ordinal per token.

    Returns:
        bool ``[R, 1, S, S]``.
    """
    same = document.unsqueeze(-1) == document.unsqueeze(-2)
    return same.tril().unsqueeze(1)


class FrozenTarget:
    """A Transformers causal LM that is only read.

    Args:
        model: the LM, in evaluation mode on its device.
        layer_ids: decoder layers whose output is tapped.
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

    @classmethod
    def from_pretrained(cls, name: str, layer_ids: Sequence[int], *, dtype: torch.dtype, device: str) -> FrozenTarget:
        """Load a target by name, folder or hub id, as `load_target` does."""
        model, _ = load_target(name, torch.device(device), dtype)
        model.set_attn_implementation("sdpa")  # `document_mask` is boolean, which other implementations read otherwise
        return cls(model, layer_ids)

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
        mask = document_mask(document)
        with tapped(self.model, self.layer_ids) as taps:
            out = self.decoder(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False)
        joined = torch.cat([taps[i] for i in self.layer_ids], dim=-1)
        return joined.flatten(0, 1), out.last_hidden_state.flatten(0, 1)
