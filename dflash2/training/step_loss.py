"""What a step computes for a part of its rows, as one module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dflash2.drafter import DFlash2Drafter
from dflash2.ops.distill import LossWeights
from dflash2.training.anchors import Blocks
from dflash2.training.attention import TiledAttention
from dflash2.training.config import TrainConfig
from dflash2.training.loss import BlockLoss, LossOptions, block_loss, block_targets, draft_states
from dflash2.training.parallel import Processes

__all__ = ["StepLoss"]


class StepLoss(nn.Module):
    """The drafter's pass and its loss as one module, so that wrappers for several processes see one call."""

    def __init__(self, drafter: DFlash2Drafter, config: TrainConfig, processes: Processes):
        super().__init__()
        self.drafter, self.config, self.processes = drafter, config, processes
        c = config
        self.options = LossOptions(
            LossWeights(c.hard_weight, c.soft_weight, c.tv_weight, c.lk_weight), c.selector_weight, c.gold,
            c.selector_miss, c.selector_mean, c.selector_detach, c.head_chunk,
        )  # fmt: skip
        self.attention: Any = TiledAttention
        if c.fast:
            from dflash2.training.spans import SpanAttention

            self.attention = SpanAttention

    def forward(self, blocks: Blocks, taps: Tensor, states: Tensor, head: Tensor, norm: Tensor) -> BlockLoss:
        """Losses of one part of a step; see `block_loss`."""
        z = draft_states(self.drafter, blocks, taps, self.attention)
        targets = block_targets(blocks, states, self.drafter.config.block_size, self.config.gamma)
        # Each part's selector loss is a mean of its own; their mean is the step's.
        return block_loss(
            self.drafter, z, head, targets, self.options, norm=norm,
            add_up=lambda x: self.processes.add_up(x) * self.config.accumulate,
        )  # fmt: skip
