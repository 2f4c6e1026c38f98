"""The benchmark and the tuning as they run, on a GPU, with small drafters and a few samples."""

import json

import pytest
import torch
from tiny import tiny_config

from dflash2.bench import peers, run, tuning
from dflash2.bench.cases import CASES, Workshop
from dflash2.bench.ceilings import measure_ceilings
from dflash2.bench.operations import operations
from dflash2.bench.timing import Timer

pytestmark = pytest.mark.gpu

SMALL = tiny_config(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=5000,
    mask_token_id=4999, block_size=8, sliding_window=64, conv_group_size=16, selector_rank=32, selector_top_k=16,
    dtype="bfloat16",
)  # fmt: skip


@pytest.fixture
def shop():
    timer = Timer(torch.device("cuda", 0), samples=5, sample_us=100.0, warm_up_us=100.0)
    return Workshop(timer, dict.fromkeys(("27b", "30b", "flash"), SMALL))


def test_every_kind_of_case(shop, tmp_path):
    names = [
        "head.int8.topk.rows8", "head.bf16.topk.rows56", "propose.27b.c2.int8head", "propose.27b.c64.int8head",
        "propose.27b.c1.int8all", "propose.27b.c1.bf16head", "propose_only.27b.c1.int8head", "append_only.27b.c32",
        "append.27b.8192", "context.27b.2k", "context.27b.64k",
    ]  # fmt: skip
    roof = measure_ceilings(shop.timer, 1 << 28)
    file = tmp_path / "r.json"
    run.measure([CASES[n] for n in names], shop.timer, file, {}, workshop=shop, ceilings=roof)
    report = json.loads(file.read_text())
    assert report["provenance"]["failed"] == {}
    rows = {row["case"]: row for row in report["cases"]}
    assert list(rows) == names
    assert rows["head.int8.topk.rows8"]["peers"]["cublas_bf16_topk"] > 0
    assert rows["context.27b.2k"]["kv_bytes"] == rows["context.27b.64k"]["kv_bytes"]


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("op.") and n.endswith("27b.c1")])
def test_operations_on_published_shapes(name, shop):
    work = CASES[name].prepare(shop)
    assert shop.timer.measure(work.run, work.units).median_us > 0


def test_reference_round_runs(shop):
    work = peers.reference_round(shop.drafter("27b", "bf16"), shop.target("27b"), 300, compiled=False)
    work.check()


def test_published_modules_in_a_graph(shop):
    pytest.importorskip("dflash.model", reason="the published package is not installed")
    theirs = peers.PublishedRound(shop.drafter("27b", "bf16"), shop.target("27b"), 300)
    replay = shop.timer.captured([theirs])
    assert shop.timer.measure(replay).median_us < shop.timer.measure(theirs).median_us


def test_tuning(monkeypatch):
    listed = tuning.candidates
    monkeypatch.setattr(tuning, "candidates", lambda op: listed(op)[:3])
    wanted = [o for o in operations(SMALL, 2, "small") if o.op in tuning.TUNED]
    found = tuning.tune_on(wanted, Timer(torch.device("cuda", 0), samples=3, sample_us=50.0, warm_up_us=50.0), {})
    assert set(found) == set(tuning.TUNED)
    for op, entries in found.items():
        for entry in entries:
            assert entry["shape"], op
            assert all(size >= 1 for size in entry["shape"].values())
            assert entry["median_us"] > 0


def test_candidates_are_compiled_in_other_processes():
    (wanted,) = [o for o in tuning.tuning_operations(["verify"], quick=True) if o.name == "verify.27b.c1"]
    unusable = tuning._compile([wanted], True, ["verify"])
    assert set(unusable) == {"verify.27b.c1"}
    assert len(unusable["verify.27b.c1"]) < len(tuning.candidates("verify"))
