"""No speed without right results: the operations' tests run before anything is timed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch

__all__ = ["check_operations", "tests_folder"]


def tests_folder() -> Path | None:
    """Where the operations' tests lie, in a checkout."""
    folder = Path(__file__).resolve().parents[2] / "tests" / "ops"
    return folder if folder.is_dir() else None


def check_operations(device: torch.device) -> tuple[bool, str]:
    """Hold every operation's kernel to its definition on this device.

    In a checkout these are the tests of ``tests/ops`` that need a GPU; from an installed package, where there are none,
    every operation's kernel beside its reference, on small inputs.

    Returns:
        Whether all is right, and what was checked (for the result file) or what went wrong.
    """
    folder = tests_folder()
    if folder is None or importlib.util.find_spec("pytest") is None:
        from dflash2.bench.operations import check_kernels

        return check_kernels(device)
    command = [sys.executable, "-m", "pytest", str(folder), "-m", "gpu", "-q", "-x", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):  # compiling takes most of the time
        command += ["-n", str(min(8, os.cpu_count() or 1)), "-p", "no:benchmark"]
    done = subprocess.run(command, cwd=folder.parents[1], capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    if done.returncode:
        return False, "\n".join(["tests/ops -m gpu are red:", *lines[-40:]])
    return True, f"tests/ops -m gpu: {done.stdout.strip().splitlines()[-1].strip('= ')}"
