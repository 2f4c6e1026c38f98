"""Tuning keeps the fastest right candidate under the shape the op asks for, in the file that launches read."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dflash2.bench import checks, tuning
from dflash2.bench import operations as ops
from dflash2.bench.cases import CASES
from dflash2.bench.checks import agree, check_kernels
from dflash2.bench.operations import Operation, operations
from dflash2.bench.shapes import SHAPES
from dflash2.bench.timing import Timer, Timing
from dflash2.ops import launch
from dflash2.ops.launch import launch_settings, settings_file

CPU = torch.device("cpu")
DEFAULTS = {"BLOCK": 64, "num_warps": 4}
CANDIDATES = [{"BLOCK": b, "num_warps": w} for b in (16, 32, 128) for w in (4, 8)]


class ByBlock(Timer):
    """Takes as long as a list says for the BLOCK that was launched last."""

    def __init__(self, us):
        super().__init__(CPU)
        self.us = us

    def measure(self, run, units=1, samples=None):
        run()
        took = self.us[LAUNCHED[-1]["BLOCK"], LAUNCHED[-1]["num_warps"]]
        return Timing(took, took, took)


SHIPPED = sorted((Path(__file__).parents[2] / "kernels" / "configs").glob("*.json"))
LAUNCHED: list[dict[str, int]] = []


def fake(rows, wrong=(), broken=()):
    """An op that doubles ``rows`` ones, wrongly or not at all with some settings."""

    def call(backend):
        settings = launch_settings("fake", DEFAULTS, CPU, rows=rows)
        LAUNCHED.append(settings)
        if settings["BLOCK"] in broken:
            raise RuntimeError("out of shared memory")
        return torch.full((rows,), 3.0 if settings["BLOCK"] in wrong else 2.0)

    return Operation(f"fake.rows{rows}", "fake", 1 << 40, lambda inputs: call)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setitem(tuning.TUNED, "fake", ("fake", "CANDIDATES"))
    monkeypatch.setattr(tuning.importlib, "import_module", lambda name: SimpleNamespace(CANDIDATES=CANDIDATES))
    monkeypatch.setattr(tuning, "_cannot_run", lambda: (RuntimeError,))
    LAUNCHED.clear()


def times(**changes):
    us = {(b, w): 100.0 for b in (16, 32, 64, 128) for w in (4, 8)}
    return us | {tuple(int(x) for x in name[1:].split("_")): value for name, value in changes.items()}


def test_the_fastest_is_kept_under_the_shape_asked_for(kernel):
    found = tuning.tune_on([fake(7), fake(56)], ByBlock(times(b32_8=50.0, b16_4=60.0)), {}, say=lambda line: None)
    best = {"settings": {"BLOCK": 32, "num_warps": 8}, "median_us": 50.0}
    assert found == {"fake": [{"shape": {"rows": 7}, **best}, {"shape": {"rows": 56}, **best}]}


def test_defaults_stay_where_nothing_is_really_faster(kernel):
    found = tuning.tune_on([fake(7)], ByBlock(times(b32_8=99.5)), {}, say=lambda line: None)
    assert found["fake"][0]["settings"] == {}


def test_wrong_broken_and_known_bad_candidates_are_left_out(kernel):
    us = times(b16_4=1.0, b32_4=2.0, b32_8=3.0, b128_4=4.0, b128_8=5.0)
    found = tuning.tune_on(
        [fake(7, wrong=[16], broken=[32])], ByBlock(us), {"fake.rows7": {5: "too much"}}, say=lambda line: None
    )
    assert found["fake"][0]["settings"] == {"BLOCK": 128, "num_warps": 8}


def test_defaults_that_cannot_run_are_said(kernel):
    said = []
    assert tuning.tune_on([fake(7, broken=[64])], ByBlock(times()), {}, say=said.append) == {}
    assert "its defaults cannot run here: RuntimeError: out of shared memory" in said[0]


def test_an_op_without_settings_has_no_entry(kernel):
    plain = Operation("fake.plain", "fake", 1 << 40, lambda inputs: lambda backend: torch.ones(3))
    said = []
    assert tuning.tune_on([plain], ByBlock(times()), {}, say=said.append) == {}
    assert "nothing to set" in said[0]


def test_the_file_is_what_launches_read(kernel, monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH2_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(tuning, "the_gpu", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(tuning, "tuning_operations", lambda *a, **k: [fake(7)])
    monkeypatch.setattr(tuning, "_compile", lambda *a: {})
    monkeypatch.setattr(tuning.importlib, "import_module", lambda name: SimpleNamespace(
        CANDIDATES=CANDIDATES, __version__="3.6.0"))  # fmt: skip
    monkeypatch.setattr(tuning, "Timer", lambda device, **k: ByBlock(times(b32_8=50.0)))
    file = tmp_path / "kernels" / settings_file("NVIDIA H200")
    file.parent.mkdir()
    file.write_text(json.dumps({"ops": {"other": [{"shape": {}, "settings": {"x": 1}, "median_us": 1.0}], "fake": []}}))
    assert tuning.tune(say=lambda line: None) == file
    report = json.loads(file.read_text())
    assert {"device", "triton", "torch", "date", "ops"} <= set(report)
    assert set(report["ops"]) == {"other", "fake"}, "what was not measured stays"
    launch._measured.cache_clear()
    gpu = torch.device("cuda", 0)
    assert launch_settings("fake", DEFAULTS, gpu, rows=9) == {"BLOCK": 32, "num_warps": 8}
    launch._measured.cache_clear()


def test_unknown_ops_are_named():
    with pytest.raises(ValueError, match="--ops heads: no such operation.*int8_head"):
        tuning.tuning_operations(["heads"])


def test_every_op_has_production_shapes():
    wanted = tuning.tuning_operations()
    assert {o.op for o in wanted} == set(tuning.TUNED)
    assert len({o.name for o in wanted}) == len(wanted)
    assert {o.op for o in tuning.tuning_operations(["int8_head"], quick=True)} == {"int8_head"}


@pytest.mark.parametrize("op", tuning.TUNED)
def test_candidates_are_settings_of_their_kernel(op):
    """Each names the settings of the defaults, no others, once."""
    pytest.importorskip("triton")
    import importlib

    module, name = tuning.TUNED[op]
    defaults = getattr(importlib.import_module(f"dflash2.kernels.{module}"), name.replace("CANDIDATES", "DEFAULTS"))
    found = tuning.candidates(op)
    assert found[0] == {}
    assert len(found) > 4
    for settings in found[1:]:
        assert set(settings) <= set(defaults)
    assert len({tuple(sorted(s.items())) for s in found}) == len(found)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.name)
def test_settings_that_ship_exist(file):
    pytest.importorskip("triton")
    report = json.loads(file.read_text())
    assert file.name == settings_file(report["device"])
    assert report["commit"]
    assert set(report["ops"]) == set(tuning.TUNED)
    for op, entries in report["ops"].items():
        known = set().union(*tuning.candidates(op))
        for entry in entries:
            assert set(entry["settings"]) <= known
            assert all(size >= 1 for size in entry["shape"].values())


def test_operations_of_the_benchmark_are_those_of_a_round():
    names = {o.name for o in operations(SHAPES["27b"], 1, "27b.c1")}
    assert {n for n in names if not n.startswith(("int8_head", "dense_topk"))} == {
        n.removeprefix("op.") for n in CASES if n.startswith("op.") and n.endswith("27b.c1")
    }
    for op in ("window_attention", "selector_walk", "verify", "grouped_conv"):
        assert f"{op}.27b.c1" in names


def test_bytes_of_the_products_are_those_of_the_drafter():
    """All of a layer's products, and those of its context rows, add up to its weights."""
    c = SHAPES["27b"]
    moved = {o.name.removesuffix(".x"): o.num_bytes for o in operations(c, 0, "x")}
    layer = sum(moved[n] for n in ("block_linear.qkv.bf16", "block_linear.o.bf16", "block_linear.down.bf16"))
    layer += moved["gated_linear.bf16"] + 2 * moved["block_linear.conv.bf16"]
    assert 5 * layer == pytest.approx(3.330e9, rel=1e-3)
    assert moved["row_linear.fc"] == pytest.approx(0.262e9, rel=2e-3)
    assert moved["row_linear.kv"] == pytest.approx(105e6, rel=2e-3)


@pytest.mark.triton
def test_kernels_agree_with_their_definitions(kernel_device):
    right, said = check_kernels(torch.device(kernel_device))
    assert right, said
    assert "kernels beside their definitions" in said


def test_a_wrong_kernel_is_named(monkeypatch):
    def bad(x, base, delta, *, backend):
        return x if backend == "torch" else x + 1

    monkeypatch.setattr(ops, "grouped_conv", bad)
    monkeypatch.setattr(checks, "operations", lambda *a: [o for o in operations(*a) if o.op == "grouped_conv"])
    right, said = check_kernels(CPU)
    assert not right
    assert "grouped_conv.small" in said


def test_agreement():
    ones = torch.ones(2, 3)
    assert agree((ones, ones.long()), (ones + 1e-6, ones.long()), 1e-4)
    assert not agree((ones, ones.long()), (ones, ones.long() + 1), 1e-4)
    assert not agree(ones * float("nan"), ones, 1e-4)
    assert agree(torch.ones(4, 2, 3), 4 * ones[None], 1e-4), "partial sums"
