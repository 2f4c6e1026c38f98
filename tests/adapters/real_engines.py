"""Tests in real engines run where the engine is installed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from dflash2.adapters.versions import EngineVersions


def mark_tests(items: Iterable[pytest.Item], folder: Path, engine: EngineVersions) -> None:
    """Those in ``folder`` get the engine's mark, and are skipped where it is not installed."""
    name = engine.distributions[0]
    skip = pytest.mark.skip(reason=f"{engine.engine} is not installed: make test-{name}")
    for item in items:
        if folder not in item.path.parents:
            continue
        item.add_marker(name)
        item.add_marker(pytest.mark.filterwarnings("default"))  # the engine's own warnings are not ours to fix
        if not engine.installed():
            item.add_marker(skip)
