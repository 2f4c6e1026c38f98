"""What goes wrong costs drafts, never the engine; what is set wrong is said at the start."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from adapters.cold import conversation
from adapters.pairs import make_pair
from engine import Engine
from test_greedy import greedy

from dflash2.adapters.vllm import register
from dflash2.adapters.vllm.settings import Settings
from dflash2.errors import CapacityError, ConfigError


@pytest.fixture
def ours(tiny_pair, engines) -> Engine:
    return engines(*tiny_pair)


@pytest.fixture
def expected(tiny_pair, engines):
    prompts = conversation(6, seed=30)
    return prompts, engines(tiny_pair[0], None).run(prompts, greedy(12))


@pytest.fixture
def logged(monkeypatch):
    """Messages of the plug-in: vLLM's logger passes nothing on to pytest's."""
    messages: list[str] = []
    logger = logging.getLogger("vllm.dflash2")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    yield messages
    logger.removeHandler(handler)
    logger.manager._clear_cache()


def every(n: int, call):
    """``call``, raising at every n-th."""
    count = iter(range(1 << 30))

    def sometimes(*args, **kw):
        if next(count) % n == 0:
            raise RuntimeError("injected")
        return call(*args, **kw)

    return sometimes


@pytest.mark.parametrize("what", ["append", "propose"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_drafter_that_raises(ours, expected, monkeypatch, what, n):
    drafter, counters = ours.drafter.drafter, ours.drafter.counters
    before = counters.failures["RuntimeError"]
    monkeypatch.setattr(drafter, what, every(n, getattr(drafter, what)))
    assert ours.run(expected[0], greedy(12)) == expected[1]
    assert counters.failures["RuntimeError"] > before
    monkeypatch.undo()
    rounds = counters.rounds
    assert ours.run(expected[0], greedy(12)) == expected[1]
    assert counters.rounds > rounds + 40
    assert ours.drafter.kv.pages_in_use == 0


@pytest.mark.parametrize("what", ["step", "_host_chunks"])
def test_a_step_that_raises(ours, expected, monkeypatch, what):
    proposer = ours.runner.drafter
    owner = proposer if what == "_host_chunks" else ours.drafter
    before = proposer.guard.failed_steps
    monkeypatch.setattr(owner, what, every(2, getattr(owner, what)))
    assert ours.run(expected[0], greedy(12)) == expected[1]
    assert proposer.guard.failed_steps > before


def test_the_log_of_failures_ends(ours, expected, monkeypatch, logged):
    proposer = ours.runner.drafter
    monkeypatch.setattr(ours.drafter, "step", every(1, None))
    proposer.guard.failed_steps = 0
    ours.run(expected[0], greedy(12))
    assert proposer.guard.failed_steps > 8
    assert sum("without drafts" in m for m in logged) == 5


def test_notes_of_an_end_that_raise(ours, expected, monkeypatch):
    monkeypatch.setattr(ours.drafter.kv, "close", every(2, ours.drafter.kv.close))
    assert ours.run(expected[0], greedy(12)) == expected[1]
    monkeypatch.undo()
    ours.drafter.retain([])


# -- at the start -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ({"page_sise": 16}, "page_sise.*is not known. Known: .*page_size"),
        ({"page_size": "16"}, "page_size='16': expected int"),
        ({"prefix_store_bytes": -1}, "prefix_store_bytes=-1"),
        ({"max_requests": 0}, "max_requests=0: expected a whole number from 1 on"),
        ({"int8_head": "maybe"}, "int8_head='maybe'"),
        ("yes", "'?yes'? is not known"),
    ],
)
def test_settings_that_are_not_there(plugin, message):
    with pytest.raises(ConfigError, match=message):
        Settings.of({"dflash2": plugin})


def test_an_engine_with_an_unknown_setting_does_not_start(tiny_pair):
    with pytest.raises(ConfigError, match="page_sise"):
        Engine(*tiny_pair, plugin={"page_sise": 16})


def test_a_drafter_of_another_target(tiny_pair, small_vocabulary):
    with pytest.raises(ConfigError, match=r"was not made for this target.*vocab_size"):
        Engine(small_vocabulary[0], tiny_pair[1], skip_tokenizer_init=True)


def test_taps_that_the_target_does_not_have(tmp_path, tiny_pair):
    pair = make_pair(tmp_path, target_layer_ids=(0, 7), num_target_layers=8)
    with pytest.raises(ConfigError, match="was not made for this target"):
        Engine(tiny_pair[0], pair[1])


def test_more_drafts_than_the_block_has_room_for(tiny_pair):
    with pytest.raises(ValueError, match=r"num_draft_tokens|block_size|num_speculative_tokens"):
        Engine(*tiny_pair, k=9)


def test_pipeline_parallel_is_refused_with_a_reason():
    from dflash2.adapters.vllm.core import make_core

    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=2)
    config = SimpleNamespace(additional_config={}, parallel_config=parallel, speculative_config=None)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2: .*different GPUs.*Use tensor_parallel_size"):
        make_core(config, torch.device("cpu"), torch.nn.Module(), 3)


def test_the_switch_leaves_the_engine_alone():
    code = (
        "from dflash2.adapters.vllm import register; register()\n"
        "import vllm.v1.spec_decode.dflash as d\n"
        "assert not hasattr(d.DFlashProposer, '_dflash2'), d.DFlashProposer\n"
    )
    for switch, rc in (("off", 0), ("on", 1)):
        environment = os.environ | {"DFLASH2_VLLM": switch, "VLLM_PLUGINS": ""}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == rc, done.stderr[-2000:]


def test_registering_again_changes_nothing():
    import vllm.v1.spec_decode.dflash as d

    register()
    before = d.DFlashProposer
    register()
    assert d.DFlashProposer is before


def test_more_requests_than_draft_at_a_time(tiny_pair, engines, expected):
    ours = engines(*tiny_pair, plugin={"max_requests": 2})
    assert ours.run(expected[0], greedy(12)) == expected[1]
    assert ours.drafter.counters.failures["CapacityError"] > 0
    assert ours.drafter.counters.rounds > 20
    assert ours.drafter.kv.pages_in_use == 0


def test_memory_that_is_not_there(tiny_pair):
    with pytest.raises(CapacityError, match="for 8 requests at a time: .*--max-num-seqs, or max_requests"):
        Engine(*tiny_pair, plugin={"prefix_store_bytes": 1 << 60})
