"""The target's output head as the drafter reads it: the C best tokens per row, and nothing of its own."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash2.errors import ConfigError
from dflash2.int8_linear import Int8Weight
from dflash2.ops.dense_topk import dense_topk
from dflash2.ops.int8_head import int8_head, int8_head_top
from dflash2.ops.int8_rows import quantize_rows
from dflash2.ops.top_candidates import top_candidates

__all__ = ["DenseLMHead", "Int8LMHead", "LMHead", "OpaqueLMHead", "as_lm_head"]

#: Up to so many rows MKL multiplies fp32 faster with the weight as the left factor: 49,152 x 576 by 3 rows takes 4 to
#: 9 ms and not 35, by 7 rows 8 to 19 and not 25 to 35 (one thread, AMD EPYC); with 16 rows it is slower.
FEW_ROWS = 8

_log = logging.getLogger(__name__)


class LMHead(Protocol):
    """What the drafter needs of a head. ``vocab_size`` counts real tokens; padded rows are never returned."""

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """``[N, H]`` -> raw logits ``[N, vocab_size]``, before multiplier and softcap."""
        ...

    def top(self, hidden: Tensor, vocab_size: int, count: int) -> tuple[Tensor, Tensor]:
        """``[N, H]`` -> the ``count`` best ids and raw fp32 logits, ``[N, count]``, ordered as by `top_candidates`."""
        ...


class _TopFromLogits:
    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        raise NotImplementedError

    def top(self, hidden: Tensor, vocab_size: int, count: int) -> tuple[Tensor, Tensor]:
        return top_candidates(self.logits(hidden, vocab_size), count)


class DenseLMHead(_TopFromLogits):
    """A 16- or 32-bit weight ``[V', H]``, V' >= V, shared with its owner; tied embeddings are one of these."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        _refuse_zeros(weight)
        self.weight, self.bias = weight, bias

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """See `LMHead`; in the weight's dtype."""
        bias = None if self.bias is None else self.bias[:vocab_size]
        hidden, weight = hidden.to(self.weight.dtype), self.weight[:vocab_size]
        if bias is None and hidden.device.type == "cpu" and hidden.dtype == torch.float32 and len(hidden) <= FEW_ROWS:
            return (weight @ hidden.T).T.contiguous()
        return F.linear(hidden, weight, bias)

    def top(self, hidden: Tensor, vocab_size: int, count: int) -> tuple[Tensor, Tensor]:
        """See `LMHead`. A 16-bit weight on a GPU: from fp32 sums that are never written; else from `logits`.

        Processors multiply 16-bit numbers into 16-bit results (a head of 49,152 x 576: 8 ms; widened first, 400 ms).
        """
        if not self.weight.is_cuda or self.weight.dtype not in (torch.float16, torch.bfloat16):
            return super().top(hidden, vocab_size, count)
        return dense_topk(hidden.to(self.weight.dtype), self.weight, self.bias, vocab_size=vocab_size, count=count)


class OpaqueLMHead(_TopFromLogits):
    """Any callable ``[N, H] -> [N, V']``: packed or quantised heads that have no weight to share."""

    def __init__(self, call: Callable[[Tensor], Tensor]):
        self.call = call

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """See `LMHead`; in whatever dtype the callable returns."""
        logits = self.call(hidden)
        if logits.dim() != 2 or logits.shape[0] != hidden.shape[0] or logits.shape[1] < vocab_size:
            raise ConfigError(
                f"lm_head gave {list(logits.shape)} for {list(hidden.shape)}: expected [{hidden.shape[0]}, V'] with "
                f"V' >= vocab_size={vocab_size}. It belongs to another target."
            )
        return logits[:, :vocab_size]


class Int8LMHead(Int8Weight):
    """Int8 weight, symmetric, one scale per output row, exact sums (`dflash2.ops.int8_head`). For target and drafter.

    As a module it takes the place of a target's ``lm_head``. A row's result is the same to the bit whatever the number
    of rows and the device.

    Attributes:
        weight: int8 ``[V', H]``.
        scale: fp32 ``[V']``; ``logit = scale * (weight . x) + bias``.
        bias: ``[V']`` or None.
        freed_bytes: what `from_linear` released of the head this one was made from; 0 if that was kept.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None):
        super().__init__(weight, scale, bias)
        self.freed_bytes = 0

    @classmethod
    def from_linear(cls, linear: nn.Linear, free_source: bool = False) -> Int8LMHead:
        """Quantise a head.

        Args:
            linear: ``[V', H]`` with or without bias; a tied embedding module is one without.
            free_source: release the 16-bit weight afterwards; ``linear`` is then empty and must be replaced. The log,
                the printed module and ``freed_bytes`` say how much that was. The bias is kept, and shared.

        Raises:
            ConfigError: the weight is all zeros or not finite, or is to be freed while something else still reads it.
        """
        source = linear.weight
        if not source.is_floating_point() or not bool(source.any()):
            raise ConfigError("the head's weight is all zeros or already integers: load the 16-bit head first.")
        others = _other_owners(linear) if free_source else 0
        if others:
            raise ConfigError(
                f"free_source=True: {others} other owner(s) read this weight (a tied embedding? a bound drafter? a "
                "bias in the same memory?), so it cannot be freed. Use free_source=False."
            )
        weight, scale = quantize_rows(source)
        if not bool(scale.isfinite().all()):
            raise ConfigError("the head's weight holds NaN or infinity: the file it came from is damaged.")
        bias = getattr(linear, "bias", None)
        head = cls(weight, scale, None if bias is None else bias.detach())
        if free_source:
            linear.weight = nn.Parameter(source.new_empty(0, source.shape[1]), requires_grad=False)
            head.freed_bytes = source.untyped_storage().nbytes()
            _log.info("lm_head: %s freed: %s", source.dtype, head.extra_repr())
        return head

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        rows, width = self.weight.shape
        kept = self.weight.nbytes + self.scale.nbytes
        return f"{rows} x {width}, {kept:,} bytes" + (f", {self.freed_bytes:,} freed" if self.freed_bytes else "")

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` -> logits ``[..., V']`` in hidden's dtype."""
        logits = self.logits(hidden.reshape(-1, hidden.shape[-1]), self.weight.shape[0])
        return logits.to(hidden.dtype).view(*hidden.shape[:-1], logits.shape[-1])

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """See `LMHead`; fp32."""
        return int8_head(hidden, self.weight, self.scale, self.bias, vocab_size=vocab_size)

    def top(self, hidden: Tensor, vocab_size: int, count: int) -> tuple[Tensor, Tensor]:
        """See `LMHead`; on a GPU no logits are written."""
        return int8_head_top(hidden, self.weight, self.scale, self.bias, vocab_size=vocab_size, count=count)


def _other_owners(linear: nn.Linear) -> int:
    """What besides ``linear`` keeps its weight alive: other modules, bound drafters, tensors over the same memory."""
    gc.collect()
    holders = [r for r in gc.get_referrers(linear.weight) if r is not linear._parameters]
    return len([r for r in holders if not isinstance(r, FrameType)]) + len(_sharing_memory(linear.weight))


def _sharing_memory(weight: Tensor) -> list[Tensor]:
    own, device, start = id(weight), weight.device, weight.untyped_storage().data_ptr()
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and id(t) != own]
    strided = [t for t in tensors if t.device == device and t.layout == torch.strided]
    return [t for t in strided if t.untyped_storage().data_ptr() == start]


def _refuse_zeros(weight: Tensor) -> None:
    if weight.device.type != "meta" and not bool(weight.any()):
        raise ConfigError(
            "the head's weight is all zeros: it was never loaded. For a wrapped or multimodal target pass the "
            "language model's own head."
        )


def as_lm_head(head: Any) -> LMHead:
    """Whatever a target offers as its head: a weight, a linear or (tied) embedding module, an `LMHead`, a callable.

    Raises:
        ConfigError: none of these, or a zero weight.
    """
    if hasattr(head, "top") and hasattr(head, "logits"):
        return head
    if isinstance(head, Tensor) and not head.is_floating_point():
        raise ConfigError(f"lm_head is a {head.dtype} weight: an integer head needs its scales, as in Int8LMHead.")
    if isinstance(head, Tensor):
        return DenseLMHead(head)
    if type(head) is nn.Linear or isinstance(head, nn.Embedding):  # tied: the rows as they are
        return DenseLMHead(head.weight, getattr(head, "bias", None))
    if callable(head):
        weight = getattr(head, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():
            _refuse_zeros(weight)
        return OpaqueLMHead(head)
    raise ConfigError(
        f"lm_head is a {type(head).__name__}: expected a weight, a module or a callable [N, H] -> [N, V]."
    )
