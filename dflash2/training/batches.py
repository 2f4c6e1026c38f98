"""What a process works on in each step, made ready in the background."""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash2.training.anchors import Blocks, draw_blocks
from dflash2.training.config import TrainConfig
from dflash2.training.data import Documents, Plan, pack

__all__ = ["Batch", "Batches"]

#: Spawns the generators of anchors, apart from those of the plan.
ANCHORS = 2


@dataclass(frozen=True)
class Batch:
    """Some packed rows and their blocks, in host memory.

    Attributes:
        blocks: with the rows' tokens, flat.
        rows: R.
    """

    blocks: Blocks
    rows: int

    def inputs(self, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions, document ``[R, S]`` of blocks that moved to a device."""
        tokens, positions, document = (
            x.view(self.rows, -1) for x in (blocks.tokens, blocks.positions, blocks.document)
        )
        return tokens, positions, document


class Batches:
    """Batches of every step, from its number alone: nothing about the data has to be stored to resume.

    A step's rows go to the processes, and within one to its parts, so that all processes together do what one would:
    which blocks a row gives depends on the step and its place only.

    Args:
        config: sizes and seed.
        documents: training documents.
        retention: see `make_blocks`.
        index, count: this process and how many there are.
        device: where the batches will go.
    """

    def __init__(
        self, config: TrainConfig, documents: Documents, retention: int | None, index: int, count: int,
        device: torch.device,
    ):  # fmt: skip
        self.config, self.documents, self.retention = config, documents, retention
        self.index, self.count = index, count
        self.plan = Plan(documents, config.row_tokens, config.rows_per_step, config.seed)
        self.pinned = device.type == "cuda"
        # Memory is pinned in the context of a device; without this it would be the first one's in every process.
        begin = functools.partial(torch.cuda.set_device, device) if self.pinned and device.index is not None else None
        self._pool = ThreadPoolExecutor(1, initializer=begin)
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def __getitem__(self, step: int) -> list[Batch]:
        """This process's parts of a step; the next step's are begun at once."""
        number, ahead = self._ahead or (step, self._pool.submit(self.make, step))
        found = ahead.result() if number == step else self._pool.submit(self.make, step).result()
        self._ahead = step + 1, self._pool.submit(self.make, step + 1)
        return found

    def make(self, step: int) -> list[Batch]:
        """The same, here and now."""
        rows, c = self.plan[step], self.config
        size = len(rows) // (self.count * c.accumulate)
        made = []
        for part in range(c.accumulate):
            first = (part * self.count + self.index) * size
            packed = pack(self.documents, rows[first : first + size], c.row_tokens)
            rngs = [np.random.default_rng((c.seed, ANCHORS, step, i)) for i in range(first, first + size)]
            blocks = draw_blocks(packed, c.anchors_per_row, rngs, c.tile, self.retention)
            made.append(Batch(blocks.pin() if self.pinned else blocks, size))
        return made

    def close(self) -> None:
        """Let go of the thread."""
        self._pool.shutdown(cancel_futures=True)
        self._ahead = None
