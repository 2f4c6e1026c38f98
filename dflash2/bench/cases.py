"""What is measured: each case prepares its inputs, says which bytes must move, and what to run it beside.

Weights and heads are far larger than the L2 cache (50-60 MB). Where an operation's inputs are not, or where a share of
them could stay there from one call to the next, calls over several sets of inputs alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import count
from typing import Any

import torch

from dflash2.bench.operations import Inputs, Operation, operations
from dflash2.bench.peers import PublishedRound, compiled_int8_head, dense_head, reference_round
from dflash2.bench.rounds import Head, Round, Target, random_drafter, random_taps, random_target
from dflash2.bench.shapes import SHAPES, WINDOW
from dflash2.bench.timing import Timer
from dflash2.bench.traffic import append_bytes, head_bytes, round_bytes
from dflash2.config import DFlash2Config
from dflash2.drafter import DFlash2Drafter
from dflash2.lm_head import DenseLMHead, Int8LMHead

__all__ = ["CASES", "Case", "Work", "Workshop", "select"]

CONTEXT = 2 * WINDOW
CONTEXTS = {"2k": 2048, "16k": 16384, "64k": 65536, "256k": 262144}
HEAD_ROWS = (1, 7, 8, 56, 64, 224)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
APPENDS = (2048, 8192)
#: Compiling takes longer than measuring: for the two numbers of rows that have a bar.
COMPILED_ROWS = (7, 56)


#: What to run, and how many pieces of work one run does.
Runner = tuple[Callable[[], Any], int]


@dataclass
class Work:
    """A case, ready to run.

    Attributes:
        run: does ``units`` pieces of the work that is timed.
        num_bytes: that one piece must move.
        check: raises where the work is not what it should be; runs before and after.
        peers: makes each peer's ``(run, units)`` when its turn comes; any may fail.
        extras: goes into the result as it is.
    """

    run: Callable[[], Any]
    num_bytes: int
    units: int = 1
    check: Callable[[], None] = lambda: None
    peers: Mapping[str, Callable[[], Runner]] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A name, and how to prepare it."""

    name: str
    prepare: Callable[[Workshop], Work]


class Workshop:
    """Random weights, made once for each shape and kept. Compared by identity."""

    def __init__(self, timer: Timer, shapes: dict[str, DFlash2Config] | None = None, dtype: Any = torch.bfloat16):
        self.timer, self.device, self.dtype = timer, timer.device, dtype
        self.shapes = SHAPES if shapes is None else shapes
        self.target = cache(self._target)
        self.drafter = cache(self._drafter)
        self.second_head = cache(lambda shape: self._target(shape).head)
        self.int8_heads = cache(lambda shape: [Int8LMHead.from_linear(h) for h in self.heads(shape)])

    def heads(self, shape: str) -> list[torch.nn.Linear]:
        """Two of them, to alternate."""
        return [self.target(shape).head, self.second_head(shape)]

    def _target(self, shape: str) -> Target:
        return random_target(self.shapes[shape], self.device, self.dtype)

    def _drafter(self, shape: str, head: Head, int8_linears: bool = False) -> DFlash2Drafter:
        return random_drafter(self.shapes[shape], self.target(shape), head, int8_linears=int8_linears)


def _head(shape: str, kind: Head, rows: int, shop: Workshop) -> Work:
    c, timer = shop.shapes[shape], shop.timer
    best = c.selector_top_k
    x = torch.randn(rows, c.hidden_size, device=shop.device, dtype=shop.dtype)
    dense, int8 = shop.heads(shape), shop.int8_heads(shape)
    heads: Sequence[Any] = int8 if kind == "int8" else [DenseLMHead(h.weight) for h in dense]

    def compiled() -> Runner:
        calls = compiled_int8_head(x, int8, best)
        return timer.captured(calls), len(calls)

    cublas = [partial(dense_head, x, h.weight, best) for h in dense]
    peers: dict[str, Callable[[], Runner]] = {"cublas_bf16_topk": lambda: (timer.captured(cublas), len(cublas))}
    if kind == "int8" and rows in COMPILED_ROWS:
        peers["torch_compile_int8_topk"] = compiled
    run = timer.captured([partial(h.top, x, c.vocab_size, best) for h in heads])
    moved = head_bytes(c.vocab_size, c.hidden_size, rows, best, int8=kind == "int8")
    return Work(run, moved, len(heads), peers=peers)


def _propose(
    shape: str, sequences: int, form: str, shop: Workshop, context: int = CONTEXT, *, only: bool = False,
    peers: Sequence[str] = (),
) -> Work:  # fmt: skip
    c = shop.shapes[shape]
    head: Head = "bf16" if form == "bf16head" else "int8"
    int8_linears = form == "int8all"
    drafter = shop.drafter(shape, head, int8_linears)
    work = Round(drafter, sequences, context)
    work.check()
    kinds = {"int8_head": head == "int8", "int8_linears": int8_linears}
    moved = round_bytes(c, sequences, work.start, work.rows, work.stored, **kinds)
    if only:
        moved -= append_bytes(c, sequences * work.rows, sequences * work.stored, int8=int8_linears)
    run = work.propose if only else work
    makers = {name: partial(_PEERS[name], shop, shape, head, context) for name in peers}
    extras = {**work.facts(), "host_us": round(shop.timer.host_us(run), 1)}
    return Work(run, moved, check=work.check, peers=makers, extras=extras)


def _append(shape: str, rows: int, shop: Workshop) -> Work:
    """One prompt's next chunk, host positions, no prefix store: what no query can see is not to cost anything."""
    drafter, c = shop.drafter(shape, "int8"), shop.shapes[shape]
    kv = drafter.new_kv(max_sequences=1, max_tokens=1 << 18)
    seq, taps = kv.open(), random_taps(drafter, rows)
    position = count(0, rows)

    def run() -> None:
        drafter.append(kv, [seq], taps, [next(position)], [rows])

    seen = rows if c.retention is None else min(rows, c.retention)
    kv_width = 2 * c.num_key_value_heads * c.head_dim
    operations = 2 * seen * c.hidden_size * (taps.shape[1] + c.num_hidden_layers * kv_width)
    notes = {"floor_us": "bytes only; arithmetic takes longer, see operations"}
    extras = {"operations": operations, "kv_bytes": kv.nbytes, "notes": notes}
    return Work(run, append_bytes(c, seen, seen), extras=extras)


def _append_only(shape: str, sequences: int, shop: Workshop) -> Work:
    """The other half of a round: device positions, a replayed graph."""
    c = shop.shapes[shape]
    work = Round(shop.drafter(shape, "int8"), sequences, CONTEXT)
    moved = append_bytes(c, sequences * work.rows, sequences * work.stored)
    return Work(work.append, moved, check=work.check, extras=work.facts())


def _operation(operation: Operation, shop: Workshop) -> Work:
    calls = operation.calls(Inputs(shop.device, shop.dtype))
    return Work(shop.timer.captured(calls), operation.num_bytes, len(calls))


def _published(shop: Workshop, shape: str, head: Head, context: int, *, graph: bool) -> Runner:
    published = PublishedRound(shop.drafter(shape, head), shop.target(shape), context)
    return (shop.timer.captured([published]) if graph else published), 1


def _reference(shop: Workshop, shape: str, head: Head, context: int, *, compiled: bool) -> Runner:
    return reference_round(shop.drafter(shape, head), shop.target(shape), context, compiled=compiled), 1


_PEERS = {
    "dflash_eager": partial(_published, graph=False),
    "dflash_cuda_graph": partial(_published, graph=True),
    "reference_eager": partial(_reference, compiled=False),
    "reference_torch_compile": partial(_reference, compiled=True),
}
_PUBLISHED = ("dflash_eager", "dflash_cuda_graph")
_REFERENCE = ("reference_eager", "reference_torch_compile")


def _cases() -> dict[str, Case]:
    found: dict[str, Callable[[Workshop], Work]] = {}
    for kind in ("int8", "bf16"):
        for rows in HEAD_ROWS:
            found[f"head.{kind}.topk.rows{rows}"] = partial(_head, "27b", kind, rows)
        found[f"head.30b.{kind}.topk.rows15"] = partial(_head, "30b", kind, 15)
        found[f"head.flash.{kind}.topk.rows7"] = partial(_head, "flash", kind, 7)
    for n in BATCHES:
        peers = (*_PUBLISHED, *_REFERENCE) if n == 1 else ()
        found[f"propose.27b.c{n}.int8head"] = partial(_propose, "27b", n, "int8head", peers=peers)
    found["propose.27b.c1.int8all"] = partial(_propose, "27b", 1, "int8all")
    found["propose.27b.c1.bf16head"] = partial(_propose, "27b", 1, "bf16head")
    for shape in ("30b", "flash"):
        found[f"propose.{shape}.c1.int8head"] = partial(_propose, shape, 1, "int8head", peers=_PUBLISHED)
    for form in ("int8head", "int8all"):
        found[f"propose_only.27b.c1.{form}"] = partial(_propose, "27b", 1, form, only=True)
    found["propose_only.27b.c32.int8head"] = partial(_propose, "27b", 32, "int8head", only=True)
    for n in (1, 32):
        found[f"append_only.27b.c{n}"] = partial(_append_only, "27b", n)
    for name, length in CONTEXTS.items():
        found[f"context.27b.{name}"] = partial(_propose, "27b", 1, "int8head", context=length)
    for rows in APPENDS:
        found[f"append.27b.{rows}"] = partial(_append, "27b", rows)
    for n in (1, 32):
        for operation in operations(SHAPES["27b"], n, f"27b.c{n}"):
            if operation.op not in ("int8_head", "dense_topk"):  # measured above, by rows
                found[f"op.{operation.name}"] = partial(_operation, operation)
    return {name: Case(name, prepare) for name, prepare in found.items()}


CASES = _cases()


def select(patterns: Sequence[str]) -> list[Case]:
    """Cases whose name fits one of the shell patterns, in their order; none given is all.

    Raises:
        ValueError: a pattern fits no case.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in CASES):
            raise ValueError(f"--cases {pattern}: no such case. There are: {', '.join(CASES)}.")
    return [c for n, c in CASES.items() if not patterns or any(fnmatchcase(n, p) for p in patterns)]
