"""What people would otherwise run, on the same weights, shapes and card."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.bench.rounds import Round, Target, random_taps
from dflash2.drafter import DFlash2Drafter
from dflash2.lm_head import Int8LMHead

__all__ = ["PublishedRound", "compiled_int8_head", "dense_head", "reference_round", "time_limit"]

#: For a peer that has to be compiled.
COMPILE_S = 40.0


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` inside when it takes longer. Only the main thread can be interrupted; others are not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def dense_head(x: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The library's matrix product, all logits written, and ``torch.topk`` over them."""
    values, ids = F.linear(x, weight).topk(count)
    return ids, values


def compiled_int8_head(x: Tensor, heads: Sequence[Int8LMHead], count: int) -> list[Callable[[], Any]]:
    """Weight-only int8 as it is written in torch and left to ``torch.compile``; the scale comes after the product.

    Returns:
        A call for each head.

    Raises:
        TimeoutError: compiling took too long.
    """

    def top(x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = (F.linear(x, weight.to(x.dtype)) * scale).topk(count)
        return ids, values

    compiled = torch.compile(top, dynamic=False)
    calls: list[Callable[[], Any]] = [partial(compiled, x, head.weight, head.scale) for head in heads]
    with time_limit(COMPILE_S):
        for call in calls:
            call()
    return calls


def reference_round(drafter: DFlash2Drafter, target: Target, context: int, *, compiled: bool) -> Round:
    """A round of our own definitions in torch, one sequence, 16-bit head; eagerly, or the network by ``torch.compile``.

    The convolutions and the walk over the candidates choose by themselves and stay kernels, of some microseconds each.

    Args:
        drafter: whose weights to use; it stays as it is.
        target: in 16 bits.
        context: tokens before the round.
        compiled: let ``torch.compile`` have the network.

    Raises:
        TimeoutError: compiling took too long.
    """
    plain, weight = copy(drafter), target.head.weight
    plain.backend = "torch"
    plain.bind_target(target.embedding, lambda x: F.linear(x, weight))
    run = Round(plain, 1, context, captured=False)
    if compiled:
        plain.compile(dynamic=False)
        with time_limit(COMPILE_S):
            run()
    return run


class PublishedRound:
    """A round of the published PyTorch modules (PyPI ``dflash``), one sequence, driven as its own loop drives them.

    Each call commits ``produced`` tokens, drafts a block and crops the cache back, so positions move on as in decoding;
    beyond a window the work stays the same. Weights are those of ``drafter``, shared.

    Args:
        drafter: in 16 bits.
        target: in 16 bits.
        context: tokens in the cache before the first call.

    Raises:
        ImportError: the package is not installed.
    """

    @torch.no_grad()
    def __init__(self, drafter: DFlash2Drafter, target: Target, context: int):
        import dflash.model as published
        from transformers import Qwen3Config

        self.published, self.config, self.target = published, drafter.config, target
        config = Qwen3Config(**drafter.config.to_dict())
        config._attn_implementation = "sdpa"
        with torch.device(drafter.device):
            self.model = getattr(published, drafter.config.architecture)(config).eval()
        names = {n: f"{n}.weight" if n.endswith("codebook") else n for n in drafter.state_dict()}
        self.model.load_state_dict({names[n]: t for n, t in drafter.state_dict().items()}, strict=True, assign=True)
        self.cache = published._make_cache(self.model.config)
        self.rows, self.produced = drafter.config.block_size, max(1, drafter.config.block_size // 2)
        self.anchor = torch.zeros(1, dtype=torch.int64, device=drafter.device)
        self.start = 0
        self.before: list[tuple[Tensor, Tensor]] = []
        self.taps = random_taps(drafter, context)
        self._draft(context)
        self.taps = random_taps(drafter, self.produced)

    def __call__(self) -> Any:
        """One round."""
        return self._draft(self.produced)

    @torch.no_grad()
    def _draft(self, new: int) -> Any:
        # A CUDA graph of this call reads these wherever it is replayed, after the cache has moved on.
        self.before = [(layer.keys, layer.values) for layer in self.cache.layers]
        self.start += new
        masks = self.anchor.new_full((self.rows - 1,), self.config.mask_token_id)
        block = torch.cat((self.anchor, masks))[None]
        hidden = self.model(
            target_hidden=self.taps[None],
            noise_embedding=F.embedding(block, self.target.embedding) * self.config.input_embedding_scale,
            position_ids=torch.arange(self.start - new, self.start + self.rows, device=self.anchor.device)[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.published._crop_to(self.cache, self.start)
        return self.model.propose(hidden[:, 1:], self.anchor, self.target.head, 0.0)
