"""`append`, `propose`, and a round of both, as CUDA graphs for every batch size: a replay costs one launch.

Graphs read and write fixed memory. What changes from call to call is copied into it before a replay, and results are
copied out after it; a batch smaller than its graph is filled up with requests of the padding slot, which fit nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from dflash2.proposal import Proposal

__all__ = ["CAPTURED_BATCHES", "CapturedDrafting"]

#: Powers of two: a batch is filled up to less than twice its size.
CAPTURED_BATCHES = (1, 2, 4, 8, 16, 32, 64)

#: Runs before a capture: kernels are compiled and libraries set up, which a capture cannot hold.
WARM_UPS = 2


class _Inputs:
    """What the graphs of one size read: they run one after the other, so that they can share it.

    Args:
        size: requests. One more sequence takes the rows that fill up the taps.
        k: drafts per request.
        taps_like: an empty tensor ``[0, T*H]``.
        padding_slot: of requests that are not there.
    """

    def __init__(self, size: int, k: int, taps_like: Tensor, padding_slot: int):
        def ids(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=taps_like.device)

        self.tensors = {
            "slots": ids(size + 1, value=padding_slot),
            "starts": ids(size + 1),
            "lengths": ids(size + 1),
            "valid_lengths": ids(size + 1),
            "anchors": ids(size),
            "bits": ids(size, k),
            "temperature": torch.ones(size, dtype=torch.float32, device=taps_like.device),
            "taps": taps_like.new_zeros(size * (k + 1), taps_like.shape[1]),
        }
        self._padding = {"slots": padding_slot, "starts": 0, "lengths": 0, "valid_lengths": 0, "anchors": 0}
        self._filled = (-1, -1)  # requests and rows of taps; what lies behind them is padding
        self._heads: dict[str, Tensor] = {}

    def of(self, names: Collection[str], requests: int | None = None) -> dict[str, Tensor]:
        """Those inputs, whole, or so many requests of each."""
        return {n: self.tensors[n][:requests] for n in names}

    def put(self, values: dict[str, Tensor], rows: int | None = None) -> None:
        """Copy values over the start of inputs. ``rows``: of taps; the last sequence's are those that are missing."""
        requests = len(values["slots"])
        if self._filled != (requests, self._filled[1] if rows is None else rows):
            self._fill_up(requests, len(self.tensors["taps"]) if rows is None else rows)
        _copy([self._heads[n] for n in values], list(values.values()))

    def _fill_up(self, requests: int, rows: int) -> None:
        for name, value in self._padding.items():
            self.tensors[name][requests:] = value
        self.tensors["lengths"][-1] = len(self.tensors["taps"]) - rows
        self._heads = self.of(self.tensors.keys() - {"taps"}, requests) | {"taps": self.tensors["taps"][:rows]}
        self._filled = (requests, rows)


@dataclass
class _Graph:
    """One captured call, and the memory it writes: the next replay overwrites that."""

    graph: torch.cuda.CUDAGraph
    outputs: Any


class CapturedDrafting:
    """Graphs for one drafter and one KV.

    Args:
        weights: what the graphs read; they serve as long as each of these lies where it lay.
        propose: ``(slots, starts, anchors, temperature or None, bits or None) -> Proposal``.
        append: ``(slots, taps, starts, lengths, valid_lengths) -> None``.
        batch_sizes: sizes to capture, each >= 1.
        k: drafts per request.
        taps_like: an empty tensor ``[0, T*H]`` of the taps' dtype, on the device.
        padding_slot: the slot of requests that are not there.

    Attributes:
        nbytes: what recording made torch reserve on the device: the graphs' own memory, and what warming up left.
    """

    def __init__(
        self, weights: Sequence[Tensor], propose: Callable[..., Proposal], append: Callable[..., None],
        batch_sizes: Sequence[int], k: int, taps_like: Tensor, padding_slot: int,
    ):  # fmt: skip
        self.k = k
        self._addresses = [w.data_ptr() for w in weights]
        self._pool = torch.cuda.graph_pool_handle()
        self._inputs: dict[int, _Inputs] = {}
        self._append: dict[int, _Graph] = {}
        self._propose: dict[tuple[int, bool], _Graph] = {}
        self._round: dict[tuple[int, bool], _Graph] = {}
        device = taps_like.device
        reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0

        def both(appended: dict[str, Tensor], drafted: dict[str, Tensor | None], n: int) -> Proposal:
            append(**appended)
            out = propose(**drafted | {"starts": (appended["starts"] + appended["valid_lengths"])[:n]})
            return replace(out, tokens=out.tokens * out.valid[:, None])

        for size in sorted(set(batch_sizes), reverse=True):  # the largest first: the others fit into its memory
            inputs = self._inputs[size] = _Inputs(size, k, taps_like, padding_slot)
            appended = inputs.of(("slots", "taps", "starts", "lengths", "valid_lengths"))
            self._append[size] = self._capture(append, **appended)
            for sampled in (False, True):
                drafted: dict[str, Any] = inputs.of(("slots", "starts", "anchors", "temperature", "bits"), size)
                drafted |= {} if sampled else {"temperature": None, "bits": None}
                self._propose[size, sampled] = self._capture(propose, **drafted)
                self._round[size, sampled] = self._capture(both, appended=appended, drafted=drafted, n=size)
        self.nbytes = (torch.cuda.memory_reserved(device) if device.type == "cuda" else 0) - reserved

    def _capture(self, call: Callable[..., Any], **inputs: Any) -> _Graph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                call(**inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = call(**inputs)
        return _Graph(graph, outputs)

    def serves(self, weights: Sequence[Tensor]) -> bool:
        """Whether the graphs read these weights, and these where they lie now."""
        return self._addresses == [w.data_ptr() for w in weights]

    def propose(
        self, slots: Tensor, starts: Tensor, anchors: Tensor, temperature: Tensor | None, bits: Tensor | None
    ) -> Proposal | None:
        """What `DFlash2Drafter.propose` returns, or None for a batch larger than any that was captured."""
        size = self._size(len(slots))
        if size is None:
            return None
        values = {"slots": slots, "starts": starts, "anchors": anchors}
        self._inputs[size].put(values | _sampling(temperature, bits))
        return _replay(self._propose[size, temperature is not None], len(slots))

    def append(self, slots: Tensor, taps: Tensor, starts: Tensor, lengths: Tensor, valid_lengths: Tensor) -> bool:
        """Append by replay; False where no graph is large enough."""
        size = self._size(len(slots), len(taps))
        if size is None:
            return False
        values = {"slots": slots, "taps": taps, "starts": starts, "lengths": lengths, "valid_lengths": valid_lengths}
        self._inputs[size].put(values, len(taps))
        self._append[size].graph.replay()
        return True

    def round(
        self, slots: Tensor, taps: Tensor, starts: Tensor, lengths: Tensor, valid_lengths: Tensor, anchors: Tensor,
        temperature: Tensor | None, bits: Tensor | None,
    ) -> Proposal | None:  # fmt: skip
        """`append`, and `propose` at the positions after it, with tokens 0 where a sequence cannot draft.

        None where no graph is large enough: nothing has happened then.
        """
        size = self._size(len(slots), len(taps))
        if size is None:
            return None
        values = {"slots": slots, "taps": taps, "starts": starts, "lengths": lengths, "valid_lengths": valid_lengths}
        self._inputs[size].put(values | {"anchors": anchors} | _sampling(temperature, bits), len(taps))
        return _replay(self._round[size, temperature is not None], len(slots))

    def _size(self, requests: int, rows: int = 0) -> int | None:
        """Of the smallest graphs with room for these."""
        if requests == 0:
            return None
        return min((s for s in self._inputs if s >= requests and s * (self.k + 1) >= rows), default=None)


def _sampling(temperature: Tensor | None, bits: Tensor | None) -> dict[str, Tensor]:
    return {} if temperature is None or bits is None else {"temperature": temperature, "bits": bits}


def _replay(graph: _Graph, requests: int) -> Proposal:
    """Run it, and copy what it proposed for the first requests."""
    graph.graph.replay()
    out = graph.outputs
    results = [t[:requests] for t in (out.tokens, out.valid, out.candidates, out.q) if t is not None]
    own = [torch.empty_like(t) for t in results]
    _copy(own, results)
    tokens, valid, *more = own
    candidates = None if out.candidates is None else more.pop(0)
    return Proposal(tokens, candidates, None if out.q is None else more.pop(0), valid)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Integers go in one launch, not in one for each tensor; taps are large, and that launch is slow for them."""
    integers = [t.dtype == torch.int64 for t in targets]
    torch._foreach_copy_(list(compress(targets, integers)), list(compress(sources, integers)))
    for target, source, done in zip(targets, sources, integers, strict=True):
        if not done:
            target.copy_(source)
