"""What can be set for the plug-in, beside vLLM's own options."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from dflash2.errors import ConfigError

__all__ = ["Settings"]

HEADS = ("off", "drafts", "shared")
#: Smallest values of numbers that need not be given.
LEAST = {"max_requests": 1, "prefix_store_bytes": 0}


@dataclass(frozen=True)
class Settings:
    """``--additional-config '{"dflash2": {"page_size": 16}}'``; an unknown name is an error.

    Attributes:
        max_requests: requests that draft at a time, each with pages for a window; others go without drafts. Default:
            vLLM's ``max_num_seqs``.
        page_size: rows per page of the drafter's own KV.
        prefix_store_bytes: memory for rows of cached prefixes, so that a request that hits one drafts from its first
            step. Default: as much as the page pool, at least 64 MiB and at most 1 GiB; 0 where prefix caching is off.
        int8_linears: weight-only int8 for the drafter's own linears.
        int8_head: "drafts" picks drafts with an int8 copy of the target's head, and the target decides with its own;
            "shared" gives both the int8 head and frees the 16-bit one, which changes the target's output a little
            (``dflash2 head-report`` says how much). ``DFLASH2_INT8_LM_HEAD=1`` in the environment means "shared".
        cuda_graphs: record the drafter's pass as CUDA graphs (unless the engine is told to be eager).
    """

    max_requests: int | None = None
    page_size: int = 16
    prefix_store_bytes: int | None = None
    int8_linears: bool = False
    int8_head: str = "off"
    cuda_graphs: bool = True

    @classmethod
    def of(cls, additional_config: Any) -> Settings:
        """From vLLM's ``additional_config``.

        Raises:
            ConfigError: an unknown setting, or a value of another type.
        """
        given = additional_config.get("dflash2", {}) if isinstance(additional_config, dict) else {}
        known = {f.name for f in fields(cls)}
        if not isinstance(given, dict) or (unknown := sorted(set(given) - known)):
            found = given if not isinstance(given, dict) else unknown
            raise ConfigError(f"additional_config: dflash2: {found} is not known. Known: {sorted(known)}.")
        if os.environ.get("DFLASH2_INT8_LM_HEAD", "0") not in ("", "0"):
            given = {"int8_head": "shared"} | given
        made = cls(**given)
        for name, kind in {f.name: type(f.default) for f in fields(cls)}.items():
            value = getattr(made, name)
            if name in LEAST:
                if value is not None and (type(value) is not int or value < LEAST[name]):
                    raise ConfigError(
                        f"additional_config: dflash2: {name}={value!r}: expected a whole number from {LEAST[name]} on."
                    )
            elif type(value) is not kind:
                raise ConfigError(f"additional_config: dflash2: {name}={value!r}: expected {kind.__name__}.")
        if made.int8_head not in HEADS:
            raise ConfigError(f"additional_config: dflash2: int8_head={made.int8_head!r}: expected one of {HEADS}.")
        return made
