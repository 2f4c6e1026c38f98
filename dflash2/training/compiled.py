"""What torch.compile fuses in a drafter that trains."""

from __future__ import annotations

import torch

from dflash2.conv import GroupedConv
from dflash2.drafter import DFlash2Drafter
from dflash2.model import MLP, Attention, RMSNorm

__all__ = ["compile_modules"]


def compile_modules(drafter: DFlash2Drafter) -> None:
    """Compile what is bound by memory traffic: norms, projections with their norms and rotation, MLPs, convolutions.

    Attention compiles itself. Pieces that all layers share are compiled once; whole layers would be once each.
    """
    # One graph per kind of module and call (with gradient, without): more than dynamo expects of one function.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for module in drafter.modules():
        if isinstance(module, RMSNorm | MLP):
            module.compile()
        elif isinstance(module, GroupedConv):
            module.before = torch.compile(module.before)  # type: ignore[method-assign]
            module.after = torch.compile(module.after)  # type: ignore[method-assign]
        elif isinstance(module, Attention):
            module.project = torch.compile(module.project)  # type: ignore[method-assign]
