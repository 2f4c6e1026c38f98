"""Kernels that start while the one before them ends (CUDA's programmatic dependent launch, from Hopper on).

Such a kernel asks for the weights it will read, lets its own successor start, and waits for what came before it.
Kernels let go at once, so that one may be there while several before it still wait. A kernel that waits first and lets
go then (`wait_then_let_go`) draws a line: what was written before it is *settled* for all that come after it, which may
read it without waiting.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def let_go(PDL: tl.constexpr):
    """Let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Let the next kernel start, then wait until all before this one have written what it may read."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_then_let_go(PDL: tl.constexpr):
    """Wait first: whoever starts after this kernel finds what was written before it."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def inputs_ready(PDL: tl.constexpr):
    """Zero, once all before this kernel have written. An address that has it added cannot be read any sooner.

    Inside of a pipelined loop, unlike `wait_for_inputs`; after the first time it costs next to nothing.
    """
    zero = 0
    if PDL:
        waited = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        zero = tl.multiple_of(waited, 16)
    return zero


@triton.jit
def prefetch_rows(at, BYTES: tl.constexpr, PDL: tl.constexpr):
    """Ask for the first BYTES behind each address ``[W, 1]``: the memory stays busy while the kernel before ends.

    A 128-byte line at a time. Only hints, which read nothing.
    """
    if PDL:
        line: tl.constexpr = 128 * 8 // at.dtype.element_ty.primitive_bitwidth
        lines = at + (tl.arange(0, BYTES // 128) * line)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


def dependent_launch(tensor: torch.Tensor) -> dict[str, bool]:
    """Options of a launch whose kernel calls `wait_for_inputs(PDL)`."""
    able = tensor.is_cuda and _capability(tensor.device.index) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
