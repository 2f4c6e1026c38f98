"""Where a number or a file comes from: the device and the versions that made it."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import torch

__all__ = ["provenance"]


def provenance(device: torch.device | str) -> dict[str, str | None]:
    """What to write beside a result.

    Args:
        device: where it was computed.

    Returns:
        device, versions, date, and the git commit where the package lies in a checkout (else None).
    """
    import dflash2  # here, since its public names are built on modules like this one

    device = torch.device(device)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(device),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "dflash2": dflash2.__version__,
        "commit": _commit(Path(__file__).parent),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor(device: torch.device) -> str:
    """The processor's name where the system tells it, with the number of cores."""
    if device.type != "cpu":
        return device.type
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"cpu ({names[0] if names else platform.machine()}, {os.cpu_count()} cores)"


def _commit(package: Path) -> str | None:
    """The commit of the checkout whose own folder the package is; an environment inside another checkout has none."""
    command = ["git", "-C", str(package), "rev-parse", "--show-prefix", "--short", "HEAD"]
    try:
        prefix, commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
    return commit if prefix == f"{package.name}/" else None
