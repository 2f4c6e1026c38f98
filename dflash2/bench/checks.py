"""No speed without right results: the operations' tests run before anything is timed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash2.bench.operations import Inputs, operations
from dflash2.config import DFlash2Config

__all__ = ["agree", "check_kernels", "check_operations", "tests_folder"]

_SMALL = DFlash2Config(
    hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=1000, mask_token_id=999, target_layer_ids=(0, 1), num_target_layers=3, block_size=4,
    rope_parameters={"rope_theta": 1e4}, layer_types=("sliding_attention",) * 2, sliding_window=48, is_causal=False,
    conv_kernel_size=2, conv_group_size=16, selector_rank=32, selector_top_k=8,
)  # fmt: skip


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
        return check_kernels(device)
    command = [sys.executable, "-m", "pytest", str(folder), "-m", "gpu", "-q", "-x", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):  # compiling takes most of the time
        command += ["-n", str(min(8, os.cpu_count() or 1)), "-p", "no:benchmark"]
    done = subprocess.run(command, cwd=folder.parents[1], capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    if done.returncode:
        return False, "\n".join(["tests/ops -m gpu are red:", *lines[-40:]])
    return True, f"tests/ops -m gpu: {done.stdout.strip().splitlines()[-1].strip('= ')}"


def check_kernels(device: torch.device, c: DFlash2Config | None = None) -> tuple[bool, str]:
    """Every operation's kernel beside its definition, in fp32, on a small shape.

    Returns:
        Whether all agree, and what was checked or which do not.
    """
    checked = operations(_SMALL if c is None else c, 3, "small")
    wrong = []
    for operation in checked:
        call = operation.make(Inputs(device, torch.float32))
        if not agree(call("triton"), call("torch"), 1e-4):
            wrong.append(operation.name)
    if wrong:
        return False, f"kernels that differ from their definitions: {', '.join(wrong)}"
    return True, f"{len(checked)} kernels beside their definitions, small shapes"


def agree(found: Any, expected: Any, tolerance: float) -> bool:
    """Whether results are the same: integers exactly, numbers within ``tolerance`` of the largest.

    Partial sums are added up first: how many there are is the kernel's choice.
    """
    if not isinstance(expected, Tensor):
        return all(agree(a, b, tolerance) for a, b in zip(found, expected, strict=True))
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    if found.shape != expected.shape:
        found, expected = found.sum(0), expected.sum(0)
    error = (found.double() - expected.double()).abs().max()
    return bool(error <= tolerance * expected.double().abs().max())
