"""What is measured, for generation and replay alike."""

from __future__ import annotations

import hashlib
from typing import Any

__all__ = ["DEFINITION", "MIN_PROMPTS", "bucket", "bucket_name", "template_sha256"]

DEFINITION = "tokens of verify rounds (bonus included) / rounds; per prompt, then the mean over prompts"
#: Fewer prompts than this say more about the prompts than about the context length.
MIN_PROMPTS = 5
#: Context lengths are told apart below this, and then per doubling.
FIRST_BUCKET = 128


def bucket(context: int) -> int:
    """Which range a context length is in: below 128, then one per doubling."""
    return (context // FIRST_BUCKET).bit_length()


def bucket_name(index: int) -> str:
    """The context lengths of a range, like ``128-255``."""
    low = FIRST_BUCKET * 2 ** (index - 1) if index else 0
    return f"{low}-{FIRST_BUCKET * 2**index - 1}"


def template_sha256(tokenizer: Any) -> str | None:
    """Acceptance under another chat template is another number, so a report says which it was."""
    template = getattr(tokenizer, "chat_template", None)
    return None if not template else hashlib.sha256(str(template).encode()).hexdigest()
