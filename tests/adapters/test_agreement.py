"""Several processes that draft alike, as a `RequestDrafter` sees it: it drafts what all of them can follow."""

from __future__ import annotations

import logging

import pytest
import torch
from adapters.test_base import adapter, drafter

from dflash2.adapters.base import RanksParted, RequestDrafter
from dflash2.adapters.chunks import Chunk
from dflash2.adapters.guard import StepGuard

ROWS = 5


def chunks(*names: str, start: int = 0) -> list[Chunk]:
    return [Chunk(n, start, list(range(ROWS)), ROWS, ROWS, anchor=1) for n in names]


def taps(under_test: RequestDrafter, requests: int) -> torch.Tensor:
    width = 2 * under_test.drafter.config.hidden_size
    return torch.randn(requests * ROWS, width, generator=torch.Generator().manual_seed(0))


def test_a_request_that_another_process_lost():
    asked = []

    def agree(here: list[bool]) -> list[bool]:
        asked.append(here)
        return [h and i != 1 for i, h in enumerate(here)]

    with_others, alone = adapter(drafter(), agree=agree), adapter(drafter())
    out = with_others.step(chunks("a", "b", "c"), taps(alone, 3))
    expected = alone.step(chunks("a", "b", "c"), taps(alone, 3))
    assert asked == [[True] * 3]
    assert out.drafted.tolist() == [True, False, True]
    assert torch.equal(out.tokens[[0, 2]], expected.tokens[[0, 2]])
    assert set(with_others.requests) == {"a", "c"}
    assert with_others.counters.failures == {"RuntimeError": 1}


def test_what_is_lost_here_is_said(monkeypatch):
    asked = []
    under_test = adapter(drafter(), agree=lambda here: asked.append(here) or here)
    append = under_test._append

    def failing(some, rows):
        if any(p.chunk.request == "b" for p in some):
            raise RuntimeError("only here")
        append(some, rows)

    monkeypatch.setattr(under_test, "_append", failing)
    assert under_test.step(chunks("a", "b"), taps(under_test, 2)).drafted.tolist() == [True, False]
    assert asked == [[True, False]]


def test_a_step_that_fails_before_anything_is_said():
    asked = []
    under_test = adapter(drafter(), agree=lambda here: asked.append(here) or here)

    def step():
        raise KeyError("in the engine's own data")

    assert not StepGuard(logging.getLogger()).run(step, 3, under_test).drafted.any()
    assert asked == [[False] * 3]


@pytest.mark.parametrize(("error", "parted"), [(RuntimeError("out of memory"), True), (ValueError("anchors"), False)])
def test_a_pass_that_fails_in_one_process(monkeypatch, error, parted):
    """The others are in it already. What is checked before the pass fails in all of them, and costs drafts only."""

    def propose(*args, **kwargs):
        raise error

    guard = StepGuard(logging.getLogger())
    for agree in (None, lambda here: here):
        under_test = adapter(drafter(), agree=agree)
        monkeypatch.setattr(under_test.drafter, "propose", propose)
        rows = taps(under_test, 2)

        def step(under_test=under_test, rows=rows):
            return under_test.step(chunks("a", "b"), rows)

        if parted and agree is not None:
            with pytest.raises(RanksParted, match="failed on this rank: RuntimeError: out of memory"):
                guard.run(step, 2, under_test)
        else:
            assert not guard.run(step, 2, under_test).drafted.any()
            assert under_test.counters.failures == {type(error).__name__: 2}
