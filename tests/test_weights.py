"""Checkpoint folders: every published layout loads, everything that does not belong is listed, saving is atomic."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FULL, SLIDING, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from dflash2 import CheckpointError, ConfigError, DFlash2Config, DFlash2Drafter
from dflash2 import weights as module
from dflash2.checkpoint_files import packaged_checkpoints

V1 = {"architecture": "DFlashDraftModel"}


def make(seed: int = 0, dtype: torch.dtype | None = None, **changes) -> DFlash2Drafter:
    drafter = DFlash2Drafter(tiny_config(**changes), dtype=dtype)
    g = torch.Generator().manual_seed(seed)
    for p in drafter.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g))
    return drafter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "drafter"
    make().save_pretrained(path)
    return path


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_equal(a: DFlash2Drafter, b: DFlash2Drafter) -> None:
    one, other = a.state_dict(), b.state_dict()
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def refused(folder, *words: str) -> str:
    with pytest.raises(CheckpointError) as e:
        DFlash2Drafter.from_pretrained(folder)
    for word in words:
        assert word in str(e.value), (word, str(e.value))
    return str(e.value)


# -- what loads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, V1, {"attention_bias": True}, {"layer_types": (SLIDING, FULL, SLIDING)}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip(tmp_path, changes, dtype):
    drafter = make(dtype=dtype, **changes)
    drafter.save_pretrained(tmp_path)
    again = DFlash2Drafter.from_pretrained(tmp_path)
    assert_equal(drafter, again)
    assert again.dtype == dtype, "B208: the config says the dtype that was saved"
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    assert again.config == tiny_config(**changes, dtype=str(dtype).removeprefix("torch."))


def test_published_names_and_shapes(folder):
    """SPEC 1.1: 15 L + 6 tensors, bare codebooks and base kernels, no prefix, no embedding, no head."""
    tensors = load_file(folder / "model.safetensors")
    c = tiny_config()
    layer = {
        "input_layernorm.weight": [16], "post_attention_layernorm.weight": [16],
        "self_attn.q_proj.weight": [32, 16], "self_attn.k_proj.weight": [16, 16], "self_attn.v_proj.weight": [16, 16],
        "self_attn.o_proj.weight": [16, 32], "self_attn.q_norm.weight": [8], "self_attn.k_norm.weight": [8],
        "mlp.gate_proj.weight": [24, 16], "mlp.up_proj.weight": [24, 16], "mlp.down_proj.weight": [16, 24],
        "attention_conv.base_kernel": [2, 2, 16], "mlp_conv.base_kernel": [2, 2, 16],
        "attention_conv.kernel_projection.weight": [16, 16], "mlp_conv.kernel_projection.weight": [16, 16],
    }  # fmt: skip
    expected = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    expected |= {
        "fc.weight": [16, 32], "hidden_norm.weight": [16], "norm.weight": [16],
        "candidate_selector.predecessor_codebook": [37, 6], "candidate_selector.successor_codebook": [37, 6],
        "candidate_selector.hidden_projection.weight": [6, 16],
    }  # fmt: skip
    assert {name: list(t.shape) for name, t in tensors.items()} == expected
    assert len(tensors) == 15 * c.num_hidden_layers + 6
    assert len(make(**V1).state_dict()) == 11 * 2 + 3
    assert len(make(attention_bias=True).state_dict()) == len(tensors) + 4 * 2  # q, k, v and o


def test_other_dtype_on_request(folder):
    assert DFlash2Drafter.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    loaded = DFlash2Drafter.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(loaded.fc.weight, make().fc.weight.bfloat16())


def test_both_codebook_spellings_and_prefix(folder):
    """B196."""

    def change(t):
        for name in list(t):
            suffix = ".weight" if "_codebook" in name else ""
            t[f"model.{name}{suffix}"] = t.pop(name)

    rewrite(folder, change)
    assert_equal(make(), DFlash2Drafter.from_pretrained(folder))


def test_sharded(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    index = {"metadata": {}, "weight_map": {n: file for file, part in shards.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal(make(), DFlash2Drafter.from_pretrained(folder))
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = refused(folder, "model-00002-of-00002.safetensors cannot be read")
    for name in names[1::2]:
        assert f"missing tensor {name}" in message
    assert f"missing tensor {names[0]}" not in message
    for broken in ("{", "[]", '{"weight_map": 3}', "{}"):
        (folder / "model.safetensors.index.json").write_text(broken)
        refused(folder, "model.safetensors.index.json", "weight_map")


def test_another_file_name(folder):
    (folder / "model.safetensors").rename(folder / "drafter.safetensors")
    assert_equal(make(), DFlash2Drafter.from_pretrained(folder))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_tables_of_the_target_are_not_read(folder, prefix, monkeypatch):
    """B131: tolerated, and B83: never allocated."""
    read = []

    class Watched:
        def __init__(self, *a, **kw):
            self.file = real(*a, **kw)

        def __enter__(self):
            self.open = self.file.__enter__()
            return self

        def __exit__(self, *a):
            return self.file.__exit__(*a)

        def keys(self):
            return self.open.keys()

        def get_tensor(self, name):
            read.append(name)
            return self.open.get_tensor(name)

    def change(t):
        t[f"{prefix}embed_tokens.weight"] = torch.zeros(37, 16)
        t["lm_head.weight"] = torch.zeros(5, 5)

    rewrite(folder, change)
    real = module.safe_open
    monkeypatch.setattr(module, "safe_open", Watched)
    loaded = DFlash2Drafter.from_pretrained(folder)
    assert_equal(make(), loaded)
    assert not loaded.is_bound
    assert read
    assert not any("embed_tokens" in name or "lm_head" in name for name in read)


def test_identity_vocabulary_maps(folder):
    """B136: offsets of zero map nothing; anything else is refused by name."""
    rewrite(folder, lambda t: t.update(d2t=torch.zeros(37, dtype=torch.int64), t2d=torch.ones(37, dtype=torch.bool)))
    DFlash2Drafter.from_pretrained(folder)
    rewrite(folder, lambda t: t.update(d2t=torch.arange(37)))
    refused(folder, "unexpected tensor d2t")


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and t.device.type != "meta":
                self.nbytes = max(self.nbytes, t.nbytes)
        return out


def test_no_vocabulary_by_hidden_allocation(tmp_path):
    """B83, P13: making, loading, binding and saving allocate nothing of size V x H."""
    config = tiny_config(vocab_size=5000, selector_rank=4)
    table = torch.ones(5000, 16)
    with Largest() as seen:
        drafter = DFlash2Drafter(config)
        drafter.bind_target(table, table)
        drafter.save_pretrained(tmp_path)
        DFlash2Drafter.from_pretrained(tmp_path).bind_target(table, table)
    assert 5000 * 4 * 4 <= seen.nbytes < 5000 * 16 * 2
    assert not [n for n, t in drafter.state_dict().items() if t.numel() >= 5000 * 16]
    assert drafter._embedding[0].data_ptr() == table.data_ptr()


# -- what is refused ------------------------------------------------------------------------------------------------


def test_all_faults_are_listed(folder):
    def change(t):
        del t["fc.weight"], t["layers.1.mlp.up_proj.weight"]
        t["layers.0.self_attn.q_norm.weight"] = torch.ones(9)
        t["layers.2.mlp.up_proj.weight"] = torch.ones(24, 16)
        t["layers.0.mlp.up_proj.weight"] = torch.ones(24, 16, dtype=torch.int8)
        t["norm.weight"] = torch.ones(16).to(torch.float8_e4m3fn)

    rewrite(folder, change)
    message = refused(
        folder,
        "missing tensor fc.weight [16, 32]",
        "missing tensor layers.1.mlp.up_proj.weight [24, 16]",
        "layers.0.self_attn.q_norm.weight has shape [9], expected [8]",
        "unexpected tensor layers.2.mlp.up_proj.weight [24, 16]",
        "layers.0.mlp.up_proj.weight is torch.int8: quantised",
        "norm.weight is torch.float8_e4m3fn: quantised",
        str(folder),
    )
    assert message.count("\n  - ") == 6


def test_half_a_v2_file(folder):
    """B194: a v2 config over v1 tensors, a v1 config over v2 tensors."""

    def change(t):
        for name in [n for n in t if "candidate_selector" in n or "_conv." in n]:
            del t[name]

    v1_config = tiny_config(**V1).to_json()
    (folder / "config.json").write_text(v1_config)
    refused(
        folder,
        "unexpected tensor candidate_selector.predecessor_codebook",
        "unexpected tensor layers.0.mlp_conv.base_kernel",
    )
    (folder / "config.json").write_text(tiny_config().to_json())
    rewrite(folder, change)
    refused(
        folder,
        "DFlash2DraftModel",
        "missing tensor candidate_selector.hidden_projection.weight",
        "missing tensor layers.1.",
    )
    file = json.loads(tiny_config().to_json())
    del file["dflash_config"]["selector_rank"]
    (folder / "config.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError, match="selector_rank"):
        DFlash2Drafter.from_pretrained(folder)


def test_twice_in_two_spellings(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(16)}))
    refused(folder, "norm.weight is there twice")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated(folder, keep):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    refused(folder, "file model.safetensors cannot be read", "truncated")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    refused(folder, "model.safetensors", "only safetensors")


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "config.json is missing")
    (folder / "config.json").write_text("{broken")
    refused(folder, "config.json cannot be read as JSON")


# -- mask embedding -------------------------------------------------------------------------------------------------


def write_mask(folder: Path, data, name: str = "mask_embedding.pt") -> None:
    save_file(data, folder / name) if name.endswith("safetensors") else torch.save(data, folder / name)


ROW = torch.arange(16.0)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (ROW, "mask_embedding.pt"),
        (ROW[None], "mask_embedding.pt"),
        ({"embedding": ROW, "mask_token_id": 36}, "mask_embedding.pt"),
        ({"embedding": ROW.double(), "mask_token_id": torch.tensor(36)}, "mask_embedding.pt"),
        ({"embedding": ROW}, "mask_embedding.safetensors"),
        ({"embedding": ROW, "mask_token_id": torch.tensor([36])}, "mask_embedding.safetensors"),
    ],
)
def test_mask_embedding(folder, data, name):
    """The drafter's own row of the mask token; the shared table of the target stays as it is (SPEC 7.12)."""
    write_mask(folder, data, name)
    drafter = DFlash2Drafter.from_pretrained(folder)
    table = torch.randn(37, 16)
    before = table.clone()
    drafter.bind_target(table, table)
    rows = drafter.embed(torch.tensor([5, 36]), 2)
    assert torch.equal(rows[0, 0], table[5])
    assert torch.equal(rows[:, 1:], ROW.expand(2, 2, 16))
    assert torch.equal(rows[1, 0], ROW), "an anchor that is the mask token has the row, too"
    assert torch.equal(table, before)
    assert_equal(make(), drafter)
    drafter.save_pretrained(folder)
    again = DFlash2Drafter.from_pretrained(folder)
    assert torch.equal(again.mask_embedding, ROW)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"embedding": ROW, "mask_token_id": 35}, ["mask_token_id=35", "36"]),
        (torch.ones(17), ["[17]", "[16]"]),
        (torch.ones(2, 16), ["[2, 16]"]),
        ({"weight": ROW}, ["expected one embedding row"]),
        ([ROW], ["list"]),
        (Path("x"), ["cannot be read", "UnpicklingError"]),
    ],
)
def test_mask_embedding_refused(folder, data, words):
    write_mask(folder, data)
    refused(folder, "mask_embedding.pt", *words)


def test_mask_embedding_runs_no_code(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    torch.save({"embedding": ROW, "x": Evil()}, folder / "mask_embedding.pt")
    refused(folder, "mask_embedding.pt")
    assert not (tmp_path / "owned").exists()


def test_mask_embedding_truncated(folder):
    (folder / "mask_embedding.pt").write_bytes(b"PK\x03\x04")
    refused(folder, "mask_embedding.pt", "cannot be read")


# -- saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["save_file", "torch.save", "json"])
def test_interrupted_save_leaves_the_old_files(folder, failing, monkeypatch):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    new = make(seed=1)
    new.mask_embedding = ROW

    def fail(*a, **kw):
        raise KeyboardInterrupt

    if failing == "save_file":

        def fail_half(tensors, path, **kw):
            Path(path).write_bytes(b"half")
            raise KeyboardInterrupt

        monkeypatch.setattr(module, "save_file", fail_half)
    elif failing == "torch.save":
        monkeypatch.setattr(torch, "save", fail)
    else:
        monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(KeyboardInterrupt):
        new.save_pretrained(folder)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert_equal(make(), DFlash2Drafter.from_pretrained(folder))


def test_saving_over_other_layouts(folder):
    """What a folder held before must not be preferred to what was just saved."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = load_file(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_mask(folder, {"embedding": ROW}, "mask_embedding.safetensors")
    new = make(seed=1)
    new.save_pretrained(folder)
    again = DFlash2Drafter.from_pretrained(folder)
    assert_equal(new, again)
    assert again.mask_embedding is None
    write_mask(folder, {"embedding": ROW}, "mask_embedding.safetensors")
    new.mask_embedding = ROW + 1
    new.save_pretrained(folder)
    assert torch.equal(DFlash2Drafter.from_pretrained(folder).mask_embedding, ROW + 1)


def test_saves_only_its_own(tmp_path):
    drafter = make()
    drafter.bind_target(torch.randn(37, 16), torch.randn(37, 16))
    drafter.save_pretrained(tmp_path / "a" / "b")
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(tmp_path / "a" / "b" / "model.safetensors").keys() == make().state_dict().keys()


# -- where it is looked for -----------------------------------------------------------------------------------------


def test_hub(folder, monkeypatch):
    asked = []

    def snapshot_download(repo, allow_patterns):
        asked.append((repo, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert_equal(make(), DFlash2Drafter.from_pretrained("owner/name"))
    assert DFlash2Config.from_pretrained("owner/name") == tiny_config()
    assert {repo for repo, _ in asked} == {"owner/name"}
    patterns = asked[0][1]
    assert not any(p in ("*", "*.bin", "*.pt") for p in patterns), "safetensors only"


def test_hub_offline(monkeypatch):
    def snapshot_download(*a, **kw):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    refused("owner/name", "owner/name", "LocalEntryNotFoundError", "no network", "download")


def test_folder_wins_over_hub(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **kw: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    folder.rename(tmp_path / "owner" / "name")
    assert_equal(make(), DFlash2Drafter.from_pretrained("owner/name"))


@pytest.mark.parametrize("name", ["nowhere", "./owner/name", "/no/such", "a/b/c"])
def test_no_such_folder(name, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **kw: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    refused(name, name, "no such folder", "hub id")


def test_packaged_name(folder, tmp_path, monkeypatch):
    from dflash2 import checkpoint_files

    packaged = tmp_path / "packaged"
    packaged.mkdir()
    folder.rename(packaged / "some-dflash2")
    monkeypatch.setattr(checkpoint_files, "_CHECKPOINTS", packaged)
    monkeypatch.chdir(tmp_path)
    assert_equal(make(), DFlash2Drafter.from_pretrained("some-dflash2"))
    refused("other-dflash2", "some-dflash2")


@pytest.mark.parametrize("name", packaged_checkpoints())
def test_packaged_checkpoints_load(name):
    drafter = DFlash2Drafter.from_pretrained(name)
    assert all(p.isfinite().all() for p in drafter.parameters())
