"""The options of `dflash2.training.synth`, apart from it so that the command line can read them without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflash2.errors import ConfigError

__all__ = ["SELF", "SynthOptions"]

#: The source of prompts that the target writes (`dflash2.training.self_prompts`).
SELF = "self"


@dataclass(frozen=True)
class SynthOptions:
    """What to ask which target, and where to put the answers.

    Attributes:
        target: name, folder or hub id.
        prompts: sources as in `dflash2.prompts.load_prompts`; or ``self`` alone: the target writes them.
        out: folder of the shards.
        count: prompts to write with ``self``, else the most to take of each source; 0: all.
        name: first part of the shards' names.
        rows: requests in flight; None: as many as fit, up to 2048.
        shard: requests per shard; None: 20,000 on a GPU, where the last rows of a shard leave others idle, and 500
            elsewhere, where an interruption is dear.
        max_prompt: tokens; longer prompts are left out.
        max_new_tokens: longest answer.
        temperatures: share of each.
        max_seconds: write what is finished then; 0: no limit.
        seed: of prompts, order, temperatures and noise.
        device, dtype: see `dflash2.loading.pick_device`.
        graphs: CUDA graphs where there is a GPU.
        progress: show a bar where standard error is a terminal.
    """

    target: str
    prompts: tuple[str, ...]
    out: Path
    count: int = 0
    name: str = "synth"
    rows: int | None = None
    shard: int | None = None
    max_prompt: int = 1024
    max_new_tokens: int = 400
    temperatures: Mapping[float, float] = field(default_factory=lambda: {0.0: 0.6, 0.7: 0.25, 1.0: 0.15})
    max_seconds: float = 0.0
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    graphs: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        least = {"rows": 1, "shard": 1, "max_prompt": 1, "max_new_tokens": 1, "count": 0, "max_seconds": 0}
        for name, bound in least.items():
            if (value := getattr(self, name)) is not None and value < bound:
                raise ConfigError(f"{name}={value}: expected at least {bound}.")
        if SELF in self.prompts and (len(self.prompts) > 1 or not self.count):
            raise ConfigError(
                f"prompts={list(self.prompts)}, count={self.count}: {SELF!r} stands alone and needs a count >= 1."
            )
