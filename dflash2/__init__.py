"""DFlash2: a block drafter for exact speculative decoding, with explicit positions and a window-bounded KV."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash2.config import DFlash2Config
    from dflash2.drafter import DFlash2Drafter
    from dflash2.errors import CapacityError, CheckpointError, ConfigError, PositionError
    from dflash2.generation import generate
    from dflash2.lm_head import Int8LMHead
    from dflash2.proposal import Proposal
    from dflash2.targets import embedded_target, resolve_target
    from dflash2.verification import verify
    from dflash2.window_kv import WindowKV

__version__ = "0.1.0"
__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DFlash2Config",
    "DFlash2Drafter",
    "Int8LMHead",
    "PositionError",
    "Proposal",
    "WindowKV",
    "embedded_target",
    "generate",
    "resolve_target",
    "verify",
]

_HOME = {
    "CapacityError": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DFlash2Config": "config",
    "DFlash2Drafter": "drafter",
    "Int8LMHead": "lm_head",
    "PositionError": "errors",
    "Proposal": "proposal",
    "WindowKV": "window_kv",
    "embedded_target": "targets",
    "generate": "generation",
    "resolve_target": "targets",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for, so that importing the package stays cheap."""
    if name not in _HOME:
        raise AttributeError(f"module 'dflash2' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dflash2.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
