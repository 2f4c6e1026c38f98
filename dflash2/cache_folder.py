"""The folder that holds what this package makes for a user: converted targets, launch settings."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_dir"]

CACHE_VARIABLE = "DFLASH2_CACHE"


def cache_dir() -> Path:
    """``DFLASH2_CACHE``, else ``dflash2`` in the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "dflash2"
