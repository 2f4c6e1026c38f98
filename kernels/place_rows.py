"""Triton kernel of `dflash2.ops.place_rows`: one program for each request, which alone reads and moves its position."""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, wait_for_inputs


@triton.jit(do_not_specialize=["rows", "requests"])
def _place_rows_kernel(
    starts_ptr, lengths_ptr, valid_ptr, slots_ptr, page_table_ptr, tags_ptr, next_ptr, limit_ptr, faults_ptr,
    positions_ptr, pool_rows_ptr, rows, requests, ring_pages, page_size, discard,
    CHECKED: tl.constexpr, REQUESTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    other = tl.arange(0, REQUESTS)
    lengths = tl.load(lengths_ptr + other, mask=other < requests, other=0)
    begin = tl.sum(tl.where(other < request, lengths, 0), 0)
    slot, length = tl.load(slots_ptr + request), tl.load(lengths_ptr + request)
    start, valid = tl.load(starts_ptr + request), tl.load(valid_ptr + request)
    end, fits = start + valid, True
    if CHECKED:
        fits = (tl.sum(lengths, 0) == rows) & (tl.min(lengths, 0) >= 0)
        in_order = (tl.load(next_ptr + slot) == start) & (valid >= 0) & (valid <= length)
        room = (end <= tl.load(limit_ptr + slot)) | (valid == 0)
        if not fits:  # whose rows are whose is unknown: each request takes a share of them
            length = tl.cdiv(rows, requests).to(tl.int64)
            begin = request * length
        fits = fits & in_order & room
    for first in range(0, length, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        row = begin + offset
        position = start + offset
        keep = (offset < valid) & (position >= end - ring_pages * page_size)
        if CHECKED:
            keep = keep & (tl.zeros([BLOCK], tl.int1) | fits)
        place = position // page_size % ring_pages
        page = tl.load(page_table_ptr + slot * ring_pages + place, mask=keep, other=-1)
        keep = keep & (page >= 0)
        pool_row = tl.where(keep, page * page_size + position % page_size, discard + row % page_size)
        mask = (offset < length) & (row < rows)
        tl.store(positions_ptr + row, tl.where(keep, position, 0), mask=mask)
        tl.store(pool_rows_ptr + row, pool_row, mask=mask)
        tl.store(tags_ptr + pool_row, position, mask=mask & keep)
    # Only this program, and only above, has read what is written here.
    tl.debug_barrier()
    if fits:
        tl.store(next_ptr + slot, end)
    else:
        tl.store(faults_ptr + slot, tl.load(faults_ptr + slot) + 1)


def place_rows(starts, lengths, valid_lengths, slots, pool, rows, checked):
    """Launch; as `dflash2.ops.place_rows`, checked there. ``pool`` has its tensors and ``page_size`` as attributes."""
    positions, pool_rows = torch.empty(2, rows, dtype=torch.int64, device=slots.device)
    requests = slots.shape[0]
    if requests == 0:
        return positions, pool_rows
    with torch.cuda.device_of(slots):
        _place_rows_kernel[(requests,)](
            starts, lengths, valid_lengths, slots, pool.page_table, pool.tags, pool.next, pool.limit, pool.faults,
            positions, pool_rows, rows, requests, pool.page_table.shape[1], pool.page_size,
            pool.tags.shape[0] - pool.page_size, CHECKED=checked,
            REQUESTS=max(16, triton.next_power_of_2(requests)), BLOCK=128 if rows <= 1024 else 1024, num_warps=4,
            **dependent_launch(slots),
        )  # fmt: skip
    return positions, pool_rows
