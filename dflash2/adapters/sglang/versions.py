"""Which versions of SGLang the plug-in was tried with."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

__all__ = ["TESTED", "engine_version", "warn_if_untested"]

_log = logging.getLogger("sglang.dflash2")

#: First and last version that was run.
TESTED = ((0, 5, 17), (0, 5, 23))


def engine_version() -> str | None:
    """Of SGLang, if it is installed."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def warn_if_untested() -> None:
    """One warning that names the range; the engine goes on."""
    found = engine_version()
    parts = tuple(int(p) for p in (found or "").split(".")[:3] if p.isdecimal())
    if len(parts) == 3 and not TESTED[0] <= parts <= TESTED[1]:
        low, high = (".".join(map(str, v)) for v in TESTED)
        _log.warning(
            "dflash2: SGLang %s is outside the tested range %s to %s. If the engine fails, use another "
            "--speculative-algorithm (DFLASH2_SGLANG=off removes this one), and report it.", found, low, high,
        )  # fmt: skip
