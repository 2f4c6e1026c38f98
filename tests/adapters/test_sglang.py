"""What SGLang's plug-in decides without an engine: arguments, settings, sampling, requests."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dflash2.adapters.sglang import switched_off
from dflash2.adapters.sglang.arguments import RUNNING_REQUESTS, resolve
from dflash2.adapters.sglang.engine import check_request, keep_out_of_pools
from dflash2.adapters.sglang.events import RequestLog, known_tokens
from dflash2.adapters.sglang.sampling import draft_temperature, keep_sampled, temperatures
from dflash2.adapters.sglang.settings import VARIABLE, Settings
from dflash2.errors import ConfigError

DRAFTER = "smollm2-135m-dflash2"


def arguments(**changes) -> SimpleNamespace:
    given = {
        "tp_size": 1, "pp_size": 1, "speculative_draft_model_path": DRAFTER, "speculative_num_draft_tokens": None,
        "speculative_num_steps": None, "speculative_eagle_topk": None, "max_running_requests": None,
        "enable_mixed_chunk": False, "device": "cuda", "disable_overlap_schedule": False,
    }  # fmt: skip
    return SimpleNamespace(**given | changes)


def test_what_follows_from_the_arguments():
    new = resolve(arguments())
    assert new["speculative_num_draft_tokens"] == 8  # the token before the drafts counts
    assert new["max_running_requests"] == RUNNING_REQUESTS
    assert (new["speculative_num_steps"], new["speculative_eagle_topk"]) == (1, 1)
    assert "disable_overlap_schedule" not in new
    assert resolve(arguments(device="cpu"))["disable_overlap_schedule"]
    assert resolve(arguments(speculative_num_draft_tokens=4))["speculative_num_draft_tokens"] == 4
    assert resolve(arguments(enable_mixed_chunk=True))["enable_mixed_chunk"] is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_size": 2}, "tp_size=2: must be 1"),
        ({"speculative_draft_model_path": None}, "must name the drafter"),
        ({"speculative_num_draft_tokens": 9}, "must be 2 to 8"),
        ({"speculative_eagle_topk": 4}, "a chain, not a tree"),
        ({"enable_hierarchical_cache": True}, "enable_hierarchical_cache=True"),
    ],
)
def test_arguments_that_do_not_go_together(changes, message):
    with pytest.raises(ConfigError, match=message):
        resolve(arguments(**changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_size=16", "expected a JSON object"),
        ('{"pagesize": 16}', "pagesize"),
        ('{"page_size": "16"}', "expected int"),
        ('{"max_requests": 0}', "from 1 on"),
        ('{"int8_head": "shared"}', "expected one of"),
        ("[1]", "is not known"),
    ],
)
def test_settings_that_are_wrong(monkeypatch, text, message):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=message):
        Settings.of_environment()


def test_settings(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Settings.of_environment() == Settings()
    monkeypatch.setenv(VARIABLE, '{"page_size": 32, "prefix_store_bytes": 0}')
    assert Settings.of_environment() == Settings(page_size=32, prefix_store_bytes=0)


def test_switch(monkeypatch):
    assert not switched_off()
    monkeypatch.setenv("DFLASH2_SGLANG", "off")
    assert switched_off()


def info(**changes) -> SimpleNamespace:
    given = {
        "is_all_greedy": False, "temperatures": torch.tensor([[0.7], [1.0]]), "top_ks": torch.tensor([1 << 30, 1]),
        "top_ps": torch.ones(2), "min_ps": torch.zeros(2),
        "need_top_k_sampling": False, "need_top_p_sampling": False, "need_min_p_sampling": False,
    }  # fmt: skip
    return SimpleNamespace(**given | changes)


def test_greedy_is_top_k_of_one():
    assert temperatures(info()).tolist() == pytest.approx([0.7, 0.0])
    assert temperatures(info(is_all_greedy=True)) is None
    request = SimpleNamespace(sampling_params=SimpleNamespace(top_k=1, temperature=1.0))
    assert draft_temperature(request) == 0.0
    request.sampling_params.top_k = 1 << 30
    assert draft_temperature(request) == 1.0


def test_cuts_are_those_of_the_sampler():
    """By a loop over one row at a time: rank, mass before, and share of the best, all of the whole distribution."""
    logits = torch.randn(2, 3, 19, generator=torch.Generator().manual_seed(1)) * 2
    heat, top_k, top_p, min_p = torch.tensor([0.7, 1.3]), [5, 1 << 30], [0.8, 0.6], [0.05, 0.1]
    told = info(
        top_ks=torch.tensor(top_k), top_ps=torch.tensor(top_p), min_ps=torch.tensor(min_p),
        need_top_k_sampling=True, need_top_p_sampling=True, need_min_p_sampling=True,
    )  # fmt: skip
    kept = keep_sampled(logits, heat, told).isfinite()
    for r in range(2):
        for j in range(3):
            p = (logits[r, j] / heat[r]).softmax(-1)
            before, expected = 0.0, set()
            for rank, i in enumerate(p.argsort(descending=True).tolist()):
                if rank < top_k[r] and before <= top_p[r] and p[i] >= min_p[r] * p.max():
                    expected.add(i)
                before += float(p[i])
            assert set(kept[r, j].nonzero().flatten().tolist()) == expected
    assert keep_sampled(logits, heat, info()) is logits


def request(rid: str = "a", **changes) -> SimpleNamespace:
    made = SimpleNamespace(
        rid=rid, origin_input_ids=[1, 2, 3], output_ids=[4, 5], return_logprob=False, return_hidden_states=False,
        sampling_params=SimpleNamespace(frequency_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0), ended=False,
    )  # fmt: skip
    made.finished = lambda: made.ended
    vars(made).update(changes)
    return made


def test_tokens_of_a_request():
    r = request()
    assert known_tokens(r) == [1, 2, 3, 4, 5]
    assert [known_tokens(r, a, b) for a, b in ((0, 2), (2, 4), (4, 5), (3, 3))] == [[1, 2], [3, 4], [5], []]


def test_the_log_notices_ends_and_reused_ids():
    told: list = []
    log = RequestLog(lambda rid, tokens: told.append((rid, tokens())), lambda rid: told.append(rid))
    first, second = request("a"), request("b")
    log.update([first, second], ["a", "b"])
    assert told == []
    first.ended = True
    log.update([second], ["a", "b"])
    assert told == [("a", [1, 2, 3, 4, 5])]
    log.update([request("b")], ["b"])  # aborted in the queue, and its id given to another
    assert told[1:] == ["b"]
    log.update([], [])
    log.update([request("b")], [])
    assert told[1:] == ["b"]


def test_requests_that_cannot_be_exact():
    assert check_request(request()) is None
    assert "log-probabilities" in check_request(request(return_logprob=True))
    assert "hidden states" in check_request(request(return_hidden_states=True))
    penalised = request(sampling_params=SimpleNamespace(frequency_penalty=0.5))
    assert "frequency_penalty: SGLang does not count" in check_request(penalised)


def test_nothing_of_the_drafter_enters_the_pools():
    runner = SimpleNamespace(spec_aux_config=SimpleNamespace(dflash_draft_num_layers=4, dflash_target_layer_ids=[1]))
    keep_out_of_pools(runner)
    assert vars(runner.spec_aux_config) == {"dflash_draft_num_layers": None, "dflash_target_layer_ids": [1]}


def test_the_plug_in_is_not_imported_by_the_package():
    code = "import dflash2, dflash2.adapters.sglang, sys; sys.exit('sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
