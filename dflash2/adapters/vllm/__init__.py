"""vLLM plug-in: a DFlash2 (or DFlash) drafter for a stock engine, found through ``vllm.general_plugins``.

``--speculative-config '{"method": "dflash", "model": DRAFTER, "num_speculative_tokens": 7}'`` as usual. Settings beyond
vLLM's own go under ``--additional-config '{"dflash2": {...}}'``: see `dflash2.adapters.vllm.settings.Settings`.
``DFLASH2_VLLM=off`` leaves the engine alone.
"""

from __future__ import annotations

import os

__all__ = ["register"]


def register() -> None:
    """What vLLM calls in each of its processes, perhaps more than once. Imports nothing heavy: hooks wait."""
    switch = os.environ.get("DFLASH2_VLLM", "on").lower()
    if switch in ("off", "0", "false"):
        return
    from dflash2.adapters.vllm.hooks import install

    install()
