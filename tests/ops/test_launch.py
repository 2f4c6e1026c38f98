"""Which launch settings a kernel gets: measured ones of the nearest shape, defaults elsewhere, an override first."""

import json
import threading

import pytest
import torch

from dflash2.ops import launch
from dflash2.ops.launch import launch_settings, override, settings_file, settings_folders

DEFAULTS = {"BLOCK": 64, "num_warps": 4}
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU of the name "NVIDIA H200", and the folder of this user's settings."""
    monkeypatch.setenv("DFLASH2_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    launch._measured.cache_clear()
    yield settings_folders()[0]
    launch._measured.cache_clear()


def write(folder, ops):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / settings_file("NVIDIA H200")).write_text(json.dumps({"device": "NVIDIA H200", "ops": ops}))


def entry(block, **shape):
    return {"shape": shape, "settings": {"BLOCK": block}, "median_us": 1.0}


def test_elsewhere_than_on_a_gpu_the_defaults_are_taken():
    assert launch_settings("head", DEFAULTS, torch.device("cpu"), rows=7) == DEFAULTS


@pytest.mark.parametrize(("rows", "block"), [(1, 16), (7, 32), (10, 32), (30, 128), (64, 128), (4096, 128)])
def test_the_nearest_shape_in_octaves_decides(gpu, rows, block):
    write(gpu, {"head": [entry(16, rows=1), entry(32, rows=8), entry(128, rows=64)]})
    assert launch_settings("head", DEFAULTS, GPU, rows=rows) == {"BLOCK": block, "num_warps": 4}


def test_all_sizes_count_and_a_size_not_measured_does_not(gpu):
    write(gpu, {"head": [entry(16, rows=8, width=1024), entry(32, rows=16, width=8192)]})
    assert launch_settings("head", DEFAULTS, GPU, rows=8, width=8192, other=3)["BLOCK"] == 32


def test_the_users_file_comes_before_the_one_that_ships(gpu, tmp_path, monkeypatch):
    shipped = tmp_path / "shipped"
    write(shipped, {"head": [entry(16, rows=1)]})
    monkeypatch.setattr(launch, "settings_folders", lambda: [gpu, shipped])
    assert launch_settings("head", DEFAULTS, GPU, rows=1)["BLOCK"] == 16
    launch._measured.cache_clear()
    write(gpu, {"head": [entry(32, rows=1)]})
    assert launch_settings("head", DEFAULTS, GPU, rows=1)["BLOCK"] == 32


def test_a_gpu_never_tuned_warns_once_and_takes_the_defaults(gpu, monkeypatch):
    monkeypatch.setattr(launch, "settings_folders", lambda: [gpu])
    with pytest.warns(UserWarning, match="never tuned for NVIDIA H200.*dflash2 tune"):
        assert launch_settings("head", DEFAULTS, GPU, rows=1) == DEFAULTS
    assert launch_settings("head", DEFAULTS, GPU, rows=1) == DEFAULTS


def test_an_op_never_tuned_on_a_tuned_gpu_takes_the_defaults(gpu):
    write(gpu, {"head": [entry(16, rows=1)]})
    assert launch_settings("attention", DEFAULTS, GPU, rows=1) == DEFAULTS


def test_settings_that_no_longer_exist_are_refused(gpu):
    write(gpu, {"head": [{"shape": {"rows": 1}, "settings": {"TILE": 8}, "median_us": 1.0}]})
    with pytest.raises(ValueError, match=r"head hold \['TILE'\].*expected \['BLOCK', 'num_warps'\].*Tune again"):
        launch_settings("head", DEFAULTS, GPU, rows=1)


def test_override_wins_and_notes_the_shapes(gpu):
    write(gpu, {"head": [entry(16, rows=1)]})
    with override("head", {"BLOCK": 512}) as asked:
        assert launch_settings("head", DEFAULTS, GPU, rows=3, width=5) == {"BLOCK": 512, "num_warps": 4}
        assert launch_settings("head", DEFAULTS, torch.device("cpu"), rows=4)["BLOCK"] == 512
        with override("tail", {"num_warps": 8}), override("head", {"BLOCK": 8}) as inner:
            assert launch_settings("tail", DEFAULTS, GPU) == {"BLOCK": 64, "num_warps": 8}
            assert launch_settings("head", DEFAULTS, GPU, rows=9)["BLOCK"] == 8
    assert asked == [{"rows": 3, "width": 5}, {"rows": 4}]
    assert inner == [{"rows": 9}]
    assert launch_settings("head", DEFAULTS, GPU, rows=1)["BLOCK"] == 16


def test_override_of_unknown_settings_is_refused():
    with override("head", {"TILE": 8}), pytest.raises(ValueError, match="TILE"):
        launch_settings("head", DEFAULTS, torch.device("cpu"), rows=1)


def test_override_holds_for_its_thread_only():
    seen = []
    with override("head", {"BLOCK": 8}):
        thread = threading.Thread(target=lambda: seen.append(launch_settings("head", DEFAULTS, torch.device("cpu"))))
        thread.start()
        thread.join()
    assert seen == [DEFAULTS]


@pytest.mark.parametrize(
    ("name", "file"),
    [("NVIDIA H200", "nvidia-h200.json"), ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb.json")],
)
def test_file_names(name, file):
    assert settings_file(name) == file
