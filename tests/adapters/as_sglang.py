"""SGLang's worker under the scripted engine: its steps become SGLang's batches, without SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import Tensor

from dflash2.adapters.base import RequestDrafter
from dflash2.adapters.chunks import Chunk, Drafts
from dflash2.adapters.sglang import engine, worker
from dflash2.testing import NoHostReads, cpu_as_device

SLOTS = 16


class Mode:
    """``ForwardMode``."""

    def __init__(self, extend: bool):
        self.extend = extend

    def is_extend(self) -> bool:
        return self.extend

    def is_idle(self) -> bool:
        return False


class AsSGLang:
    """The worker, told of each chunk as SGLang would: an extension, or a pass over the anchor and all drafts.

    Args:
        core: what drafts.
        live: as with overlapped scheduling, where the host knows nothing of a verify pass when the next step begins.
        monkeypatch: puts a scripted target where SGLang's is.
    """

    def __init__(self, core: RequestDrafter, live: bool, monkeypatch):
        self.core, self.live = core, live
        self.worker = object.__new__(worker.Drafting)
        self.worker._begin(core, None, live=live, seed=0)
        self.worker.slots = worker.DraftSlots(core, SLOTS)
        self.worker.places = torch.arange(SLOTS * 512).view(SLOTS, 512)
        self.requests: dict[str, SimpleNamespace] = {}
        monkeypatch.setattr(engine, "prefill", lambda target, batch: self._result(batch))
        monkeypatch.setattr(engine, "verify", self._verify)
        monkeypatch.setattr(engine, "adjust", lambda *args: None)
        monkeypatch.setattr(engine, "next_input", lambda anchors, lengths: SimpleNamespace(bonus_tokens=anchors))
        monkeypatch.setattr(engine, "result", lambda **fields: SimpleNamespace(**fields))

    def forget(self, names: Sequence[str]) -> None:
        """SGLang marks its ``Req`` as finished, and says no more."""
        for name in names:
            if (request := self.requests.pop(name, None)) is not None:
                request.ended = True

    def step(self, chunks: Sequence[Chunk], taps: Tensor) -> Drafts:
        ends = torch.tensor([c.rows for c in chunks]).cumsum(0).tolist()
        told = [(i, c, taps[end - c.rows : end]) for i, (c, end) in enumerate(zip(chunks, ends, strict=True))]
        k = self.core.k
        tokens, drafted = torch.zeros(len(chunks), k, dtype=torch.int64), torch.zeros(len(chunks), dtype=torch.bool)
        verifies = {i: self._goes_on(c) for i, c, _ in told}
        for extend in (False, True):
            some = [t for t in told if verifies[t[0]] is not extend]
            if some:
                out = self._run([c for _, c, _ in some], [t for *_, t in some], extend)
                index = torch.tensor([i for i, *_ in some])
                tokens[index], drafted[index] = out
        return Drafts(tokens, drafted, None, None)

    def _goes_on(self, c: Chunk) -> bool:
        """Whether this is the pass over the drafts that the worker holds for the request."""
        r = self.requests.get(c.request)
        if r is None or r.next != c.start or c.rows != self.core.k + 1:
            return False
        return c.tokens[1:] == self.worker.slots.tokens[r.slot].tolist() and bool(self.worker.slots.drafted[r.slot])

    def _run(self, chunks: list[Chunk], taps: list[Tensor], extend: bool) -> tuple[Tensor, Tensor]:
        for c in chunks:
            self._admit(c, extend)
        reqs = [self.requests[c.request] for c in chunks]
        self.taps, self.chunks = torch.cat(taps), chunks
        slots = torch.tensor([r.slot for r in reqs])
        greedy = SimpleNamespace(is_all_greedy=True)
        batch = SimpleNamespace(
            reqs=reqs, forward_mode=Mode(extend), req_pool_indices=slots, sampling_info=greedy,
            prefix_lens=[c.start for c in chunks], extend_lens=[c.rows for c in chunks],
            seq_lens=torch.tensor([c.start + (c.rows if extend else 0) for c in chunks]),
            spec_info=SimpleNamespace(bonus_tokens=torch.tensor([c.tokens[0] for c in chunks])),
        )  # fmt: skip
        published: list[Tensor] = []
        with cpu_as_device() if self.live else nullcontext():
            self.worker.log.update(reqs, self.core.contexts)  # rows of requests that ended are read back
        waits = NoHostReads() if self.live and not extend else nullcontext()
        with cpu_as_device() if self.live else nullcontext(), waits:
            out = self.worker.forward_batch_generation(batch, published.append)
        assert published[0].tolist() == [c.start + c.valid for c in chunks]
        if not extend:
            blocks, positions, places = self.verified
            assert blocks.tolist() == [list(c.tokens) for c in chunks]
            assert positions.tolist() == [list(range(c.start, c.start + c.rows)) for c in chunks]
            assert torch.equal(places, slots[:, None] * self.worker.places.shape[1] + positions)
            assert out.accept_lens.tolist() == [c.valid for c in chunks]
            answer = out.next_token_ids.view(len(chunks), -1).tolist()
            for c, row in zip(chunks, answer, strict=True):
                stands = [*c.tokens[1 : c.valid], *([] if c.anchor is None else [c.anchor])]
                assert row[: len(stands)] == stands
        assert self.worker.guard.failed_steps == 0
        return self.worker.slots.tokens[slots], self.worker.slots.drafted[slots]

    def _admit(self, c: Chunk, extend: bool) -> None:
        r = self.requests.get(c.request)
        if r is None:
            free = min(set(range(1, SLOTS)) - {x.slot for x in self.requests.values()})
            r = SimpleNamespace(rid=c.request, ended=False, output_ids=[], slot=free)
            r.finished = lambda r=r: r.ended
            r.sampling_params = SimpleNamespace(top_k=1, temperature=1.0)
            self.requests[c.request] = r
        before = list(c.prefix())
        assert len(before) == c.start
        # An unfinished prompt has more tokens than those of its chunk.
        r.origin_input_ids = [*before, *c.tokens[: c.valid], *([] if c.anchor is not None else [0])]
        r.next = c.start + c.valid

    def _result(self, batch) -> SimpleNamespace:
        anchors = torch.tensor([c.anchor or 0 for c in self.chunks])
        return SimpleNamespace(next_token_ids=anchors, logits_output=SimpleNamespace(hidden_states=self.taps))

    def _verify(self, target, batch, blocks: Tensor, positions: Tensor, places: Tensor) -> SimpleNamespace:
        """Logits under which as many drafts stand as the script says."""
        self.verified = blocks, positions, places
        says = blocks.roll(-1, 1)
        for i, c in enumerate(self.chunks):
            says[i, c.valid - 1] = c.anchor if c.anchor is not None else self._another(c)
        logits = torch.nn.functional.one_hot(says, 64).float().view(-1, 64)
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=self.taps), can_run_cuda_graph=False
        )

    @staticmethod
    def _another(c: Chunk) -> int:
        """Not the draft: the request is over, and SGLang's target says something all the same."""
        return 0 if c.valid == c.rows or c.tokens[c.valid] else 1
