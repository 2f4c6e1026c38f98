"""SGLang plug-in: DFlash2 (and DFlash) drafters as the speculative algorithm ``DFLASH2``, found through entry points.

``--speculative-algorithm DFLASH2 --speculative-draft-model-path DRAFTER``. Settings beyond SGLang's own are JSON in
``DFLASH2_SGLANG_SETTINGS``: see `dflash2.adapters.sglang.settings.Settings`. ``DFLASH2_SGLANG=off`` leaves the engine
alone: there is no such algorithm then.
"""

from __future__ import annotations

import os

__all__ = ["register", "switched_off"]


def switched_off() -> bool:
    """Whether ``DFLASH2_SGLANG`` says that the engine is to be left alone."""
    return os.environ.get("DFLASH2_SGLANG", "on").lower() in ("off", "0", "false")


def register() -> None:
    """What SGLang calls in each of its processes. Idempotent; changes nothing for an engine without this algorithm."""
    if switched_off():
        return
    from dflash2.adapters.sglang.algorithm import register_algorithm

    register_algorithm()
