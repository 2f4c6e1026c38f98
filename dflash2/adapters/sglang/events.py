"""What SGLang's batches say of its requests, as chunks for `RequestDrafter`. Nothing of SGLang is imported here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from dflash2.adapters.chunks import Chunk, moved_chunk
from dflash2.adapters.sglang.sampling import draft_temperature

__all__ = ["RequestLog", "decode_chunks", "known_tokens", "moved_chunks", "prefill_chunks"]


def known_tokens(request: Any, first: int = 0, end: int | None = None) -> list[int]:
    """Ids of a ``Req`` at these positions: its prompt and the output that SGLang has processed."""
    prompt, output = request.origin_input_ids, request.output_ids
    end = len(prompt) + len(output) if end is None else end
    split = len(prompt)
    return [*prompt[first:end], *output[max(first - split, 0) : max(end - split, 0)]]


def prefill_chunks(batch: Any, anchors: Sequence[int] | None, with_tokens: bool, sampled_drafts: bool) -> list[Chunk]:
    """Of a batch that extends prompts: new requests, further chunks, and retracted ones that come back.

    Its positions are known: a prefix that the radix cache had is not computed, and the first row lies behind it.

    Args:
        batch: ``ScheduleBatch``.
        anchors: the token after each request's rows; None if only the device knows.
        with_tokens: whether anybody keeps rows under their tokens.
        sampled_drafts: whether drafts are drawn at the requests' temperatures.
    """
    made = []
    for i, request in enumerate(batch.reqs):
        start, rows = int(batch.prefix_lens[i]), int(batch.extend_lens[i])
        whole = start + rows == len(request.origin_input_ids) + len(request.output_ids)
        anchor = 0 if anchors is None else anchors[i]
        made.append(
            Chunk(
                request=request.rid,
                start=start,
                tokens=known_tokens(request, start, start + rows) if with_tokens else (),
                rows=rows,
                valid=rows,
                anchor=anchor if whole else None,
                temperature=draft_temperature(request) if sampled_drafts else 0.0,
                prefix=partial(known_tokens, request, 0, start),
            )
        )
    return made


def decode_chunks(
    batch: Any,
    starts: Sequence[int],
    blocks: Sequence[Sequence[int]],
    valid: Sequence[int],
    anchors: Sequence[int],
    sampled_drafts: bool,
) -> list[Chunk]:
    """Of a batch that verified drafts, when the host knows what came of it.

    Args:
        batch: ``ScheduleBatch``.
        starts: position of each request's anchor.
        blocks: the anchor and the drafts, k+1 ids.
        valid: how many of these stand.
        anchors: the token after them.
        sampled_drafts: whether drafts are drawn at the requests' temperatures.
    """
    return [
        Chunk(
            request=request.rid,
            start=starts[i],
            tokens=blocks[i],
            rows=len(blocks[i]),
            valid=valid[i],
            anchor=anchors[i],
            temperature=draft_temperature(request) if sampled_drafts else 0.0,
            prefix=partial(known_tokens, request, 0, starts[i]),
        )
        for i, request in enumerate(batch.reqs)
    ]


def moved_chunks(batch: Any, rows: int) -> list[Chunk]:
    """The same when only the device knows.

    Args:
        batch: ``ScheduleBatch``.
        rows: k+1.
    """
    return [moved_chunk(r.rid, rows) for r in batch.reqs]


class RequestLog:
    """Notices which requests have ended or given their id to another, since SGLang does not tell its workers.

    Args:
        finish: called with an id and a function that gives the request's tokens.
        forget: called with an id that means another request now.
    """

    def __init__(self, finish: Callable[[str, Callable[[], Sequence[int]]], None], forget: Callable[[str], None]):
        self._finish, self._forget = finish, forget
        self._seen: dict[str, Any] = {}

    def update(self, requests: Collection[Any], held: Collection[Any]) -> None:
        """Before a step.

        Args:
            requests: ``Req`` of the step.
            held: ids that hold a context. Others need not be remembered: they may have been aborted in the queue.
        """
        for rid, request in list(self._seen.items()):
            if request.finished():
                self._finish(rid, partial(known_tokens, request))
                del self._seen[rid]
            elif rid not in held:
                del self._seen[rid]
        for request in requests:
            if self._seen.get(request.rid, request) is not request:
                self._forget(request.rid)
            self._seen[request.rid] = request
