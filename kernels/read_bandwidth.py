"""Triton kernel of `dflash2.bench.ceilings`: read every byte once and keep one sum for each program."""

import torch
import triton
import triton.language as tl

#: Programs for each multiprocessor, elements a step, warps, loads in flight.
CANDIDATES = [
    {"PROGRAMS": programs, "BLOCK": block, "num_warps": warps, "num_stages": stages}
    for programs, block, warps in ((1, 16384, 16), (2, 8192, 8), (4, 8192, 8), (8, 4096, 4), (16, 4096, 4))
    for stages in (1, 3)
]


@triton.jit
def _read_kernel(x_ptr, sums_ptr, blocks, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for block in tl.range(program, blocks, programs, num_stages=STAGES):
        total += tl.load(x_ptr + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
    # Stored, so that no load can be left out.
    tl.store(sums_ptr + program, tl.sum(total))


def read(x: torch.Tensor, settings: dict[str, int]) -> torch.Tensor:
    """int32 ``[n]``, n a multiple of BLOCK -> int32 partial sums, one for each program; together the sum of ``x``."""
    properties = torch.cuda.get_device_properties(x.device) if x.is_cuda else None
    programs = settings["PROGRAMS"] * (properties.multi_processor_count if properties else 2)
    sums = torch.empty(programs, dtype=torch.int32, device=x.device)
    _read_kernel[(programs,)](
        x,
        sums,
        x.numel() // settings["BLOCK"],
        BLOCK=settings["BLOCK"],
        STAGES=settings["num_stages"],
        num_warps=settings["num_warps"],
    )
    return sums
