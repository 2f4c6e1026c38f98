"""Token shards, and documents packed whole into rows of a fixed length."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from dflash2.errors import ConfigError

__all__ = ["Documents", "PackedRows", "Plan", "assign", "load_shards", "pack"]

#: Rows that stay open for first-fit; more would only slow packing down (98 % full with 64 on 352-token documents).
OPEN_ROWS = 64


@dataclass(frozen=True)
class Documents:
    """Prompt and answer of each document, one after the other.

    Attributes:
        tokens: int ``[sum(lens)]``.
        lens: int64 ``[D]``, prompt and answer together.
        plens: int64 ``[D]``, prompt only.
        temps: float ``[D]``, temperature the answer was sampled with; 0 is greedy.
    """

    tokens: np.ndarray
    lens: np.ndarray
    plens: np.ndarray
    temps: np.ndarray

    def __post_init__(self) -> None:
        if int(self.lens.sum()) != len(self.tokens):
            raise ConfigError(
                f"token shard: lens add up to {int(self.lens.sum())} but there are {len(self.tokens)} tokens. "
                "The file is truncated or not a shard; write it again."
            )

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each document begins in ``tokens``."""
        return np.concatenate(([0], np.cumsum(self.lens)[:-1])).astype(np.int64)

    def __len__(self) -> int:
        return len(self.lens)

    def document(self, i: int) -> np.ndarray:
        """Tokens of one document, prompt and answer."""
        start = self.starts[i]
        return self.tokens[start : start + self.lens[i]]

    def select(self, keep: np.ndarray) -> Documents:
        """The documents with these indices, in this order."""
        tokens = [self.document(i) for i in keep]
        joined = np.concatenate(tokens) if tokens else self.tokens[:0]
        return Documents(joined, self.lens[keep], self.plens[keep], self.temps[keep])

    def split(self, permille: int) -> tuple[Documents, Documents]:
        """Training and validation documents. A hash of the *prompt* decides, so that no prompt is in both."""
        held_out = np.array(
            [_hash(self.document(i)[: self.plens[i]]) % 1000 < permille for i in range(len(self))], bool
        )
        return self.select(np.flatnonzero(~held_out)), self.select(np.flatnonzero(held_out))


def _hash(tokens: np.ndarray) -> int:
    digest = hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def load_shards(patterns: Sequence[str]) -> Documents:
    """Read ``.npz`` shards (``tokens``, ``lens``, ``plens``, ``temps``) named by paths or glob patterns.

    Raises:
        ConfigError: a pattern matches nothing, or a file is no shard.
    """
    paths: list[str] = []
    for pattern in patterns:
        found = sorted(glob.glob(pattern))
        if not found:
            raise ConfigError(f"shards: {pattern!r} matches no file. Write shards with dflash2 synth first.")
        paths += found
    parts = [_load(Path(p)) for p in paths]
    if not parts:
        raise ConfigError("shards: none named. Write shards with dflash2 synth first.")
    names = ("tokens", "lens", "plens", "temps")
    return Documents(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))


def _load(path: Path) -> Documents:
    with np.load(path) as z:
        missing = {"tokens", "lens", "plens", "temps"} - set(z.files)
        if missing:
            raise ConfigError(
                f"{path}: no token shard, it lacks {sorted(missing)}. Expected tokens, lens, plens, temps."
            )
        return Documents(z["tokens"], z["lens"].astype(np.int64), z["plens"].astype(np.int64), z["temps"])


@dataclass(frozen=True)
class PackedRows:
    """Whole documents, packed. Flat indices count over all rows.

    Attributes:
        tokens: int64 ``[R, S]``; 0 where padded.
        document: int64 ``[R, S]``, ordinal of the document within these rows; -1 where padded.
        positions: int64 ``[R, S]``, from 0 in every document.
        first: int64 ``[D]``, flat index of each document's first token.
        answer: int64 ``[D]``, flat index of its first answer token.
        end: int64 ``[D]``, flat index one past its last token.
        source: int64 ``[D]``, index in the `Documents` it came from.
    """

    tokens: np.ndarray
    document: np.ndarray
    positions: np.ndarray
    first: np.ndarray
    answer: np.ndarray
    end: np.ndarray
    source: np.ndarray

    def eligible(self) -> np.ndarray:
        """Flat indices that can anchor a block: answer tokens with at least one successor in their document."""
        parts = [np.arange(a, e - 1) for a, e in zip(self.answer, self.end, strict=True) if e - 1 > a]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def assign(lens: np.ndarray, row_tokens: int) -> list[list[int]]:
    """First-fit: for each row the documents it holds. Documents longer than a row are left out, never cut."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []
    for i, n in enumerate(lens):
        if n > row_tokens:
            continue
        for j, (room, members) in enumerate(open_rows):
            if n <= room:
                members.append(i)
                open_rows[j] = (room - int(n), members)
                break
        else:
            rows.append([i])
            open_rows.append((row_tokens - int(n), rows[-1]))
            if len(open_rows) > OPEN_ROWS:
                open_rows.remove(min(open_rows, key=lambda row: row[0]))
    return rows


def pack(documents: Documents, rows: Sequence[Sequence[int]], row_tokens: int) -> PackedRows:
    """Lay the documents of each row one after the other.

    Args:
        documents: where they come from.
        rows: for each row, indices into ``documents``.
        row_tokens: S.
    """
    shape = (len(rows), row_tokens)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    owner = np.full(shape, -1, np.int64)
    first: list[int] = []
    answer: list[int] = []
    end: list[int] = []
    source: list[int] = []
    for r, members in enumerate(rows):
        at = 0
        for i in members:
            n = int(documents.lens[i])
            tokens[r, at : at + n] = documents.document(i)
            positions[r, at : at + n] = np.arange(n)
            owner[r, at : at + n] = len(first)
            first.append(r * row_tokens + at)
            answer.append(first[-1] + int(documents.plens[i]))
            end.append(first[-1] + n)
            source.append(i)
            at += n
    as_int = (np.array(x, np.int64) for x in (first, answer, end, source))
    return PackedRows(tokens, owner, positions, *as_int)


class Plan:
    """Which documents each step sees. ``plan[step]`` depends on the arguments only, so a run resumes by its number.

    Every epoch shuffles and packs anew. Rows that do not fill a last step are dropped; what was in them comes in
    another place in the next epoch.
    """

    def __init__(self, documents: Documents, row_tokens: int, rows_per_step: int, seed: int):
        self.documents, self.row_tokens, self.rows_per_step, self.seed = documents, row_tokens, rows_per_step, seed
        self._rows: list[list[int]] = []
        self._epoch, self._first, self._steps = -1, 0, 0

    def __getitem__(self, step: int) -> list[list[int]]:
        if step < self._first:
            self._epoch, self._first, self._steps = -1, 0, 0
        while step >= self._first + self._steps:
            self._first, self._epoch = self._first + self._steps, self._epoch + 1
            self._rows = self._pack(self._epoch)
            self._steps = len(self._rows) // self.rows_per_step
        at = (step - self._first) * self.rows_per_step
        return self._rows[at : at + self.rows_per_step]

    def _pack(self, epoch: int) -> list[list[int]]:
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.documents))
        rows = [[int(order[i]) for i in row] for row in assign(self.documents.lens[order], self.row_tokens)]
        if len(rows) < self.rows_per_step:
            raise ConfigError(
                f"{len(self.documents)} documents fill {len(rows)} rows of {self.row_tokens}, fewer than "
                f"rows_per_step={self.rows_per_step}. Lower rows_per_step or add shards."
            )
        np.random.default_rng((self.seed, epoch, 1)).shuffle(rows)
        return rows
