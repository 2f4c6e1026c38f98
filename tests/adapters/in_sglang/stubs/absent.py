"""SGLang on CPUs imports two packages that do not exist for them. These are their stand-ins."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

ABSENT = ("torchvision", "sgl_kernel")


class Nothing(type):
    """A class whose every attribute is itself, to be named and inherited but not called."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __iter__(cls):
        return iter(())


class Absent(metaclass=Nothing):
    def __init__(self, *args, **kwargs):
        raise RuntimeError("a function of a package that is not there")


def assign_req_to_token_pool_cpu(slots, table, starts, ends, places, width):
    """Enters the KV places of new tokens: ``places``, request after request, at positions start .. end-1."""
    at = 0
    for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[slot, start:end] = places[at : at + end - start]
        at += end - start


def copy_all_layer_kv_cache_cpu(*args):
    """Warmed up by every pool; used for drafts that are trees."""


class Stub(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return globals().get(name, Absent) if self.__name__ == "sgl_kernel" else Absent


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        made = Stub(spec.name)
        made.__path__, made.__version__ = [], "0.0.0"
        return made

    def exec_module(self, module):
        pass


def install() -> None:
    """From now on the absent packages can be imported."""
    sys.meta_path.append(Stubs())
