"""Numbers of a run: a JSON line each for machines, scalars for TensorBoard if asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash2.errors import ConfigError

__all__ = ["Metrics"]


class Metrics:
    """Appends to ``metrics.jsonl`` in a run's folder, and to ``tensorboard/``.

    Args:
        folder: of the run; made if need be.
        step: where the run goes on; lines behind it belong to steps that a kill has undone, and are taken out.
        tensorboard: also write event files.

    Raises:
        ConfigError: TensorBoard is asked for and not installed.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self._events = _event_writer(folder / "tensorboard", step) if tensorboard else None
        if self.path.exists():
            kept = [line for line in self.path.read_text().splitlines() if _step(line) <= step]
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text("".join(f"{line}\n" for line in kept))
            os.replace(temporary, self.path)

    def write(self, line: Mapping[str, Any]) -> None:
        """One line; ``step`` must be in it. Nested numbers become scalars like ``validation/rounds``."""
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._events is not None:
            for name, value in _scalars("", line):
                self._events.add_scalar(name, value, line["step"])
            self._events.flush()

    def close(self) -> None:
        """Finish the event file."""
        if self._events is not None:
            self._events.close()


def _step(line: str) -> float:
    """Of a line; one that was cut off by a kill comes behind everything."""
    try:
        return int(json.loads(line)["step"])
    except json.JSONDecodeError:
        return float("inf")


def _scalars(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _scalars(f"{prefix}/{name}" if prefix else name, inner)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _scalars(f"{prefix}/{i + 1}", inner)
    elif isinstance(value, int | float) and prefix != "step":
        yield prefix, float(value)


def _event_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise ConfigError(
            "tensorboard=true needs TensorBoard: pip install 'dflash2[train]', or set it to false."
        ) from e
    return SummaryWriter(str(folder), purge_step=step + 1)
