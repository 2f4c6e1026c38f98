"""`append` and `propose` as CUDA graphs, one of each for every batch size: a replay costs one launch.

Graphs read and write fixed memory. What changes from call to call is copied into it before a replay, and results are
copied out after it; a batch smaller than its graph is filled up with requests of the padding slot, which fit nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash2.proposal import Proposal

__all__ = ["CAPTURED_BATCHES", "CapturedDrafting"]

#: Powers of two: a batch is filled up to less than twice its size.
CAPTURED_BATCHES = (1, 2, 4, 8, 16, 32, 64)

#: Runs before a capture: kernels are compiled and libraries set up, which a capture cannot hold.
WARM_UPS = 2


@dataclass
class _Graph:
    """One captured call with the memory it reads (``inputs``) and writes (``outputs``).

    ``padding`` says what fills the inputs behind the requests; ``tail`` how much of it is there now.
    """

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    outputs: Any
    padding: dict[str, int]
    tail: tuple[int, int] | None = None

    def replay(self, inputs: dict[str, Tensor], requests: int, rest: int = 0) -> Any:
        """Copy the requests' values over the start of each input and run; the next replay overwrites the outputs.

        ``rest`` rows belong to nobody: they are the last sequence's.
        """
        if self.tail != (requests, rest):
            for name, value in self.padding.items():
                self.inputs[name][requests:] = value
            if rest:
                self.inputs["lengths"][-1] = rest
            self.tail = (requests, rest)
        _copy([self.inputs[name][: value.shape[0]] for name, value in inputs.items()], list(inputs.values()))
        self.graph.replay()
        return self.outputs


class CapturedDrafting:
    """Graphs for one drafter and one KV.

    Args:
        weights: what the graphs read; they serve as long as each of these lies where it lay.
        propose: ``(slots, starts, anchors, temperature or None, noise or None) -> Proposal``.
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
        self._propose: dict[tuple[int, bool], _Graph] = {}
        self._append: dict[int, _Graph] = {}
        device = taps_like.device
        reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        for size in sorted(set(batch_sizes), reverse=True):  # the largest first: the others fit into its memory

            def ids(n: int, value: int = 0) -> Tensor:
                return torch.full((n,), value, dtype=torch.int64, device=device)

            inputs = {"slots": ids(size, padding_slot), "starts": ids(size), "anchors": ids(size)}
            sampled = inputs | {
                "temperature": torch.ones(size, dtype=torch.float32, device=device),
                "noise": torch.zeros(size, k, dtype=torch.float64, device=device),
            }
            padding = {"slots": padding_slot, "starts": 0, "anchors": 0}
            self._propose[size, False] = self._capture(propose, inputs | {"temperature": None, "noise": None}, padding)
            self._propose[size, True] = self._capture(propose, {n: t.clone() for n, t in sampled.items()}, padding)
            # One more sequence takes the rows that fill up the batch.
            more = {name: ids(size + 1) for name in ("starts", "lengths", "valid_lengths")}
            more |= {
                "slots": ids(size + 1, padding_slot),
                "taps": taps_like.new_zeros(size * (k + 1), taps_like.shape[1]),
            }
            padding = {"slots": padding_slot, "starts": 0, "lengths": 0, "valid_lengths": 0}
            self._append[size] = self._capture(append, more, padding)
        self.nbytes = (torch.cuda.memory_reserved(device) if device.type == "cuda" else 0) - reserved

    def _capture(
        self, call: Callable[..., Any], inputs: Mapping[str, Tensor | None], padding: dict[str, int]
    ) -> _Graph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                call(**inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = call(**inputs)
        return _Graph(graph, {n: t for n, t in inputs.items() if t is not None}, outputs, padding)

    def serves(self, weights: Sequence[Tensor]) -> bool:
        """Whether the graphs read these weights, and these where they lie now."""
        return self._addresses == [w.data_ptr() for w in weights]

    def propose(
        self, slots: Tensor, starts: Tensor, anchors: Tensor, temperature: Tensor | None, noise: Tensor | None
    ) -> Proposal | None:
        """What `DFlash2Drafter.propose` returns, or None for a batch larger than any that was captured."""
        n, sampled = slots.shape[0], temperature is not None
        size = min((s for s, _ in self._propose if s >= n), default=None)
        if size is None or n == 0:
            return None
        inputs = {"slots": slots, "starts": starts, "anchors": anchors}
        if temperature is not None and noise is not None:
            inputs |= {"temperature": temperature, "noise": noise}
        out = self._propose[size, sampled].replay(inputs, n)
        results = [t[:n] for t in (out.tokens, out.valid, out.candidates, out.q) if t is not None]
        own = [torch.empty_like(t) for t in results]
        _copy(own, results)
        tokens, valid, *more = own
        candidates = None if out.candidates is None else more.pop(0)
        return Proposal(tokens, candidates, None if out.q is None else more.pop(0), valid)

    def append(self, slots: Tensor, taps: Tensor, starts: Tensor, lengths: Tensor, valid_lengths: Tensor) -> bool:
        """Append by replay; False where no graph is large enough."""
        n, rows = slots.shape[0], taps.shape[0]
        size = min((s for s in self._append if s >= n and s * (self.k + 1) >= rows), default=None)
        if size is None or n == 0:
            return False
        inputs = {"slots": slots, "taps": taps, "starts": starts, "lengths": lengths, "valid_lengths": valid_lengths}
        self._append[size].replay(inputs, n, size * (self.k + 1) - rows)
        return True


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Integers go in one launch, not in one for each tensor; taps are large, and that launch is slow for them."""
    integers = [i for i, t in enumerate(targets) if t.dtype == torch.int64]
    torch._foreach_copy_([targets[i] for i in integers], [sources[i] for i in integers])
    for i in set(range(len(targets))) - set(integers):
        targets[i].copy_(sources[i])
