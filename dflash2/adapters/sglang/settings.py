"""What can be set for the plug-in, beside SGLang's own arguments."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from dflash2.adapters.settings import DrafterSettings
from dflash2.errors import ConfigError

__all__ = ["Settings", "VARIABLE"]

VARIABLE = "DFLASH2_SGLANG_SETTINGS"


@dataclass(frozen=True)
class Settings(DrafterSettings):
    """``DFLASH2_SGLANG_SETTINGS='{"page_size": 16}'``; an unknown name is an error."""

    @classmethod
    def of_environment(cls) -> Settings:
        """From ``DFLASH2_SGLANG_SETTINGS``.

        Raises:
            ConfigError: no JSON, an unknown setting, or a value of another type.
        """
        text = os.environ.get(VARIABLE) or "{}"
        try:
            given = json.loads(text)
        except json.JSONDecodeError as e:
            raise ConfigError(f"{VARIABLE}={text!r}: expected a JSON object ({e}).") from e
        return cls.checked(VARIABLE, given)
