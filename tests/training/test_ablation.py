"""Parts that can be left out train, and runs are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train import DRAFTER, trainer

import dflash2
from dflash2.errors import ConfigError
from dflash2.training.ablation import compare, main, plot, table

V1 = {k: v for k, v in DRAFTER.items() if not k.startswith(("conv", "selector"))} | {"architecture": "DFlashDraftModel"}
VARIANTS = {
    "neither": {"frozen": ["conv"], "selector_weight": 0.0},
    "conv": {"selector_weight": 0.0},
    "selector": {"frozen": ["conv"]},
    "both": {},
    "v1": {"drafter": V1},
    "one layer": {"drafter": DRAFTER | {"num_hidden_layers": 1}},
    "three layers": {"drafter": DRAFTER | {"num_hidden_layers": 3}},
    "tv": {"hard_weight": 0.0, "soft_weight": 0.1, "tv_weight": 0.9},
    "lk": {"hard_weight": 0.0, "soft_weight": 0.1, "lk_weight": 0.9},
    "inject": {"selector_miss": "inject", "selector_mean": "rows", "selector_detach": True},
    "tokens": {"gold": "token"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains_and_loads(toy_llama, shard, tmp_path, name):
    change = {"drafter": DRAFTER} | VARIANTS[name]
    change["drafter"] = change["drafter"] | {"dtype": "float32"}
    t = trainer(toy_llama, shard, tmp_path, max_steps=40, lr=5e-3, log_seconds=0, **change)
    before = {n: p.clone() for n, p in t.drafter.named_parameters()}
    t.run()
    losses = [json.loads(line)["base"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    saved = load_file(tmp_path / "model.safetensors")
    still = {n for n, p in before.items() if torch.equal(saved[n], p)}
    expected = {n for n in before if name in ("neither", "selector") and "conv" in n}
    if name in ("neither", "conv"):
        expected.add("candidate_selector.successor_codebook")
        still -= {"candidate_selector.predecessor_codebook", "candidate_selector.hidden_projection.weight"}  # may decay
    assert still == expected
    drafter = dflash2.DFlash2Drafter.from_pretrained(tmp_path)
    assert drafter.config.architecture == ("DFlashDraftModel" if name == "v1" else "DFlash2DraftModel")


def test_a_comparison_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    length = {"value": 2.0, "low": 1.5, "high": 3.0, "gain_percent": 0.0}
    found = {
        "runs": {"a": {"acceptance_length": {"all": length}}, "b": {"acceptance_length": {"gsm8k": {"value": 2.5}}}}
    }
    curve = [{"tokens": n, "rounds": 1.5, "unary": 1.2} for n in (1e6, 2e6)]
    plot(found, tmp_path / "bars.png")
    plot(found, tmp_path / "both.png", curve)
    assert (tmp_path / "both.png").stat().st_size > (tmp_path / "bars.png").stat().st_size > 1000


def test_what_is_frozen_must_be_there(toy_llama, shard, tmp_path):
    with pytest.raises(ConfigError, match="no parameter's name contains 'convs'"):
        trainer(toy_llama, shard, tmp_path, frozen=["convs"])


def test_runs_are_compared_by_dataset(tmp_path, capsys):
    for name, lr, rounds in (("a", 0.1, 2.0), ("b", 0.2, 2.5)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.json").write_text(json.dumps({"lr": lr, "out": name, "row_tokens": 8, "rows_per_step": 2}))
        line = {"step": 3, "validation": {"rounds": rounds}}
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}) + "\n" + json.dumps(line) + "\n")
    report = {"runs": {}, "rows": [], "provenance": {"device": "cpu"}}
    for name, value in (("a", 2.0), ("b", 2.5)):
        report["runs"][name] = {"drafter": str(tmp_path / name), "block_size": 8}
        row = {"run": name, "group": "dataset", "name": "gsm8k", "metric": "acceptance_length", "low": 1.5, "high": 3.0}
        report["rows"] += [row | {"drafts": 7, "value": value}, row | {"drafts": 3, "value": 1.0}]
        report["rows"].append(row | {"drafts": 7, "group": "all", "name": "T=0", "value": value - 0.5})
    (tmp_path / "report.json").write_text(json.dumps(report))
    out = tmp_path / "ablation.json"
    main(
        [
            "--runs",
            str(tmp_path / "a"),
            str(tmp_path / "b"),
            "--reports",
            str(tmp_path / "report.json"),
            "--out",
            str(out),
        ]
    )
    assert json.loads(out.read_text())["provenance"] == [{"device": "cpu"}]
    found = json.loads(out.read_text())["runs"]
    assert found["b"] == {
        "settings": {"lr": 0.2},
        "curve": [[48, 2.5]],
        "acceptance_length": {
            "gsm8k": {"value": 2.5, "low": 1.5, "high": 3.0, "gain_percent": 25.0},
            "all": {"value": 2.0, "low": 1.5, "high": 3.0, "gain_percent": 33.33},
        },
    }
    assert "| b | 2.00 [1.50, 3.00] +33.3 % | 2.50 [1.50, 3.00] +25.0 % |" in capsys.readouterr().out
    assert "| b | 2.50 +25.0 % |" in table(compare([tmp_path / "a", tmp_path / "b"], []))
    with pytest.raises(ConfigError, match="cannot be read"):
        compare([tmp_path / "c"], [])


def test_the_documented_table_is_the_result_file():
    root = Path(dflash2.__file__).parents[1]
    found = json.loads((root / "dflash2/bench/results/ablation-smollm2.json").read_text())
    documented = (root / "docs/training.md").read_text()
    for line in table(found).splitlines()[2:]:
        assert line.partition("| ")[2].partition(" | ")[2] in documented
