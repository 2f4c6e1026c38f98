"""What can be set for the plug-in, beside SGLang's own arguments."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields

from dflash2.errors import ConfigError

__all__ = ["Settings"]

VARIABLE = "DFLASH2_SGLANG_SETTINGS"
HEADS = ("off", "drafts")
#: Smallest values of numbers that need not be given.
LEAST = {"max_requests": 1, "prefix_store_bytes": 0}


@dataclass(frozen=True)
class Settings:
    """``DFLASH2_SGLANG_SETTINGS='{"page_size": 16}'``; an unknown name is an error.

    Attributes:
        max_requests: requests that draft at a time, each with pages for a window; others go without drafts. Default:
            SGLang's ``--max-running-requests``.
        page_size: rows per page of the drafter's own KV.
        prefix_store_bytes: memory for rows of cached prefixes, so that a request that hits one drafts from its first
            step. Default: as much as the page pool, at least 64 MiB and at most 1 GiB; 0 where the radix cache is off.
        int8_linears: weight-only int8 for the drafter's own linears.
        int8_head: "drafts" picks drafts with an int8 copy of the target's head; the target decides with its own.
        cuda_graphs: record the drafter's pass as CUDA graphs (unless SGLang's own are off).
    """

    max_requests: int | None = None
    page_size: int = 16
    prefix_store_bytes: int | None = None
    int8_linears: bool = False
    int8_head: str = "off"
    cuda_graphs: bool = True

    @classmethod
    def of_environment(cls) -> Settings:
        """From ``DFLASH2_SGLANG_SETTINGS``.

        Raises:
            ConfigError: no JSON object, an unknown setting, or a value of another type.
        """
        text = os.environ.get(VARIABLE) or "{}"
        try:
            given = json.loads(text)
        except json.JSONDecodeError as e:
            raise ConfigError(f"{VARIABLE}={text!r}: expected a JSON object ({e}).") from e
        known = {f.name: type(f.default) for f in fields(cls)}
        if not isinstance(given, dict) or set(given) - set(known):
            found = sorted(set(given) - set(known)) if isinstance(given, dict) else given
            raise ConfigError(f"{VARIABLE}: {found} is not known. Known: {sorted(known)}.")
        made = cls(**given)
        for name, kind in known.items():
            value = getattr(made, name)
            if name in LEAST:
                if value is not None and (type(value) is not int or value < LEAST[name]):
                    raise ConfigError(f"{VARIABLE}: {name}={value!r}: expected a whole number from {LEAST[name]} on.")
            elif type(value) is not kind:
                raise ConfigError(f"{VARIABLE}: {name}={value!r}: expected {kind.__name__}.")
        if made.int8_head not in HEADS:
            raise ConfigError(f"{VARIABLE}: int8_head={made.int8_head!r}: expected one of {HEADS}.")
        return made
