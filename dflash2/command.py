"""What commands share: where they run, and how they end: an exit code, and one line for what the user can mend."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

__all__ = ["FAILED", "add_place", "run_command"]

FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130


def add_place(parser: argparse.ArgumentParser, dtype: str = "auto", auto: str = "bfloat16 on GPUs") -> None:
    """Give a command ``--device`` and ``--dtype``.

    Args:
        parser: of the command.
        dtype: the default.
        auto: what the dtype auto means.
    """
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one")
    help_ = f"float32, bfloat16, float16; auto: {auto} (default: %(default)s)"
    parser.add_argument("--dtype", default=dtype, help=help_)


def run_command(name: str, run: Callable[[], int | None]) -> int:
    """Run a command and turn errors that a user can mend into a message.

    Args:
        name: of the command, to begin messages with.
        run: does the work; None counts as 0.

    Returns:
        The exit code: that of ``run``, 2 where the input was wrong, 130 after an interrupt.
    """
    try:
        return run() or 0
    except ValueError as e:  # every error that a user can mend is one
        print(f"{name}: {type(e).__name__}: {e}", file=sys.stderr)
        return USER_ERROR
    except OSError as e:  # a full disk, a file that may not be written, a closed pipe
        print(f"{name}: {e}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
