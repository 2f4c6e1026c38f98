"""Real SGLang engines on the CPU with tiny random pairs: run by `make test-sglang`."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapters.real_engines import mark_tests

from dflash2.adapters.versions import SGLANG


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tests(items, Path(__file__).parent, SGLANG)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory) -> tuple[str, str]:
    """A Llama of 32 tokens and a v2 drafter of window 48. SGLang does not hand out the output of the last layer."""
    from adapters.pairs import make_pair

    return make_pair(tmp_path_factory.mktemp("tiny"), vocab=32, target_layer_ids=(0, 1))


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """``engines(target, drafter or None, **settings) -> Engine``, each started once and ended with the session."""
    from sglang_engine import Engine

    made: dict[str, Engine] = {}
    records = tmp_path_factory.mktemp("records")

    def get(target: str, drafter: str | None, **settings) -> Engine:
        key = repr((target, drafter, sorted(settings.items())))
        if key not in made:
            made[key] = Engine(target, drafter, records / f"{len(made)}.jsonl", **settings)
        return made[key]

    yield get
    for engine in made.values():
        engine.stop()
