"""What can be set for a drafter in an engine, beside the engine's own options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from dflash2.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DrafterSettings"]

#: Smallest values of numbers that need not be given.
LEAST = {"max_requests": 1, "prefix_store_bytes": 0}


@dataclass(frozen=True)
class DrafterSettings:
    """Of all engines; how they are given is each one's.

    Attributes:
        max_requests: requests that draft at a time, each with pages for a window; others go without drafts. Default:
            as many as the engine runs.
        page_size: rows per page of the drafter's own KV.
        prefix_store_bytes: memory for rows of cached prefixes, so that a request that hits one drafts from its first
            step. Default: 1 % of the GPU's memory, 64 MiB on the CPU; 0 where the engine caches no prefixes.
        int8_linears: weight-only int8 for the drafter's own linears.
        int8_head: "drafts" picks drafts with an int8 copy of the target's head, and the target decides with its own.
        cuda_graphs: record the drafter's pass as CUDA graphs (unless the engine is told to be eager).
    """

    HEADS: ClassVar[tuple[str, ...]] = ("off", "drafts")

    max_requests: int | None = None
    page_size: int = 16
    prefix_store_bytes: int | None = None
    int8_linears: bool = False
    int8_head: str = "off"
    cuda_graphs: bool = True

    @classmethod
    def checked(cls, where: str, given: Any) -> Self:
        """From a mapping.

        Args:
            where: what the user calls it, for messages.
            given: names and values.

        Raises:
            ConfigError: an unknown setting, or a value of another type.
        """
        known = {f.name: type(f.default) for f in fields(cls)}
        if not isinstance(given, dict) or set(given) - set(known):
            found = sorted(set(given) - set(known)) if isinstance(given, dict) else given
            raise ConfigError(f"{where}: {found} is not known. Known: {sorted(known)}.")
        made = cls(**given)
        for name, kind in known.items():
            value = getattr(made, name)
            if name in LEAST:
                if value is not None and (type(value) is not int or value < LEAST[name]):
                    raise ConfigError(f"{where}: {name}={value!r}: expected a whole number from {LEAST[name]} on.")
            elif type(value) is not kind:
                raise ConfigError(f"{where}: {name}={value!r}: expected {kind.__name__}.")
        if made.int8_head not in cls.HEADS:
            raise ConfigError(f"{where}: int8_head={made.int8_head!r}: expected one of {cls.HEADS}.")
        return made
