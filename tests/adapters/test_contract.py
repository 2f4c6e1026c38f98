"""What requests of any engine go through: drafts are those of a drafter that saw the whole context itself."""

from __future__ import annotations

import pytest
from adapters.as_sglang import AsSGLang
from adapters.scripted import Request, texts
from adapters.test_base import KINDS, V, adapter, drafter, engine, from_scratch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

NO_SHRINK = [Phase.explicit, Phase.reuse, Phase.generate]
LAYERS = {
    "core": lambda core, _: core,
    "sglang": lambda core, monkeypatch: AsSGLang(core, False, monkeypatch),
    "sglang, overlapped": lambda core, monkeypatch: AsSGLang(core, True, monkeypatch),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", LAYERS)
@settings(max_examples=8, deadline=None, phases=NO_SHRINK, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_course_of_events_drafts_as_a_cold_request_would(layer, kind, monkeypatch, data):
    """Hits, chunks, preemption, aborts and reused ids in any order; the prefix store covers every hit."""
    made = drafter(kind)
    core = adapter(made)
    under_test = LAYERS[layer](core, monkeypatch)
    host = engine(core, chunk=data.draw(st.integers(1, 9), "chunk"), share_answers="overlapped" not in layer)
    host.run_drafter = under_test.step
    pool = [
        Request(f"r{i % 5}", t, max(1, len(t) - 6))
        for i, t in enumerate(texts(data.draw(st.integers(0, 99), "texts"), 9, V - 1, 12, 20))
    ]
    waiting, running = list(pool), []

    def check(r: Request, drafts: list[int]) -> None:
        assert drafts == from_scratch(made, host, r), (r.name, r.computed)

    for _ in range(60):
        while waiting and len(running) < 4 and data.draw(st.booleans(), "admit"):
            taken = {x.name for x in running} | {x.name for x in waiting if x.known}
            new = next((r for r in waiting if r.known or r.name not in taken), None)
            if new is None:
                break
            waiting.remove(new)
            if not new.known:
                under_test.forget([new.name])  # an id that may have named another request
            host.admit(new)
            running.append(new)
        host.step(running, check)
        for r in [r for r in running if r.done]:
            running.remove(r)
            under_test.forget([r.name])
        if running and data.draw(st.integers(0, 5), "event") == 0:
            r = running.pop(data.draw(st.integers(0, len(running) - 1), "who"))
            if data.draw(st.booleans(), "abort"):
                under_test.forget([r.name])
            else:
                host.preempt(r)
                waiting.append(r)
        if not waiting and not running:
            break
    core.retain([])
    assert core.kv.pages_in_use == 0
    assert not core.counters.failures
    assert core.invalid == 0
