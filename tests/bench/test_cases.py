"""Every kind of case runs, on tiny drafters on the CPU, and gives a row of the result file's schema."""

import importlib.util
import json

import pytest
import torch

from dflash2.bench import cases, peers, run
from dflash2.bench.cases import CASES, select
from dflash2.bench.ceilings import Ceilings, measure_ceilings
from dflash2.bench.report import FIELDS

REQUIRED = {
    "head.int8.topk.rows7",
    "head.int8.topk.rows56",
    "propose.27b.c1.int8head",
    "propose.27b.c1.int8all",
    "propose.27b.c32.int8head",
    *(f"context.27b.{n}" for n in ("2k", "16k", "64k", "256k")),
    *(f"append.27b.{n}" for n in (2048, 8192)),
}
ROOF = Ceilings(4e12, 4.2e12)


def measured(names, shop, tmp_path, **kw):
    """(rows by case, whole report, what was said)."""
    said = []
    chosen = [CASES[name] for name in names]
    ok = run.measure(chosen, shop.timer, tmp_path / "r.json", {}, say=said.append, workshop=shop, ceilings=ROOF, **kw)
    report = json.loads((tmp_path / "r.json").read_text())
    assert ok == (not report["provenance"]["failed"])
    return {row["case"]: row for row in report["cases"]}, report, "\n".join(said)


def test_names_that_others_read_are_there():
    assert set(CASES) >= REQUIRED
    assert all(name == case.name for name, case in CASES.items())


def test_selection():
    assert [c.name for c in select(["context.*"])] == [f"context.27b.{n}" for n in ("2k", "16k", "64k", "256k")]
    assert len(select([])) == len(CASES)
    with pytest.raises(ValueError, match="no such case.*head.int8.topk.rows7"):
        select(["head.*", "nothing.*"])


@pytest.mark.parametrize(
    "name",
    [
        "head.int8.topk.rows8",
        "head.bf16.topk.rows8",
        "propose.27b.c4.int8head",
        "propose.27b.c1.int8all",
        "propose.27b.c1.bf16head",
        "propose_only.27b.c1.int8head",
        "append.27b.2048",
    ],
)
def test_a_case_gives_a_row(name, shop, tmp_path):
    rows, report, said = measured([name], shop, tmp_path)
    row = rows[name]
    assert set(FIELDS) <= set(row)
    assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
    assert row["floor_us"] == pytest.approx(row["bytes"] / 4e12 * 1e6, abs=1e-3)
    assert row["share_of_read"] == pytest.approx(row["floor_us"] / row["median_us"], abs=2e-4)
    assert report["ceilings"] == {"read_bytes_per_s": 4e12, "copy_bytes_per_s": 4.2e12}
    assert {"device", "torch", "triton", "commit", "date"} <= set(report["provenance"])
    assert name in said
    assert "read 4.000 TB/s" in said


def test_context_rows_do_not_grow_with_the_context(shop, tmp_path):
    rows, *_ = measured(["context.27b.2k", "context.27b.16k"], shop, tmp_path)
    near, far = rows.values()
    assert near["kv_bytes"] == far["kv_bytes"]
    assert near["kv_pages"] == far["kv_pages"]
    assert near["bytes"] == far["bytes"]
    assert (near["start"], far["start"]) == (2048 + 2, 16384 + 2)


def test_a_round_is_the_same_round_again(shop):
    from dflash2.bench.rounds import Round

    work = Round(shop.drafter("27b", "int8"), 3, 21)
    first = work()
    for _ in range(5):
        again = work()
        assert torch.equal(first.tokens, again.tokens)
        assert bool(again.valid.all())
    assert torch.equal(work.propose().tokens, first.tokens)
    work.check()


def test_a_round_that_cannot_draft_is_not_measured(shop):
    from dflash2.bench.rounds import Round

    work = Round(shop.drafter("27b", "int8"), 2, 21)
    work.before += 1
    with pytest.raises(RuntimeError, match="not valid"):
        work.check()


def test_peers_are_measured_and_a_failing_one_is_a_note(shop, tmp_path, monkeypatch):
    def broken(*args, **kw):
        raise TimeoutError("took more than 60 s")

    monkeypatch.setattr(cases, "compiled_int8_head", broken)
    rows, *_ = measured(["head.int8.topk.rows7"], shop, tmp_path)
    row = rows["head.int8.topk.rows7"]
    assert row["peers"]["cublas_bf16_topk"] > 0
    assert row["peers"]["torch_compile_int8_topk"] is None
    assert row["notes"]["torch_compile_int8_topk"] == "TimeoutError: took more than 60 s"


def test_peers_can_be_left_out(shop, tmp_path):
    rows, *_ = measured(["head.int8.topk.rows7"], shop, tmp_path, peers=False)
    assert rows["head.int8.topk.rows7"]["peers"] == {}


def test_reference_round_leaves_the_drafter_as_it_is(shop):
    drafter, target = shop.drafter("27b", "bf16"), shop.target("27b")
    head = drafter._head[0]
    run = peers.reference_round(drafter, target, 21, compiled=False)
    run.check()
    assert drafter._head[0] is head
    assert run.drafter is not drafter
    assert run.drafter.fc.weight is drafter.fc.weight


@pytest.mark.skipif(importlib.util.find_spec("dflash") is None, reason="the published package is not installed")
def test_published_modules_run_round_after_round(shop):
    theirs = peers.PublishedRound(shop.drafter("27b", "bf16"), shop.target("27b"), 21)
    for _ in range(3):
        tokens, _, q = theirs()
        assert tokens.shape == (1, 3)
        assert q is None
    assert theirs.start == 21 + 3 * 2


def test_absent_published_modules_are_a_note(shop, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dflash.model", None)
    rows, *_ = measured(["propose.flash.c1.int8head"], shop, tmp_path)
    row = rows["propose.flash.c1.int8head"]
    assert row["peers"] == {"dflash_eager": None, "dflash_cuda_graph": None}
    assert "dflash" in row["notes"]["dflash_eager"]


def test_a_failing_case_does_not_take_the_others(shop, tmp_path, monkeypatch):
    def broken(*args, **kw):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(cases.Round, "check", broken)
    rows, report, said = measured(["propose.27b.c1.int8all", "append.27b.2048"], shop, tmp_path)
    assert list(rows) == ["append.27b.2048"]
    assert report["provenance"]["failed"] == {"propose.27b.c1.int8all": "RuntimeError: out of memory"}
    assert "FAILED: RuntimeError: out of memory" in said


def test_time_limit():
    import time

    with pytest.raises(TimeoutError, match=r"more than 0\.05 s"), peers.time_limit(0.05):
        time.sleep(5)
    with peers.time_limit(5):
        pass


def test_ceilings_are_the_best_way(timer):
    roof = measure_ceilings(timer, 1 << 20)
    assert roof.read_bytes_per_s == max(roof.ways.values())
    assert roof.copy_bytes_per_s > 0


@pytest.mark.triton
def test_read_kernel_reads_everything(kernel_device):
    from dflash2.kernels import read_bandwidth as kernel

    x = torch.randint(-1000, 1000, (5 * 4096,), dtype=torch.int32, device=kernel_device)
    settings = {"PROGRAMS": 1, "BLOCK": 4096, "num_warps": 4, "num_stages": 1}
    assert int(kernel.read(x, settings).sum()) == int(x.sum())


@pytest.mark.gpu
def test_read_kernel_reads_four_gigabytes():
    from dflash2.kernels import read_bandwidth as kernel

    x = torch.randint(-2, 3, (1 << 30,), dtype=torch.int32, device="cuda")
    for settings in kernel.CANDIDATES:
        assert int(kernel.read(x, settings).sum()) == int(x.sum()), settings
