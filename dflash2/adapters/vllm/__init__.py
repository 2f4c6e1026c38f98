"""vLLM plug-in: a DFlash2 (or DFlash) drafter for a stock engine, found through ``vllm.general_plugins``.

``--speculative-config '{"method": "dflash", "model": DRAFTER, "num_speculative_tokens": 7}'`` as usual. Settings beyond
vLLM's own go under ``--additional-config '{"dflash2": {...}}'``: see `dflash2.adapters.vllm.settings.Settings`.
``DFLASH2_VLLM=off`` leaves the engine alone.
"""

from __future__ import annotations

import os

__all__ = ["register", "switched_off"]


def switched_off() -> bool:
    """Whether ``DFLASH2_VLLM`` says that the engine is to be left alone."""
    return os.environ.get("DFLASH2_VLLM", "on").lower() in ("off", "0", "false")


def register() -> None:
    """What vLLM calls in each of its processes, perhaps more than once. Imports nothing heavy: hooks wait."""
    if switched_off():
        return
    from dflash2.adapters.vllm.hooks import install

    install()
