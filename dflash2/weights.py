"""Checkpoint folders: which files and tensors belong, reading them, and writing the published layout."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash2.checkpoint_files import CONFIG, INDEX, MASK_EMBEDDING, WEIGHTS, find
from dflash2.config import DFlash2Config
from dflash2.errors import CheckpointError, ConfigError
from dflash2.int8_linear import has_int8_linears

if TYPE_CHECKING:
    from dflash2.drafter import DFlash2Drafter

__all__ = ["load", "save"]

LOADABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: Copies of the target's tables that some exports carry. The target's own are used.
NOT_OURS = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.", "rotary_emb.")


def load(
    cls: type[DFlash2Drafter], source: str | Path, dtype: torch.dtype | None, device: torch.device
) -> DFlash2Drafter:
    """See `DFlash2Drafter.from_pretrained`. Tensors go straight to their place; no second set of weights exists."""
    folder = find(source)
    config = DFlash2Config.from_pretrained(folder)
    drafter = cls(config, device="meta", dtype=dtype)
    expected = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, tensor in _tensors(folder, problems):
        if _is_identity_map(name, tensor):
            continue
        if name not in expected:
            problems.append(f"unexpected tensor {name} {list(tensor.shape)}")
        elif name in found:
            problems.append(f"{name} is there twice, in two spellings or files")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(expected[name])}")
        elif tensor.dtype not in LOADABLE:
            problems.append(f"{name} is {tensor.dtype}: quantised drafters are not implemented")
        else:
            found[name] = tensor.to(device, drafter.dtype)
    missing = [name for name in expected if name not in found and not any(p.startswith(name) for p in problems)]
    if len(missing) == len(expected):
        problems.append(f"all {len(missing)} tensors are missing")
    else:
        problems += [f"missing tensor {name} {list(expected[name])}" for name in missing]
    if problems:
        raise CheckpointError(
            f"{folder} does not hold a {config.architecture} as its {CONFIG} describes it:\n  - "
            + "\n  - ".join(sorted(problems))
            + "\nCompare the file with its source (truncated download?), or correct the config."
        )
    drafter.load_state_dict(found, assign=True)
    drafter.mask_embedding = _mask_embedding(folder, config, device, drafter.dtype)
    return drafter.requires_grad_(False).eval()


def _tensors(folder: Path, problems: list[str]) -> Iterator[tuple[str, Tensor]]:
    """The drafter's tensors, one at a time, under their published names; file-level faults go to ``problems``."""
    if (folder / INDEX).exists():
        files = _shards(folder / INDEX)
    elif (folder / WEIGHTS).exists():
        files = [WEIGHTS]
    else:
        files = sorted(p.name for p in folder.glob("*.safetensors") if p.name not in MASK_EMBEDDING)
    if not files:
        raise CheckpointError(f"{folder} holds no {WEIGHTS}; only safetensors files are read.")
    for name in files:
        try:
            with safe_open(folder / name, framework="pt") as f:
                for key in f.keys():  # noqa: SIM118 - not a mapping
                    name = key.removeprefix("model.")
                    name = name.removesuffix(".weight") if "_codebook" in name else name
                    if not name.startswith(NOT_OURS):  # not even read: they are the largest tensors there are
                        yield name, f.get_tensor(key)
        except (SafetensorError, OSError) as e:
            problems.append(f"file {name} cannot be read ({e}): missing or truncated")


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
        raise CheckpointError(
            f"{index} is no index of shards ({type(e).__name__}: {e}): expected an object with weight_map, tensor name "
            "to file name. Copy it again."
        ) from e


def _is_identity_map(name: str, tensor: Tensor) -> bool:
    """Vocabulary maps that map nothing: offsets (d2t) of 0, or every token present (t2d)."""
    return (name == "d2t" and not bool(tensor.any())) or (name == "t2d" and bool(tensor.all()))


def _mask_embedding(folder: Path, config: DFlash2Config, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """The optional row that replaces the target's embedding of the mask token, inside the drafter only."""
    path = next((folder / n for n in MASK_EMBEDDING if (folder / n).exists()), None)
    if path is None:
        return None
    try:
        if path.suffix == ".pt":
            data = torch.load(path, weights_only=True, map_location="cpu")
        else:
            with safe_open(path, framework="pt") as f:
                data = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 - not a mapping
    except Exception as e:  # torch.load raises pickle, zip and runtime errors
        raise CheckpointError(f"{path} cannot be read ({type(e).__name__}: {e}). Copy it again.") from e
    row, token = (data.get("embedding"), data.get("mask_token_id")) if isinstance(data, dict) else (data, None)
    if token is not None and int(token) != config.mask_token_id:
        raise CheckpointError(
            f"{path} is for mask_token_id={int(token)} and {CONFIG} says {config.mask_token_id}. They belong to "
            "different checkpoints."
        )
    if not isinstance(row, Tensor) or row.numel() != config.hidden_size:
        shape = list(row.shape) if isinstance(row, Tensor) else type(row).__name__
        raise CheckpointError(f"{path} holds {shape}: expected one embedding row [{config.hidden_size}].")
    return row.reshape(config.hidden_size).to(device, dtype)


def save(drafter: DFlash2Drafter, folder: Path) -> None:
    """See `DFlash2Drafter.save_pretrained`. All is written aside first, so that a failure leaves the old files."""
    if has_int8_linears(drafter):
        raise ConfigError(
            "this drafter's linears are int8 and published checkpoints are 16-bit: save it before quantize_linears()."
        )
    folder.mkdir(parents=True, exist_ok=True)
    config = {**drafter.config.to_dict(), "dtype": str(drafter.dtype).removeprefix("torch.")}
    tensors = {name: t.detach().contiguous().cpu() for name, t in drafter.state_dict().items()}
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as aside:
        new = Path(aside)
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        if drafter.mask_embedding is not None:
            data = {"embedding": drafter.mask_embedding.cpu(), "mask_token_id": drafter.config.mask_token_id}
            torch.save(data, new / MASK_EMBEDDING[1])
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shutil.copymode(new / CONFIG, new / WEIGHTS)  # safetensors makes its files readable by their owner only
        written = sorted(path.name for path in new.iterdir())
        for name in written:
            os.replace(new / name, folder / name)
    for name in {INDEX, *MASK_EMBEDDING} - set(written):  # of what lay here before; loading would prefer it
        (folder / name).unlink(missing_ok=True)
