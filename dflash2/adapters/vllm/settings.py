"""What can be set for the plug-in, beside vLLM's own options."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from dflash2.adapters.settings import DrafterSettings

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings(DrafterSettings):
    """``--additional-config '{"dflash2": {"page_size": 16}}'``; an unknown name is an error.

    Here ``int8_head`` may also be "shared": both get the int8 head and the 16-bit one is freed, which changes the
    target's output a little (``dflash2 head-report`` says how much). ``DFLASH2_INT8_LM_HEAD=1`` in the environment
    means that.
    """

    HEADS: ClassVar[tuple[str, ...]] = ("off", "drafts", "shared")

    @classmethod
    def of(cls, additional_config: Any) -> Settings:
        """From vLLM's ``additional_config``.

        Raises:
            ConfigError: an unknown setting, or a value of another type.
        """
        given = additional_config.get("dflash2", {}) if isinstance(additional_config, dict) else {}
        if isinstance(given, dict) and os.environ.get("DFLASH2_INT8_LM_HEAD", "0") not in ("", "0"):
            given = {"int8_head": "shared"} | given
        return cls.checked("additional_config: dflash2", given)
