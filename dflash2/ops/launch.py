"""Launch settings of the kernels: measured for each GPU and kept in JSON; the nearest measured shape decides."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from dflash2.cache_folder import cache_dir

__all__ = ["launch_settings", "override", "settings_file", "settings_folders"]

Settings = dict[str, int]

#: By op: settings to take whatever was measured, and where to note the shapes asked for. Each thread has its own.
Overrides = Mapping[str, tuple[Mapping[str, int], list[dict[str, int]]]]
_overrides: ContextVar[Overrides] = ContextVar("overrides", default=MappingProxyType({}))


def launch_settings(op: str, defaults: Mapping[str, int], device: torch.device, **shape: int) -> Settings:
    """What to launch a kernel with.

    Args:
        op: name of the operation, as in the file.
        defaults: conservative settings that run on any GPU; they also name the settings that exist.
        device: where the kernel will run. Elsewhere than on a GPU (the interpreter) the defaults are taken.
        shape: sizes that the settings depend on, each >= 1. Of the shapes measured on this GPU the nearest one is
            taken: least sum of ``|log2(measured / asked)|``.

    Returns:
        ``defaults`` with the measured values in their place. A GPU without a file gives one warning in a process.

    Raises:
        ValueError: the file, or an `override`, names a setting that does not exist.
    """
    if op in _overrides.get():
        chosen, asked = _overrides.get()[op]
        asked.append(shape)
        return _completed(op, defaults, chosen)
    if device.type != "cuda":
        return dict(defaults)
    measured = _measured(torch.cuda.get_device_name(device)).get(op, [])
    if not measured:
        return dict(defaults)
    return _completed(op, defaults, min(measured, key=lambda entry: _distance(entry["shape"], shape))["settings"])


@contextmanager
def override(op: str, settings: Mapping[str, int]) -> Iterator[list[dict[str, int]]]:
    """Inside, in this thread, ``op`` launches with ``settings`` in place of what was measured, on any device.

    Yields:
        The shapes that the op asks for meanwhile, call by call: what a file would keep the settings under.
    """
    asked: list[dict[str, int]] = []
    token = _overrides.set({**_overrides.get(), op: (settings, asked)})
    try:
        yield asked
    finally:
        _overrides.reset(token)


def settings_folders() -> list[Path]:
    """Where files are looked for: what `dflash2 tune` wrote for this user, then what ships with the package."""
    return [cache_dir() / "kernels", Path(__file__).parent.parent / "kernels" / "configs"]


def settings_file(device_name: str) -> str:
    """File name of a GPU, as ``torch.cuda.get_device_name`` calls it."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json"


def _completed(op: str, defaults: Mapping[str, int], chosen: Mapping[str, int]) -> Settings:
    if unknown := set(chosen) - set(defaults):
        raise ValueError(f"launch settings of {op} hold {sorted(unknown)}: expected {sorted(defaults)}. Tune again.")
    return {**defaults, **chosen}


@cache
def _measured(device_name: str) -> dict[str, list[dict[str, Any]]]:
    for folder in settings_folders():
        path = folder / settings_file(device_name)
        if path.is_file():
            return json.loads(path.read_text())["ops"]
    warnings.warn(
        f"the kernels were never tuned for {device_name}: they run with conservative settings. `dflash2 tune` measures "
        "this GPU once.",
        stacklevel=4,
    )
    return {}


def _distance(measured: Mapping[str, int], asked: Mapping[str, int]) -> float:
    """In octaves, over the sizes both name; a size that one of them lacks does not count."""
    return sum(abs(math.log2(measured[name] / size)) for name, size in asked.items() if name in measured)
