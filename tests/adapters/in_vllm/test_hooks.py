"""Where the plug-in meets vLLM: what it takes for granted of the installed version, and whom it leaves alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hook_points import BASE, V1, missing

from dflash2.adapters.vllm import hooks, register
from dflash2.adapters.vllm.proposer import Proposing
from dflash2.adapters.vllm.speculator import Speculating


def sources() -> Path:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_hook_points_of_the_installed_version():
    assert missing(sources()) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            BASE,
            "def load_model(self, target_model",
            "def load_model(self, model",
            "SpecDecodeBaseProposer.load_model takes",
        ),
        (V1, "mm_embed_inputs=mm_embed_inputs", "mm_inputs=mm_embed_inputs", "self.drafter.propose: got an unexpected"),
        (V1, "self.discard_request_mask", "self.discard_mask", "GPUModelRunner has no discard_request_mask"),
    ],
)
def test_a_change_is_noticed(tmp_path, file, old, new, said):
    """Of one file at a time; all others are as good as gone."""
    there = tmp_path / file
    there.parent.mkdir(parents=True)
    text = (sources() / file).read_text()
    there.write_text(text)
    before = [p for p in missing(tmp_path) if p.startswith(file)]
    assert old in text
    changed = tmp_path / "changed" / file
    changed.parent.mkdir(parents=True)
    changed.write_text(text.replace(old, new))
    assert before == []
    assert said in "\n".join(p for p in missing(tmp_path / "changed") if p.startswith(file))


def config(architecture: str) -> SimpleNamespace:
    draft = SimpleNamespace(architectures=[architecture])
    return SimpleNamespace(speculative_config=SimpleNamespace(method="dflash", draft_model_config=draft))


def test_drafters_of_other_kinds_keep_vllms_own_proposer():
    """Its runner asks for the type: an instance of either must be one of ``DFlashProposer``."""
    register()
    from vllm.v1.spec_decode.dflash import DFlashProposer

    made = {
        a: DFlashProposer.__new__(DFlashProposer, config(a), "cpu") for a in ("DFlashLagunaModel", "DFlash2DraftModel")
    }
    assert all(isinstance(m, DFlashProposer) for m in made.values())
    assert [isinstance(m, Proposing) for m in made.values()] == [False, True]


def test_v1_is_refused_to_drafters_of_other_kinds_as_before():
    reasons = ["DFlash candidate-head drafts", "diffusion models"]

    class Config(SimpleNamespace):
        def _get_v1_model_runner_unsupported_features(self) -> list[str]:
            return reasons

    hooks._accept_candidate_heads(SimpleNamespace(VllmConfig=Config))
    plain = SimpleNamespace(speculative_config=None)
    for told, expected in (
        (config("DFlash2DraftModel"), reasons[1:]),
        (config("LiLiCorrDraftModel"), reasons),
        (plain, reasons),
    ):
        assert Config(**vars(told))._get_v1_model_runner_unsupported_features() == expected


def test_v2_hears_of_preempted_requests_in_an_order_that_all_ranks_share():
    """The runner forgets their tokens: their rows go to the prefix store now, and a resumed request begins anew."""
    heard: list[tuple[str, str]] = []
    core = SimpleNamespace(
        finish=lambda request, tokens: heard.append(("finish", request)),
        forget=lambda requests: heard.extend(("forget", r) for r in requests),
    )
    ours = object.__new__(Speculating)
    ours.core, ours.guard, ours._prompts = core, SimpleNamespace(note=lambda call, *args: call(*args)), {"b": [1]}
    begun = SimpleNamespace(req_id="d", prefill_token_ids=[1, 2])
    ours.scheduled(
        SimpleNamespace(finished_req_ids={"c", "a"}, preempted_req_ids={"b"}, scheduled_new_reqs=[begun]),
        SimpleNamespace(),
    )
    assert heard == [("finish", r) for r in "abc"] + [("forget", r) for r in "abcd"]
    assert ours._prompts == {"d": [1, 2]}


def test_v2_takes_rows_and_makes_no_drafts_where_none_are_wanted():
    batch = SimpleNamespace(
        req_ids=["a", "b"], num_reqs=2, **{
            name: torch.tensor(values).numpy()
            for name, values in (
                ("num_computed_tokens_np", [8, 0]), ("num_scheduled_tokens", [4, 5]), ("prefill_len_np", [6, 5]),
                ("is_prefilling_np", [False, True]),
            )
        },
    )  # fmt: skip
    ours = object.__new__(Speculating)
    ours._prompts = {"b": [1, 2, 3, 4, 5]}
    assert [c.anchor for c in ours._chunks(batch, drafting=True)] == [0, 0]
    assert [(c.anchor, c.rows, list(c.tokens)) for c in ours._chunks(batch, drafting=False)] == [
        (None, 4, []), (None, 5, [1, 2, 3, 4, 5]),
    ]  # fmt: skip
