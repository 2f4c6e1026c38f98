"""AdamW on fp32 masters of a network that runs in its own dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dflash2.training.parallel import local, shard_like, whole

__all__ = ["MasterAdamW", "learning_rate"]


def learning_rate(progress: float, *, peak: float, warmup: float, floor: float) -> float:
    """Linear warm-up to ``peak`` over the share ``warmup`` of the run, then a cosine to ``floor * peak``."""
    if progress < warmup:
        return peak * max(progress / warmup, 1e-3)
    angle = math.pi * min((progress - warmup) / max(1 - warmup, 1e-9), 1.0)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(angle)))


class MasterAdamW:
    """fp32 masters beside the working weights, with clipping and an optional average.

    Updates of bf16 weights below their rounding step would vanish; the masters keep them.

    Args:
        network: its parameters become copies of the masters after every step; those that need no gradient are left out.
        betas, weight_decay: AdamW; decay on matrices only.
        clip: bound on the gradients' global norm.
        ema: decay of the average of the masters; 0 for none.
    """

    def __init__(self, network: nn.Module, *, betas: tuple[float, float], weight_decay: float, clip: float, ema: float):
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.frozen = {name: p for name, p in network.named_parameters() if not p.requires_grad}
        self.names, self.working = list(trained), list[Tensor](trained.values())
        self.masters = [p.detach().float().clone() for p in self.working]
        self.average = [m.clone() for m in self.masters] if ema else []
        self.clip, self.ema, self.steps = clip, ema, 0
        matrices = [m for m in self.masters if m.dim() > 1]
        others = [m for m in self.masters if m.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        fused = self.masters[0].is_cuda  # one kernel for all parameters
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=fused)

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Update from the working weights' gradients, and clear them. Returns the norm before clipping."""
        for master, work in zip(self.masters, self.working, strict=True):
            master.grad = torch.zeros_like(master) if work.grad is None else work.grad.float()
            work.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.steps += 1
        self._publish(self.masters)
        if self.ema:
            # While the run is young the average follows faster, or it would remember the initial weights.
            keep = min(self.ema, (1 + self.steps) / (10 + self.steps))
            torch._foreach_lerp_([local(x) for x in self.average], [local(x) for x in self.masters], 1 - keep)
        return whole(norm)

    def _publish(self, source: Iterable[Tensor]) -> None:
        torch._foreach_copy_([local(x) for x in self.working], [local(x) for x in source])

    def weights(self) -> dict[str, Tensor]:
        """What to save and to evaluate: the average if there is one. Whole, if it is split over processes."""
        trained = dict(zip(self.names, map(whole, self.average or self.masters), strict=True))
        return trained | {name: whole(p).float() for name, p in self.frozen.items()}

    @torch.no_grad()
    def show(self, averaged: bool) -> None:
        """Put the average (or the masters back) into the working weights, for an evaluation."""
        self._publish(self.average if averaged and self.average else self.masters)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on: whole tensors, so that any number of processes can go on with it."""
        inner = self.adamw.state_dict()
        moments = {i: {name: whole(x) for name, x in entry.items()} for i, entry in inner["state"].items()}
        masters, average = ([whole(x) for x in xs] for xs in (self.masters, self.average))
        return {"masters": masters, "average": average, "steps": self.steps, "adamw": inner | {"state": moments}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; the working weights follow."""
        for mine, theirs in ((self.masters, state["masters"]), (self.average, state["average"])):
            for a, b in zip(mine, theirs, strict=True):
                a.copy_(shard_like(b, a))
        inner, ordered = state["adamw"], [p for group in self.adamw.param_groups for p in group["params"]]
        moments = {
            i: {name: shard_like(x, ordered[i]) if x.dim() else x for name, x in entry.items()}
            for i, entry in inner["state"].items()
        }
        self.adamw.load_state_dict(inner | {"state": moments})
        self.steps = state["steps"]
        self._publish(self.masters)
