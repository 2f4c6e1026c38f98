"""Do something to a module right after it is imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["after_import"]


class _Hooked(Loader):
    def __init__(self, loader: Any, then: Callable[[ModuleType], None]):
        self.loader, self.then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # get_source and the like: tracebacks, pickling by name


class _Finder(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], None]):
        self.name, self.then, self.looking = name, then, False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name or self.looking:
            return None
        self.looking = True
        try:
            spec = find_spec(fullname)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Hooked(spec.loader, self.then)
        return spec


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then(module)`` now if ``name`` is loaded, else when it is."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))
