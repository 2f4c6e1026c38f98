"""What torch.compile fuses in a drafter that trains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dflash2.conv import GroupedConv
from dflash2.drafter import DFlash2Drafter
from dflash2.model import MLP, Attention, RMSNorm

__all__ = ["compile_modules"]

#: Pieces that all layers share, and so are compiled once; whole layers would be once each. Attention compiles itself.
PIECES: dict[type, tuple[str, ...]] = {
    RMSNorm: ("forward",),
    MLP: ("forward",),
    GroupedConv: ("before", "after"),
    Attention: ("project",),
}


def compile_modules(drafter: DFlash2Drafter) -> None:
    """Compile what is bound by memory traffic: norms, projections with their norms and rotation, MLPs, convolutions."""
    # One graph for each shape that a piece is called with: more than dynamo expects of one function.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for module in drafter.modules():
        for kind, names in PIECES.items():
            if isinstance(module, kind):
                for name in names:
                    setattr(module, name, _with_gradient(getattr(module, name)))


def _with_gradient(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled where a gradient may be needed; an evaluation runs what inference runs."""
    compiled = torch.compile(plain, dynamic=False)

    @functools.wraps(plain)
    def call(*args: Any) -> Any:
        return compiled(*args) if torch.is_grad_enabled() else plain(*args)

    return call
