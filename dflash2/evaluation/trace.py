"""What a target did, on disk: answers, taps of the layers that drafters read, and the two tables that they borrow.

A folder with ``trace.json`` (what made it), ``tables.safetensors`` (the target's embedding and head) and shards
``00000.safetensors`` of some documents each. The tables are stored and not looked up in the target's checkpoint: names
of tensors differ from one architecture to the next, a trace can be carried to a machine without the target, and beside
the taps of a few hundred answers they are small. Documents at a temperature also keep the hidden state that the head
reads: one row of H numbers gives the probability of any token exactly, where stored top logits would give it of some.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash2.config import MAX_PADDED_ROWS, DFlash2Config
from dflash2.errors import CheckpointError, ConfigError
from dflash2.lm_head import DenseLMHead

__all__ = ["Shard", "Tables", "Trace", "TraceWriter", "choose_layers"]

FORMAT = 1
MANIFEST, TABLES = "trace.json", "tables.safetensors"
#: Of a document: which set its prompt is from, and what the set says of it.
ABOUT = ("dataset", "domain", "id")


@dataclass(frozen=True)
class Shard:
    """D documents of N tokens in all, each a prompt and its answer, one after the other.

    Attributes:
        tokens: int64 ``[N]``.
        lengths: int64 ``[D]``, tokens of prompt and answer.
        prompt_lengths: int64 ``[D]``.
        temperatures: fp32 ``[D]``; 0 is greedy.
        taps: ``[N, T*H]``, outputs of the trace's layers, concatenated in their order.
        states: ``[N, H]``, what the head reads at each token; None where all documents are greedy.
        about: for each document ``dataset``, ``domain`` and ``id``.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    temperatures: Tensor
    taps: Tensor
    states: Tensor | None
    about: list[dict[str, str]]

    @cached_property
    def starts(self) -> Tensor:
        """int64 ``[D]``, index of each document's first token."""
        return self.lengths.cumsum(0) - self.lengths


@dataclass(frozen=True)
class Tables:
    """What a drafter borrows of the target: ``embedding [V', H]`` and its output ``head``."""

    embedding: Tensor
    head: DenseLMHead


class TraceWriter:
    """Writes a trace shard by shard; a folder of an interrupted run goes on where it ended.

    Args:
        folder: made if need be.
        about: what makes this trace this one, JSON values. Must have ``layer_ids``, ``shards`` (how many there will
            be), ``max_new_tokens``, ``target`` (with ``hidden_size``, ``num_layers``, ``vocab_size``) and ``dtype``.
        origin: where it was made (date, versions); does not have to be the same when a run goes on.

    Raises:
        ConfigError: another trace lies in the folder.
    """

    def __init__(self, folder: Path, about: dict[str, Any], origin: dict[str, Any]):
        self.folder, about = folder, {"format": FORMAT, **json.loads(json.dumps(about))}
        self.key = _key(about)
        self.shards = int(about["shards"])
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / MANIFEST
        if path.exists():
            other = _read_manifest(folder)["about"]
            changed = sorted(k for k in about.keys() | other.keys() if about.get(k) != other.get(k))
            if changed:
                raise ConfigError(
                    f"{folder} holds another trace: {', '.join(changed)} {'is' if len(changed) == 1 else 'are'} "
                    "different. Name another folder, or delete this one."
                )
        else:
            _write_text(path, json.dumps({"about": about, "origin": origin}, indent=2) + "\n")

    @property
    def missing(self) -> list[int]:
        """Numbers of the shards that are still to be written."""
        return [i for i in range(self.shards) if not _shard_path(self.folder, i).exists()]

    def write_tables(self, embedding: Tensor, head: Tensor, bias: Tensor | None) -> None:
        """Store the target's embedding and head ``[V', H]``; tied ones once."""
        tied = head.data_ptr() == embedding.data_ptr() and head.shape == embedding.shape
        tensors = {"embedding": embedding} | ({} if tied else {"head": head}) | ({} if bias is None else {"bias": bias})
        _save(self.folder / TABLES, tensors, {"trace": self.key})

    def write(self, number: int, shard: Shard, found: dict[str, Any]) -> None:
        """Store shard ``number``; ``found`` is what was measured on the way (JSON values)."""
        names = ("lengths", "prompt_lengths", "temperatures", "taps", "states")
        tensors = {"tokens": shard.tokens.int()} | {
            n: getattr(shard, n) for n in names if getattr(shard, n) is not None
        }
        details = {"trace": self.key, "about": json.dumps(shard.about), "found": json.dumps(found)}
        _save(_shard_path(self.folder, number), tensors, details)


class Trace:
    """A finished trace.

    Args:
        folder: where `TraceWriter` wrote it.

    Raises:
        CheckpointError: there is none, it is unfinished, or of another version of this package.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        manifest = _read_manifest(self.folder)
        self.about, self.origin = manifest["about"], manifest["origin"]
        self.key = _key(self.about)
        paths = [_shard_path(self.folder, i) for i in range(int(self.about["shards"]))]
        there = sum(p.exists() for p in paths)
        if there < len(paths) or not (self.folder / TABLES).exists():
            raise CheckpointError(
                f"{self.folder} is an unfinished trace, {there} of {len(paths)} shards are there. Run the same "
                "`dflash2 trace` again: it goes on where it ended."
            )
        self._paths = paths
        self._kept: tuple[tuple[str, torch.dtype], Tables] | None = None
        self.layer_ids = tuple(int(i) for i in self.about["layer_ids"])
        self.max_new_tokens = int(self.about["max_new_tokens"])
        self.dtype: torch.dtype = getattr(torch, self.about["dtype"])

    def tables(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Tables:
        """The target's embedding and head, in the trace's dtype by default; the same tensors when asked for again."""
        kind = (str(device), dtype or self.dtype)
        if self._kept is None or self._kept[0] != kind:
            tensors, _ = _load(self.folder / TABLES, self.key)
            tensors = {name: t.to(device, kind[1]) for name, t in tensors.items()}
            head = DenseLMHead(tensors.get("head", tensors["embedding"]), tensors.get("bias"))
            self._kept = kind, Tables(tensors["embedding"], head)
        return self._kept[1]

    def shards(self) -> Iterator[Shard]:
        """All shards, one in memory at a time."""
        for path in self._paths:
            tensors, details = _load(path, self.key)
            missing = {"tokens", "lengths", "prompt_lengths", "temperatures", "taps"} - tensors.keys()
            if missing or int(tensors["lengths"].sum()) != len(tensors["tokens"]):
                raise CheckpointError(f"{path} is no shard of a trace (it lacks {sorted(missing)}). Trace again.")
            states, tokens = tensors.pop("states", None), tensors.pop("tokens").long()
            yield Shard(tokens=tokens, states=states, about=json.loads(details["about"]), **tensors)

    def found(self) -> list[dict[str, Any]]:
        """What was measured while each shard was made."""
        found = []
        for path in self._paths:
            with _open(path, self.key) as (_, details):
                found.append(json.loads(details["found"]))
        return found

    def check_fit(self, c: DFlash2Config) -> None:
        """Refuse a drafter that cannot be replayed over this trace.

        Raises:
            ConfigError: it is for another target, or reads layers that were not recorded; all reasons are named.
        """
        target, problems = self.about["target"], []
        if c.hidden_size != target["hidden_size"]:
            problems.append(f"hidden_size: drafter {c.hidden_size}, target {target['hidden_size']}")
        if c.num_target_layers not in (None, target["num_layers"]):
            problems.append(f"num_target_layers: drafter {c.num_target_layers}, target {target['num_layers']}")
        if not 0 <= target["vocab_size"] - c.vocab_size < MAX_PADDED_ROWS:
            problems.append(f"vocab_size: drafter {c.vocab_size}, target {target['vocab_size']}")
        if missing := sorted(set(c.target_layer_ids) - set(self.layer_ids)):
            problems.append(f"layers {missing} were not recorded, only {list(self.layer_ids)}")
        if problems:
            raise ConfigError(
                f"the drafter does not fit the trace {self.folder}: {'; '.join(problems)}. Use a drafter for "
                f"{target['name']}, or trace again with --drafter or --layers."
            )

    def columns(self, c: DFlash2Config) -> list[int]:
        """Which of the recorded layers this drafter's taps are, in its order."""
        return [self.layer_ids.index(i) for i in c.target_layer_ids]


def choose_layers(taps: Tensor, columns: Sequence[int], layers: int) -> Tensor:
    """``taps [N, T*H]`` of ``layers`` recorded layers -> those of a drafter; no copy where they are all, in order."""
    if list(columns) == list(range(layers)):
        return taps
    return taps.unflatten(-1, (layers, -1))[:, list(columns)].flatten(1)


def _key(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.safetensors"


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["about"]["format"]
    except FileNotFoundError as e:
        raise CheckpointError(f"{folder} is no trace, {path} is not there. Make one with `dflash2 trace`.") from e
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{path} cannot be read as a trace's description ({e}). Trace again.") from e
    if version != FORMAT:
        raise CheckpointError(f"{path} is of format {version}, this package reads {FORMAT}. Trace again.")
    return manifest


@contextmanager
def _open(path: Path, key: str) -> Iterator[tuple[Any, dict[str, str]]]:
    """A file of the trace with this key, and what is written in its head."""
    try:
        with safe_open(path, "pt") as file:
            details = file.metadata() or {}
            if details.get("trace") != key:
                raise CheckpointError(f"{path} is not of this trace. Delete it and run `dflash2 trace` again.")
            yield file, details
    except (SafetensorError, OSError) as e:
        raise CheckpointError(
            f"{path} cannot be read, it is truncated or no part of a trace ({e}). Delete it and run `dflash2 trace` "
            "again."
        ) from e


def _load(path: Path, key: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    with _open(path, key) as (file, details):
        return {name: file.get_tensor(name) for name in file.keys()}, details  # noqa: SIM118 - no mapping


def _save(path: Path, tensors: dict[str, Tensor], details: dict[str, str]) -> None:
    """Appears whole or not at all."""
    temporary = path.with_suffix(".part")
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, temporary, details)
    os.replace(temporary, path)


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
