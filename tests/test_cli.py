"""The command `dflash2`: help that teaches, exit codes, one-line errors, and its three commands on a tiny pair."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_generate import drafter

import dflash2
from dflash2 import cli


def run(capsys, *argv: str) -> tuple[int, str, str]:
    try:
        code = cli.main(list(argv))
    except SystemExit as e:
        code = int(e.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


def expected(pair, text: str, tokens: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(pair[0]), AutoModelForCausalLM.from_pretrained(pair[0])
    ids = tokenizer(text, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


# -- help -----------------------------------------------------------------------------------------------------------


def test_help_is_fast_and_needs_no_torch():
    code = (
        "import sys\nfrom dflash2.cli import main\ntry:\n    main(['--help'])\nfinally:\n"
        "    heavy = {'torch', 'transformers', 'triton', 'numpy'} & set(sys.modules)\n    assert not heavy, heavy\n"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - began < 3
    for word in (
        "demo",
        "generate",
        "inspect",
        "head-report",
        "examples:",
        "exit codes:",
        "--target",
        "the output is the target's own",
    ):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("demo", ["--prompt", "--json", "default: 128", "smollm2-135m-dflash2"]),
        ("generate", ["--file", "--temperature", "0 is greedy", "--seed", "standard input", "default: 256", "--raw"]),
        ("inspect", ["--target", "--json", "fit"]),
        (
            "head-report",
            ["--target", "--text", "--max-tokens", "default: 4096", "KL divergence", "chat template", "--json"],
        ),
    ],
)
def test_help_of_a_command(command, words, capsys):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    for word in words:
        assert word in out


def test_every_option_is_explained():
    import argparse

    parsers = [cli._parser()]
    commands = next(a for a in parsers[0]._actions if isinstance(a, argparse._SubParsersAction))
    parsers += commands.choices.values()
    known = ["bench", "bench-serve", "demo", "doctor", "eval", "generate", "head-report", "inspect", "stress", "synth"]
    known += ["trace", "train", "tune"]
    assert sorted(commands.choices) == known
    for action in (a for p in parsers for a in p._actions):
        assert action.help or isinstance(action, argparse._SubParsersAction), action.option_strings


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert (code, out) == (0, f"dflash2 {dflash2.__version__}\n")


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "dflash2", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"dflash2 {dflash2.__version__}\n")


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "command"),
        (["fly"], "invalid choice"),
        (["train"], "ConfigError: training settings"),
        (["inspect", "/no/such/drafter"], "CheckpointError: /no/such/drafter: no such folder"),
        (["inspect", "DRAFTER", "--target", "/no/such/target"], "target /no/such/target"),
        (["generate", "hi", "--drafter", "/no/such"], "CheckpointError: /no/such: no such folder"),
        (
            ["generate", "hi", "--target", "/no/such/target", "--drafter", "DRAFTER"],
            "target /no/such/target: no such folder",
        ),
        (["generate", "hi", "--file", "x"], "both a prompt and --file"),
        (["generate", "--file", "/no/such/file"], "--file /no/such/file cannot be read: No such file"),
        (["generate", "  "], "the prompt is empty"),
        (["generate", "hi", "--device", "nonsense", "--drafter", "DRAFTER"], "device='nonsense'"),
        (["generate", "hi", "--dtype", "int8", "--drafter", "DRAFTER"], "dtype='int8'"),
        (
            ["generate", "w1", "--target", "TARGET", "--drafter", "DRAFTER", "--max-new-tokens", "0"],
            "no whole number of at least 1",
        ),
        (
            ["generate", "w1", "--target", "TARGET", "--drafter", "DRAFTER", "--num-draft-tokens", "8"],
            "num_draft_tokens=8",
        ),
        (["generate", "w1", "--target", "TARGET", "--drafter", "DRAFTER", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "w1", "--temperature", "warm"], "invalid float value"),
        (
            ["demo", "--target", "TARGET", "--drafter", "DRAFTER", "--max-new-tokens", "0"],
            "no whole number of at least 1",
        ),
        (
            ["demo", "--target", "TARGET", "--drafter", "DRAFTER", "--json", "/no/such/dir/x.json"],
            "/no/such/dir/x.json",
        ),
        (["head-report", "--target", "/no/such/target"], "target /no/such/target: no such folder"),
        (["head-report", "--text", "/no/such/file"], "--text /no/such/file cannot be read as UTF-8 text"),
        (["head-report", "--text", "/no/such/file.jsonl"], "/no/such/file.jsonl cannot be read as JSON lines"),
        (["head-report", "--target", "TARGET", "--max-tokens", "0"], "no whole number of at least 1"),
        (["head-report", "--target", "TARGET", "--dtype", "int8"], "dtype='int8'"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_errors(argv, words, pair, capsys):
    """Exit code 2, one line that says what is wrong, no traceback."""
    argv = [{"TARGET": pair[0], "DRAFTER": pair[1]}.get(a, a) for a in argv]
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("dflash2: ")]
    assert len(lines) == 1 or "usage:" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(pair, capsys):
    code, _, err = run(capsys, "generate", "w1", "--device", "cuda", "--drafter", pair[1])
    assert code == 2
    assert "device='cuda': torch" in err
    assert "Use auto or cpu" in err


def test_config_errors_reach_the_user(pair, tmp_path, capsys):
    file = json.loads((Path(pair[1]) / "config.json").read_text())
    file["dflash_config"].pop("mask_token_id")
    (tmp_path / "config.json").write_text(json.dumps(file))
    code, _, err = run(capsys, "inspect", str(tmp_path))
    assert code == 2
    assert err.startswith("dflash2: ConfigError: mask_token_id is missing")
    assert err.count("\n") == 1


def test_interrupt(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_inspect", interrupted)
    assert run(capsys, "inspect", "x") == (130, "", "dflash2: interrupted\n")


# -- inspect --------------------------------------------------------------------------------------------------------


def test_inspect(pair, capsys):
    code, out, err = run(capsys, "inspect", pair[1], "--target", pair[0])
    assert (code, err) == (0, "")
    facts = {line.split("  ")[0]: line for line in out.splitlines()}
    for name, value in {
        "architecture": "DFlash2DraftModel", "block_size": "8", "drafts per block": "7", "mask_token_id": "3",
        "taps (outputs of target layers)": "[0, 2]", "window per layer": "[16, 16]", "hidden_size": "32",
        "causal in the block": "[False, False]",
    }.items():  # fmt: skip
        assert facts[name].endswith(value), facts[name]
    assert "'fits': True" in out or "fits" in out


def test_inspect_json(pair, capsys):
    code, out, _ = run(capsys, "inspect", pair[1], "--json", "--target", pair[0])
    facts = json.loads(out)
    made = drafter()
    assert code == 0
    assert facts["fits target"] == {"target": pair[0], "fits": True, "problems": []}
    assert facts["parameters"] == sum(p.numel() for p in made.parameters())
    assert facts["weight_bytes"] == 4 * facts["parameters"]
    # K and V of two layers, two heads of eight, fp32; ceil(16 / 16) + 2 pages of 16 rows.
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert facts["kv_pages_per_sequence (of 16)"] == 3
    assert facts["kv_bytes_per_sequence"] == 3 * 16 * facts["kv_bytes_per_token"]
    moved = facts["bytes_per_propose"]
    books = 2 * 50 * 6 * 4
    assert moved["drafter weights"] == facts["weight_bytes"] - books
    assert moved["target head"] == 50 * 32 * 4
    assert facts["bytes_per_propose_int8_head"]["target head"] == 50 * 32
    assert moved["context rows"] == 15 * facts["kv_bytes_per_token"]


def test_inspect_pages_are_the_kvs(pair, capsys):
    """What is printed is what a KV really reserves and holds."""
    _, out, _ = run(capsys, "inspect", pair[1], "--json")
    facts = json.loads(out)
    kv = drafter().new_kv(max_sequences=3, max_tokens=100_000)
    assert kv.pages_needed(100_000) == facts["kv_pages_per_sequence (of 16)"]
    per_page = facts["kv_bytes_per_sequence"] // 3
    assert (kv.keys.nbytes + kv.values.nbytes) // kv.keys.shape[1] * 16 == per_page or kv.nbytes >= 9 * per_page


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_size": 16}, "hidden_size: drafter 16, target 32"),
        ({"num_target_layers": 9}, "num_target_layers: drafter 9, target 4"),
        ({"num_target_layers": None, "target_layer_ids": (1, 7)}, "target_layer_ids: [1, 7]"),
        ({"vocab_size": 51}, "vocab_size: drafter 51, target 50"),
    ],
    ids=str,
)
def test_inspect_misfits(change, word, pair, tmp_path, capsys):
    drafter(**change).save_pretrained(tmp_path)
    code, out, _ = run(capsys, "inspect", str(tmp_path), "--target", pair[0])
    assert code == 1
    assert word in out
    code, out, _ = run(capsys, "inspect", str(tmp_path), "--target", pair[0], "--json")
    assert code == 1
    assert json.loads(out)["fits target"]["problems"][0].startswith(word)


def test_inspect_full_attention(tmp_path, capsys):
    drafter(layer_types=("full_attention", "sliding_attention")).save_pretrained(tmp_path)
    code, out, _ = run(capsys, "inspect", str(tmp_path))
    assert code == 0
    assert "grows: a layer attends to everything" in out
    assert "['full', 16]" in out


def test_inspect_counts_int8(pair, capsys):
    """The line for int8 is what a drafter with int8 linears then says of itself."""
    from dflash2.inspection import describe

    facts = json.loads(run(capsys, "inspect", pair[1], "--json")[1])
    made = drafter().quantize_linears()
    quantised = describe(made)
    assert (facts["int8 linears"], quantised["int8 linears"]) == (False, True)
    assert quantised["parameters"] == facts["parameters"]
    assert quantised["bytes_per_propose_int8_head"] == quantised["bytes_per_propose_int8_all"]
    assert quantised["bytes_per_propose_int8_all"] == facts["bytes_per_propose_int8_all"]
    linears = [m for m in drafter().modules() if isinstance(m, torch.nn.Linear)]
    large = [m.weight for m in linears if m is not made.candidate_selector.hidden_projection and m.weight.shape[0] != 6]
    saved = sum(3 * w.numel() - 4 * w.shape[0] for w in large)  # from 4 bytes to 1, and 4 for each scale
    assert quantised["weight_bytes"] == facts["weight_bytes"] - saved


# -- generate -------------------------------------------------------------------------------------------------------

PROMPT = "w5 w9 w1 w30"


def test_generate_streams(pair, capsys):
    argv = ["generate", "--target", pair[0], "--drafter", pair[1], "--max-new-tokens", "12"]
    code, out, err = run(capsys, *argv, PROMPT)
    assert code == 0
    assert out.strip() == expected(pair, PROMPT, 12)
    assert "acceptance_length" in err
    assert "target_passes" in err
    assert "Traceback" not in err


def test_generate_sources(pair, tmp_path, monkeypatch, capsys):
    argv = ["generate", "--target", pair[0], "--drafter", pair[1], "--max-new-tokens", "9", "--json"]
    text = expected(pair, PROMPT, 9)
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    stdin = io.StringIO(PROMPT)
    for more in ([PROMPT], ["--file", str(file)], [], ["-"]):
        stdin.seek(0)
        monkeypatch.setattr(sys, "stdin", stdin)
        code, out, _ = run(capsys, *argv, *more)
        assert code == 0
        numbers = json.loads(out)
        assert numbers["text"] == text
        assert numbers["new_tokens"] == 9
        assert 2 <= numbers["target_passes"] <= 9
        assert 1 <= numbers["acceptance_length"] <= 8


def test_generate_settings(pair, capsys):
    argv = ["generate", "--target", pair[0], "--drafter", pair[1], "--max-new-tokens", "15", "--json", PROMPT]
    sampled = [*argv, "--temperature", "1.0", "--top-k", "20", "--top-p", "0.9"]
    texts = [json.loads(run(capsys, *sampled, "--seed", seed)[1])["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    plain = json.loads(run(capsys, *argv, "--num-draft-tokens", "0")[1])
    assert plain["text"] == expected(pair, PROMPT, 15)
    assert plain["acceptance_length"] == 1
    bf16 = run(capsys, *argv, "--dtype", "bfloat16", "--device", "cpu")
    assert bf16[0] == 0


def test_chat_template(pair, tmp_path, capsys):
    """The user's turn and the system's go through the template; --raw does not."""
    import shutil

    target = tmp_path / "target"
    shutil.copytree(pair[0], target)
    template = "{% for m in messages %}{{ 'w1 ' if m.role == 'user' else 'w2 ' }}{{ m.content }} {% endfor %}w3"
    (target / "chat_template.jinja").write_text(template)
    argv = ["generate", "--target", str(target), "--drafter", pair[1], "--max-new-tokens", "8", "--json", "w7 w8"]
    for more, prompt in (
        ([], "w1 w7 w8 w3"),
        (["--system", "w9"], "w2 w9 w1 w7 w8 w3"),
        (["--raw"], "w7 w8"),
    ):
        code, out, _ = run(capsys, *argv, *more)
        assert code == 0
        assert json.loads(out)["text"] == expected(pair, prompt, 8)


# -- demo -----------------------------------------------------------------------------------------------------------


def test_demo(pair, tmp_path, capsys):
    numbers = tmp_path / "demo.json"
    argv = ["demo", "--target", pair[0], "--drafter", pair[1], "--max-new-tokens", "10", "--json", str(numbers)]
    argv += ["--repeats", "2"]
    code, out, _ = run(capsys, *argv, "--prompt", PROMPT, "--prompt", "w2 w3")
    assert code == 0
    assert out.splitlines()[-1] == "outputs identical to plain greedy decoding: yes, 2 of 2 answers"
    assert expected(pair, PROMPT, 10) in out.replace("\n    ", " ")
    for words in ("acceptance: tokens per verify pass", "target passes saved", "plain tok/s", "[prompt 1]", "ratio"):
        assert words in out
    report = json.loads(numbers.read_text())
    assert report["settings"]["max_new_tokens"] == 10
    assert report["provenance"]["device"].startswith("cpu (")
    rows = report["answers"]
    assert [r["prompt"] for r in rows] == [PROMPT, "w2 w3"]
    assert all(r["tokens"] == 10 and r["difference"] is None and len(r["plain_s"]) == 2 for r in rows)


def test_demo_has_three_prompts(pair, capsys):
    code, out, _ = run(capsys, "demo", "--target", pair[0], "--drafter", pair[1], "--max-new-tokens", "3")
    assert code == 0
    for name in ("[code]", "[math]", "[chat]"):
        assert name in out
    assert "3 of 3 answers" in out.splitlines()[-1]


def test_demo_says_when_outputs_differ(pair, monkeypatch, capsys):
    from dflash2 import demo
    from dflash2.comparison import Difference

    monkeypatch.setattr(demo, "first_difference", lambda *a: Difference(4, (7, 8), 1e-6))
    argv = ["demo", "--target", pair[0], "--drafter", pair[1], "--max-new-tokens", "6", "--prompt", PROMPT]
    code, out, _ = run(capsys, *argv)
    assert code == 1
    assert "outputs identical: NO" in out
    assert "from token 4 on: (7, 8)" in out
    assert "1e-06 apart" in out


def test_demo_compares_with_plain_greedy_decoding(pair, tmp_path, capsys):
    """Penalties in a target's generation config are not greedy decoding, and must not show as a difference."""
    import shutil

    target = tmp_path / "target"
    shutil.copytree(pair[0], target)
    file = json.loads((target / "generation_config.json").read_text())
    file |= {"repetition_penalty": 1.5, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (target / "generation_config.json").write_text(json.dumps(file))
    argv = ["demo", "--target", str(target), "--drafter", pair[1], "--max-new-tokens", "20", "--prompt", PROMPT]
    code, out, _ = run(capsys, *argv)
    assert code == 0, out


def test_first_difference():
    from test_generate import target

    from dflash2.comparison import first_difference

    model, prompt = target(), torch.tensor([[5, 6, 7]])
    assert first_difference(model, prompt, [1, 2], [1, 2]) is None
    ended = first_difference(model, prompt, [1, 2], [1])
    assert (ended.index, ended.tokens, ended.logit_gap) == (1, (2, None), None)
    found = first_difference(model, prompt, [1, 2, 3], [1, 9, 3])
    logits = model(torch.tensor([[5, 6, 7, 1]])).logits[0, -1]
    assert (found.index, found.tokens) == (1, (2, 9))
    assert found.logit_gap == pytest.approx(float(logits[2] - logits[9]), abs=1e-5)


# -- head-report ----------------------------------------------------------------------------------------------------


def test_head_report(pair, tmp_path, capsys):
    text, prompts = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("w5 w9 w1 w30 " * 20)
    prompts.write_text('{"turns": ["w2 w3"]}\n{"turns": ["w7"]}\n')
    argv = ["head-report", "--target", pair[0], "--text", str(text), str(prompts)]
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "target: int8 head beside its own (float32), 83 positions of a.txt, b.jsonl"
    found = json.loads(lines[-1])
    assert (found["target"], found["tokens"], found["tied"], found["max_tokens"]) == ("target", 83, True, 4096)
    assert 0 <= found["kl_median"] <= found["kl_p99"] <= found["kl_max"]
    assert [t["file"] for t in found["texts"]] == ["a.txt", "b.jsonl"]
    assert found["provenance"]["device"].startswith("cpu (")
    code, out, _ = run(capsys, *argv, "--json", "--max-tokens", "5")
    assert (code, len(out.splitlines()), json.loads(out)["tokens"]) == (0, 1, 5)


def test_head_report_has_a_text_of_its_own(pair, capsys):
    code, out, _ = run(capsys, "head-report", "--target", pair[0], "--json", "--max-tokens", "700")
    assert code == 0
    assert json.loads(out)["tokens"] == 700
