"""The processes of a run: one, or as many as ``accelerate launch`` starts, each with a part of every step's rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash2.errors import ConfigError

__all__ = ["Processes", "local", "shard_like", "whole"]


class Processes:
    """What is this process's part, and what takes all of them.

    Args:
        device: where a single process works; several get theirs from accelerate, and this only says CPU or not.
        sharding: ``none`` (every process holds all weights, gradients are averaged: DDP) or ``fsdp`` (weights, masters
            and the optimizer's state are split: FSDP2).

    Raises:
        ConfigError: accelerate is set up for something that would do the same twice, or for 16-bit floats of another
            kind than ``dtype`` names.
    """

    def __init__(self, device: str, sharding: str):
        from accelerate import Accelerator
        from accelerate.utils import DistributedType

        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self.accelerator: Any = Accelerator(cpu=several and device == "cpu", mixed_precision="no")
        self.count: int = self.accelerator.num_processes
        self.index: int = self.accelerator.process_index
        self.device = torch.device(device) if self.count == 1 else self.accelerator.device
        self.sharded = sharding == "fsdp" and self.count > 1
        kinds = ("NO", "MULTI_CPU", "MULTI_GPU")
        if self.accelerator.distributed_type not in [getattr(DistributedType, k) for k in kinds]:
            raise ConfigError(
                f"accelerate is set up for {self.accelerator.distributed_type.value}, but training shards by itself. "
                "Launch with accelerate launch --multi_gpu; sharding=fsdp splits weights and optimizer state."
            )
        asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if asked not in ("no", "bf16"):
            raise ConfigError(
                f"accelerate is set up for {asked}: set dtype to bfloat16 or float32, and mixed precision to no."
            )
        # For what the host has to agree on without waiting for the device.
        self._host: Any = dist.new_group(backend="gloo") if self.count > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this process writes and talks."""
        return self.index == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose call makes backward passes exchange gradients. Parameters may be replaced."""
        if self.sharded:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            # One group: context rows need the projections of all layers at once.
            fully_shard(module, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
            return module
        # A single process stays where it was told to be, which accelerate may see otherwise.
        return module if self.count == 1 else self.accelerator.prepare_model(module)

    @contextmanager
    def accumulating(self, module: nn.Module, more: bool) -> Iterator[None]:
        """A forward and backward pass; with ``more`` to come in this step, gradients stay here for now."""
        if self.sharded:
            module.set_requires_gradient_sync(not more)  # type: ignore[operator]
            yield
        elif more and self.count > 1:
            with self.accelerator.no_sync(module):
                yield
        else:
            yield

    @contextmanager
    def gathered(self, module: nn.Module) -> Iterator[None]:
        """Inside, a wrapped module's parts can be called one by one."""
        if self.sharded:
            module.unshard()  # type: ignore[operator]
        try:
            yield
        finally:
            if self.sharded:
                module.reshard()  # type: ignore[operator]

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over processes, without gradient."""
        return x if self.count == 1 else self.accelerator.reduce(x.detach(), reduction="sum")

    def agree(self, number: float) -> float:
        """The first process's number: clocks differ, and all have to stop, save and evaluate at the same step."""
        if self.count == 1:
            return number
        shared = torch.tensor(number, dtype=torch.float64)
        dist.broadcast(shared, 0, group=self._host)
        return float(shared)

    def wait(self) -> None:
        """Until all are here."""
        self.accelerator.wait_for_everyone()


def whole(x: Tensor) -> Tensor:
    """A tensor, or all of one that is split over processes (which all have to ask)."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def local(x: Tensor) -> Tensor:
    """What this process holds of a tensor, by reference."""
    return x.to_local() if hasattr(x, "to_local") else x


def shard_like(x: Tensor, like: Tensor) -> Tensor:
    """This process's part of ``x``, as ``like`` is split."""
    if not hasattr(like, "full_tensor"):
        return x
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements)
