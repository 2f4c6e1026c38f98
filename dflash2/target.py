"""What the loop needs of a Transformers causal LM: its layers' outputs, its tables, and a cache that can go back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash2.errors import ConfigError

__all__ = ["TargetRunner", "decoder_layers"]


def decoder_layers(target: nn.Module) -> nn.ModuleList:
    """The target's decoder layers, through wrappers.

    Raises:
        ConfigError: there is no module with a list of ``layers``.
    """
    decoder = getattr(target, "get_decoder", lambda: target)()
    for module in (decoder, getattr(decoder, "model", None), getattr(decoder, "language_model", None)):
        layers = getattr(module, "layers", None) or getattr(module, "h", None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise ConfigError(
        f"{type(target).__name__} has no list of decoder layers: only decoder-only models can be drafted for."
    )


def refuse_state(target: Any, kinds: Sequence[str]) -> None:
    """Say that rejected drafts could not be taken out of this target's state."""
    raise ConfigError(
        f"{type(target).__name__} keeps state that cannot be rolled back ({', '.join(kinds) or 'of its own'}): "
        "rejected drafts would stay in it. Only targets whose every layer caches plain keys and values work."
    )


class TargetRunner:
    """Runs the target on chunks of tokens, keeps its cache, and hands out taps of the chosen layers only.

    All sequences of the batch share one cache, right-aligned: padding is on the left, the newest token at the end.

    Args:
        target: a Transformers causal LM.
        layer_ids: layers whose output is tapped; the last dimension of taps is their concatenation. Empty: no taps.
        mask: bool ``[R, S]``, the prompt's real tokens, right-aligned.
        last_positions: int64 ``[R]``; tokens beyond are not needed and are run at this position, since targets with
            learned positions have no more of them. Default: no limit.
    """

    def __init__(self, target: Any, layer_ids: Sequence[int], mask: Tensor, last_positions: Tensor | None = None):
        from transformers import DynamicCache

        kinds = set(getattr(target.config.get_text_config(), "layer_types", None) or [])
        if kinds - {"full_attention", "sliding_attention"}:
            refuse_state(target, sorted(kinds))
        self.target, self.layer_ids, self.mask = target, tuple(layer_ids), mask
        self.last_positions = last_positions
        self.cache = DynamicCache()
        accepted = inspect.signature(target.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.2x
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._taps: dict[int, Tensor] = {}

    def __enter__(self) -> TargetRunner:
        layers = decoder_layers(self.target)
        if self.layer_ids and max(self.layer_ids) >= len(layers):
            raise ConfigError(
                f"target_layer_ids={list(self.layer_ids)}: the target has only {len(layers)} layers. The drafter was "
                "trained for another target."
            )
        self._hooks = [layers[i].register_forward_hook(self._keep(i)) for i in set(self.layer_ids)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._taps[layer] = hidden.to(self.mask.device)  # a target may be spread over devices

        return hook

    def run(self, tokens: Tensor, mask: Tensor, last_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """One forward pass over new tokens.

        Args:
            tokens, mask: ``[R, n]``; rows of mask that are False are padding.
            last_only: logits of the last row only.

        Returns:
            logits ``[R, n or 1, V]`` and taps ``[R, n, T*H]`` (None without layers).
        """
        full = torch.cat((self.mask[:, : self.cache.get_seq_length()], mask), 1)
        positions = full.cumsum(1).sub(1).clamp_min(0)[:, -tokens.shape[1] :]
        if self.last_positions is not None:
            positions = positions.minimum(self.last_positions[:, None])
        more = {self._cache_argument: self.cache, **(self._last_only if last_only else {})}
        out = self.target(
            input_ids=tokens, attention_mask=full.to(torch.int64), position_ids=positions, use_cache=True, **more
        )
        self._check_cache(full.shape[1])
        self.mask = full
        taps = torch.cat([self._taps[i] for i in self.layer_ids], -1) if self.layer_ids else None
        self._taps.clear()
        return out.logits.to(self.mask.device), taps

    def _check_cache(self, length: int) -> None:
        """Rejected drafts must leave the cache: that takes plain keys and values for every layer."""
        kinds = {type(layer).__name__ for layer in self.cache.layers}
        if kinds != {"DynamicLayer"} or self.cache.get_seq_length() != length:
            refuse_state(self.target, sorted(kinds))

    def keep(self, rows: Tensor, lengths: Tensor) -> None:
        """Drop finished requests and each remaining one's rejected rows.

        Args:
            rows: int64 ``[R']``, requests to keep, ascending.
            lengths: int64 ``[R']``, how many of the newest cached rows to drop for each.
        """
        if self.last_positions is not None:
            self.last_positions = self.last_positions[rows]
        width = self.mask.shape[1]
        real = self.mask[rows].sum(1) - lengths
        new_width = int(real.max())
        everyone = len(rows) == self.mask.shape[0]
        if everyone and bool((lengths == lengths[0]).all()):
            if drop := int(lengths[0]):
                self.cache.crop(-drop)  # negative: how many to remove, in every release
            self.mask = self.mask[:, : width - drop]
            return
        # Right-align again: slot j of the new cache holds what is (new_width - j) rows before the request's end.
        source = torch.arange(width - new_width, width, device=rows.device)[None] - lengths[:, None]
        kept = source.clamp_min(0)
        for layer in self.cache.layers:
            layer.keys = _gather_rows(layer.keys, rows, kept)
            layer.values = _gather_rows(layer.values, rows, kept)
        self.mask = self.mask[rows].gather(1, kept) & (source >= 0)


def _gather_rows(cached: Tensor, rows: Tensor, source: Tensor) -> Tensor:
    """``cached [R, heads, S, hd]`` -> ``[R', heads, S', hd]``."""
    index = source[:, None, :, None].expand(-1, cached.shape[1], -1, cached.shape[3])
    return cached[rows].gather(2, index)
