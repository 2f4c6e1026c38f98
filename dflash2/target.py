"""What the loop needs of a Transformers causal LM: its layers' outputs, its tables, and a cache that can go back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dflash2.config import MAX_PADDED_ROWS, DFlash2Config
from dflash2.errors import ConfigError

__all__ = ["TargetRunner", "decoder_layers", "misfits", "tapped"]


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


def misfits(c: DFlash2Config, target_config: Any) -> list[str]:
    """Why a drafter cannot serve a target; empty if nothing speaks against it.

    Args:
        c: the drafter.
        target_config: the target's Transformers configuration.
    """
    t = target_config.get_text_config()
    found = []
    if t.hidden_size != c.hidden_size:
        found.append(f"hidden_size: drafter {c.hidden_size}, target {t.hidden_size}")
    if c.num_target_layers not in (None, t.num_hidden_layers):
        found.append(f"num_target_layers: drafter {c.num_target_layers}, target {t.num_hidden_layers}")
    if max(c.target_layer_ids) >= t.num_hidden_layers:
        found.append(f"target_layer_ids: {list(c.target_layer_ids)}, target has layers 0 to {t.num_hidden_layers - 1}")
    if not 0 <= t.vocab_size - c.vocab_size < MAX_PADDED_ROWS:
        padded = f"up to {MAX_PADDED_ROWS - 1} padded rows are fine"
        found.append(f"vocab_size: drafter {c.vocab_size}, target {t.vocab_size} ({padded})")
    return found


@contextmanager
def tapped(target: nn.Module, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """While open, every forward pass leaves the outputs of these decoder layers in the dictionary, and no others.

    Args:
        target: a causal LM.
        layer_ids: layer id L is the *output* of decoder layer L, the residual stream before any final norm.
    """
    layers, taps = decoder_layers(target), dict[int, Tensor]()

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            taps[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [layers[i].register_forward_hook(keep(i)) for i in set(layer_ids)]
    try:
        yield taps
    finally:
        for hook in hooks:
            hook.remove()


def refuse_state(target: Any, kinds: Sequence[str]) -> None:
    """Say that rejected drafts could not be taken out of this target's state."""
    raise ConfigError(
        f"{type(target).__name__} keeps state that cannot be rolled back ({', '.join(kinds) or 'of its own'}): "
        "rejected drafts would stay in it. Only targets whose every layer caches plain keys and values work."
    )


class TargetRunner:
    """Runs the target on chunks of tokens, keeps its cache, and hands out taps of the chosen layers only.

    All requests share one cache, right-aligned: padding is on the left, the newest token at the end. Lengths are
    known to the host, so nothing here waits for the device.

    Args:
        target: a Transformers causal LM.
        layer_ids: layers whose output is tapped; the last dimension of taps is their concatenation. Empty: no taps.
        padding: per request, how many of the first tokens are padding.
        last_positions: per request; tokens beyond are not needed and are run at this position, since targets with
            learned positions have no more of them.
        device: where tokens are, and where logits and taps go (a target may be spread over several).

    Raises:
        ConfigError: the target keeps state that cannot be rolled back.
    """

    def __init__(
        self,
        target: Any,
        layer_ids: Sequence[int],
        padding: Sequence[int],
        last_positions: Sequence[int],
        device: torch.device,
    ):
        from transformers import DynamicCache

        kinds = set(getattr(target.config.get_text_config(), "layer_types", None) or [])
        if kinds - {"full_attention", "sliding_attention"}:
            refuse_state(target, sorted(kinds))
        self.target, self.layer_ids, self.device, self.width = target, tuple(layer_ids), device, 0
        self.cache = DynamicCache()
        self._set_rows(list(padding), list(last_positions))
        accepted = inspect.signature(target.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.2x
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def _set_rows(self, padding: list[int], last_positions: list[int]) -> None:
        self.padding, self.last_positions = padding, last_positions
        self._rows = torch.tensor([padding, last_positions], device=self.device)[..., None]

    def run(self, tokens: Tensor, last_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """One forward pass over new tokens.

        Args:
            tokens: int64 ``[R, n]``.
            last_only: logits of the last row only.

        Returns:
            logits ``[R, n or 1, V]`` and taps ``[R, n, T*H]`` (None without layers).
        """
        width, n = self.width + tokens.shape[1], tokens.shape[1]
        slots, (padding, last) = torch.arange(width, device=self.device), self._rows
        positions = (slots[-n:] - padding).clamp_min(0).minimum(last)
        more = {self._cache_argument: self.cache, **(self._last_only if last_only else {})}
        mask = (slots >= padding).to(torch.int64)
        with tapped(self.target, self.layer_ids) as taps:
            out = self.target(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True, **more)
        self.width = width
        self._check_cache()
        joined = [taps[i].to(self.device) for i in self.layer_ids]
        return out.logits.to(self.device), torch.cat(joined, -1) if joined else None

    def _check_cache(self) -> None:
        """Rejected drafts must leave the cache: that takes plain keys and values for every layer."""
        kinds = {type(layer).__name__ for layer in self.cache.layers}
        if kinds != {"DynamicLayer"} or self.cache.get_seq_length() != self.width:
            refuse_state(self.target, sorted(kinds))

    def keep(self, rows: Sequence[int], drop: Sequence[int]) -> None:
        """Drop finished requests and each remaining one's rejected tokens.

        Args:
            rows: requests to keep, ascending.
            drop: for each of them, how many of its newest tokens to drop.
        """
        if len(rows) == len(self.padding) and len(set(drop)) == 1:
            if drop[0]:
                self.cache.crop(-drop[0])  # negative: how many to remove, in every release
            self.width -= drop[0]
            return
        real = [self.width - self.padding[r] - d for r, d in zip(rows, drop, strict=True)]
        width = max(real)
        # Right-align again: slot j of the new cache holds what is (width - j) tokens before the request's end.
        chosen, dropped = torch.tensor([list(rows), list(drop)], device=self.device)
        source = torch.arange(self.width - width, self.width, device=self.device) - dropped[:, None]
        for layer in self.cache.layers:
            layer.keys = _gather_rows(layer.keys, chosen, source)
            layer.values = _gather_rows(layer.values, chosen, source)
        self.width = width
        self._set_rows([width - n for n in real], [self.last_positions[r] for r in rows])


def _gather_rows(cached: Tensor, rows: Tensor, source: Tensor) -> Tensor:
    """``cached [R, heads, S, hd]`` -> ``[R', heads, S', hd]``; sources below 0 are padding and may hold anything."""
    rows, source = rows.to(cached.device), source.to(cached.device).clamp_min(0)
    index = source[:, None, :, None].expand(-1, cached.shape[1], -1, cached.shape[3])
    return cached[rows].gather(2, index)
