"""Real vLLM engines, in this process and on the CPU, with tiny random pairs: run by `make test-vllm`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from adapters.real_engines import mark_tests

from dflash2.adapters.versions import VLLM

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine and test in one process
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over what each engine is told
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tests(items, Path(__file__).parent, VLLM)


if VLLM.installed():
    os.environ.pop("TRITON_INTERPRET", None)  # vLLM would take the interpreter for a GPU's Triton


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory) -> tuple[str, str]:
    """A Llama of 260 tokens (bytes and four more) with positions up to 65,536, and a v2 drafter of window 48."""
    from adapters.pairs import make_pair

    return make_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def small_vocabulary(tmp_path_factory) -> tuple[str, str]:
    """A pair of 16 tokens, for counting samples."""
    from adapters.pairs import make_pair

    return make_pair(tmp_path_factory.mktemp("small"), vocab=16)


@pytest.fixture(scope="session")
def engines():
    """``engines(target, drafter or None, **settings) -> Engine``, each made once."""
    from engine import Engine

    made: dict[str, Engine] = {}

    def get(target: str, drafter: str | None, **settings) -> Engine:
        key = repr((target, drafter, sorted(settings.items())))
        if key not in made:
            made[key] = Engine(target, drafter, **settings)
        return made[key]

    return get
