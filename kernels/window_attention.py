"""Triton kernels of `dflash2.ops.window_attention`: flash decoding over paged rows, split along the context.

`stored_rows` looks up once, for all layers, which row of the pool each context position has. In `window_attention` one
program owns the queries that share a key head (n rows times the head's group) and a run of context positions, or the
block's own rows. Where there are several runs, a second launch adds them up with many programs: the program that
arrives last, alone, took longer than that launch (15 us a layer at one request; 2,048 positions).
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, prefetch_rows, wait_for_inputs
from .shared_memory import shared_bytes

DEFAULTS = {"tile": 64, "programs_per_sm": 1, "max_splits": 16, "num_warps": 4, "num_stages": 2}
CANDIDATES = [
    {"tile": tile, "programs_per_sm": programs, "max_splits": splits, "num_warps": 4, "num_stages": stages}
    for tile, stages in ((64, 2), (64, 3), (64, 4), (128, 2), (128, 3))
    for programs, splits in ((1, 8), (1, 16), (2, 8), (2, 16))
]

# Of one program.
_MOST_QUERIES = 64
# The block's own rows at a time: one step of a matrix product, not more. The assembler of Triton 3.6 (ptxas 12.8.93)
# takes the second and later steps' addresses in shared memory from registers that only the loop over the context has
# written: a program without context read anything there, or outside of it (an illegal access on an H200). With one
# stage it does the same to the loop itself, so that is no candidate above.
_OWN_ROWS = 16
# Of one program that adds up.
_LANES = 8
# Without a GPU (the interpreter): as many multiprocessors as make small shapes split.
_NO_GPU = 8
_NO_WINDOW = 2**30
# Positions that a program asks for while the kernel before it ends: at one request all of its run.
_PREFETCHED = 256


@triton.jit(do_not_specialize=["ring_pages", "length"])
def _stored_rows_kernel(
    tags_ptr, page_table_ptr, slots_ptr, starts_ptr, rows_ptr, ring_pages, length,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots_ptr + request)
    position = tl.load(starts_ptr + request) - length + column
    wanted = (column < length) & (position >= 0)
    position = tl.maximum(position, 0)
    page_at = slot * ring_pages + position // PAGE_SIZE % ring_pages
    page = tl.load(page_table_ptr + page_at, mask=wanted, other=-1)
    row = page * PAGE_SIZE + position % PAGE_SIZE
    tag = tl.load(tags_ptr + row, mask=page >= 0, other=-1)
    there = wanted & (tag == position)
    tl.store(rows_ptr + request * length + column, tl.where(there, row, -1).to(tl.int32), mask=column < length)


@triton.jit
def _prefetch(
    rows_ptr, keys_ptr, values_ptr, column, end, keys_stride, values_stride, channel, last_row,
    PREFETCH: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Ask for a program's first context rows while the kernel before this one ends.

    Only hints: `stored_rows` itself may still be at work, so that row numbers may be anything. They are read past L1,
    which keeps no copy for the loads that count.
    """
    for at in tl.static_range(0, PREFETCH, TILE):
        row = tl.load(rows_ptr + column + at, mask=column + at < end, other=0, cache_modifier=".cg")
        row = tl.minimum(tl.maximum(row, 0), last_row).to(tl.int64)[:, None]
        prefetch_rows(keys_ptr + row * keys_stride + channel, LINES * 128, True)
        prefetch_rows(values_ptr + row * values_stride + channel, LINES * 128, True)


@triton.jit
def _add_tile(q, keys, values, visible, top, total, acc, SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the online softmax, in base 2. ``top`` is -inf as long as a query has seen nothing."""
    score = tl.dot(keys, tl.trans(q), input_precision=PRECISION) * SCALE
    score = tl.where(visible, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 0))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - shift[None, :])
    decay = tl.exp2(top - shift)
    acc = tl.dot(tl.trans(values), weight.to(values.dtype), acc * decay[None, :], input_precision=PRECISION)
    return new_top, total * decay + tl.sum(weight, 0), acc


@triton.jit
def _block_tile(
    k_ptr, v_ptr, k_stride, v_stride, n, row, window, in_head, inside, first, CAUSAL: tl.constexpr, OWN: tl.constexpr
):  # fmt: skip
    """Some of the block's own keys and values, and which of them each query sees."""
    key = first + tl.arange(0, OWN)[:, None]
    mask = (key < n) & inside
    keys = tl.load(k_ptr + key * k_stride + in_head, mask=mask, other=0.0)
    values = tl.load(v_ptr + key * v_stride + in_head, mask=mask, other=0.0)
    distance = row[None, :] - key
    visible = (key < n) & (distance < window) & (-distance < window)
    if CAUSAL:
        visible = visible & (distance >= 0)
    return keys, values, visible


@triton.jit
def _parts(partial_ptr, units, unit, PARTS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr):
    """Where a unit's parts lie: sums ``[PARTS, QUERIES, DIM]`` of all units, then maxima, then totals."""
    of_unit = unit.to(tl.int64) * PARTS * QUERIES
    all_units = tl.cast(units, tl.int64) * PARTS * QUERIES
    tops_ptr = partial_ptr + all_units * DIM + of_unit
    return partial_ptr + of_unit * DIM, tops_ptr, tops_ptr + all_units


@triton.jit(do_not_specialize=["n", "units"])
def _add_up_kernel(
    partial_ptr, out_ptr, n, units,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, QUERIES: tl.constexpr,
    DIM: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some queries of one unit: the sums of all parts, each seen from the greatest of the maxima."""
    wait_for_inputs(PDL)
    unit, lane = tl.program_id(0), tl.program_id(1) * LANES + tl.arange(0, LANES)
    channel = tl.arange(0, DIM)
    sums_ptr, tops_ptr, totals_ptr = _parts(partial_ptr, units, unit, PARTS, QUERIES, DIM)
    top = tl.load(tops_ptr + lane)
    for s in tl.static_range(1, PARTS):
        top = tl.maximum(top, tl.load(tops_ptr + s * QUERIES + lane))
    total = tl.zeros([LANES], tl.float32)
    acc = tl.zeros([LANES, DIM], tl.float32)
    for s in tl.static_range(PARTS):
        at = s * QUERIES + lane
        weight = tl.exp2(tl.load(tops_ptr + at) - top)
        total += weight * tl.load(totals_ptr + at)
        # A part without a visible row left no sums.
        some = (weight > 0)[:, None]
        sums = tl.load(sums_ptr + at[:, None] * DIM + channel[None, :], mask=some, other=0.0)
        acc += weight[:, None] * sums
    query_tiles = tl.cdiv(n * GROUP, QUERIES)
    query = unit % query_tiles * QUERIES + lane
    request, head = (unit // (query_tiles * KV_HEADS)).to(tl.int64), unit // query_tiles % KV_HEADS
    row = request * n + query // GROUP
    out_at = (row * KV_HEADS * GROUP + head * GROUP + query % GROUP)[:, None] * HEAD_DIM + channel[None, :]
    mask = (query < n * GROUP)[:, None] & (channel < HEAD_DIM)[None, :]
    tl.store(out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "length", "window", "first", "split_rows", "pool_rows"])
def _window_attention_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, rows_ptr, out_ptr, partial_ptr,
    n, length, window, first, split_rows, pool_rows, q_stride, k_stride, v_stride, keys_stride, values_stride,
    CAUSAL: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    SCALE: tl.constexpr, PRECISION: tl.constexpr, PREFETCH: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    unit, split = tl.program_id(0), tl.program_id(1)
    query_tiles = tl.cdiv(n * GROUP, QUERIES)
    head = unit // query_tiles % KV_HEADS
    # 64-bit where requests, units or stored rows multiply; inside of one of them 32 bits do.
    request = (unit // (query_tiles * KV_HEADS)).to(tl.int64)
    # Column c of the request's rows is position start - length + c.
    begin = first + split * split_rows
    end = tl.minimum(begin + split_rows, length)
    rows_ptr += request * length
    column = begin + tl.arange(0, TILE)
    if PDL:
        _prefetch(
            rows_ptr, keys_ptr, values_ptr, column, end, keys_stride, values_stride, head * HEAD_DIM, pool_rows - 1,
            PREFETCH, TILE, LINES,
        )  # fmt: skip
    wait_for_inputs(PDL)

    # Queries past the end are copies of the last one: they need no masks of their own and are not stored.
    query = unit % query_tiles * QUERIES + tl.arange(0, QUERIES)
    live = query < n * GROUP
    query = tl.minimum(query, n * GROUP - 1)
    row, q_head = query // GROUP, head * GROUP + query % GROUP
    channel = tl.arange(0, DIM)
    inside, in_head = channel[None, :] < HEAD_DIM, head * HEAD_DIM + channel[None, :]
    q_at = (row * q_stride + q_head * HEAD_DIM)[:, None] + channel[None, :]
    q = tl.load(q_ptr + request * n * q_stride + q_at, mask=inside, other=0.0)

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([DIM, QUERIES], tl.float32)
    stored = tl.load(rows_ptr + column, mask=column < end, other=-1)
    for _ in range(begin, end, TILE):
        # What is not there is not read: a NaN there would survive a weight of zero.
        there = stored >= 0
        mask = there[:, None] & inside
        stored_at = stored.to(tl.int64)[:, None]
        keys = tl.load(keys_ptr + stored_at * keys_stride + in_head, mask=mask, other=0.0)
        values = tl.load(values_ptr + stored_at * values_stride + in_head, mask=mask, other=0.0)
        visible = there[:, None] & ((length - column)[:, None] + row[None, :] < window)
        column += TILE
        stored = tl.load(rows_ptr + column, mask=column < end, other=-1)
        top, total, acc = _add_tile(q, keys, values, visible, top, total, acc, SCALE, PRECISION)
    if split == PARTS - 1:
        own_k, own_v = k_ptr + request * n * k_stride, v_ptr + request * n * v_stride
        for own in tl.static_range(0, BLOCK, OWN):
            keys, values, visible = _block_tile(
                own_k, own_v, k_stride, v_stride, n, row, window, in_head, inside, own, CAUSAL, OWN
            )
            top, total, acc = _add_tile(q, keys, values, visible, top, total, acc, SCALE, PRECISION)

    if PARTS == 1:
        out_ptr += request * n * KV_HEADS * GROUP * HEAD_DIM
        out_at = (row * KV_HEADS * GROUP + q_head)[None, :] * HEAD_DIM + channel[:, None]
        mask = live[None, :] & (channel < HEAD_DIM)[:, None]
        tl.store(out_ptr + out_at, (acc / total[None, :]).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        sums_ptr, tops_ptr, totals_ptr = _parts(partial_ptr, tl.num_programs(0), unit, PARTS, QUERIES, DIM)
        at = split * QUERIES + tl.arange(0, QUERIES)
        tl.store(tops_ptr + at, top)
        tl.store(totals_ptr + at, total)
        tl.store(sums_ptr + at[None, :] * DIM + channel[:, None], acc, mask=(total > 0)[None, :])


def stored_rows(
    tags: torch.Tensor, page_table: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, *,
    page_size: int, length: int,
) -> torch.Tensor:  # fmt: skip
    """Launch the look-up; shapes as in `dflash2.ops.window_attention.PagedContext`. int32 ``[R, length]``, -1: none."""
    rows = torch.empty(slots.shape[0], length, dtype=torch.int32, device=slots.device)
    if rows.numel() == 0:
        return rows
    tags, page_table, slots, starts = (t.contiguous() for t in (tags, page_table, slots, starts))
    tile = min(256, triton.next_power_of_2(length))
    with torch.cuda.device_of(rows):
        _stored_rows_kernel[(rows.shape[0], triton.cdiv(length, tile))](
            tags, page_table, slots, starts, rows, page_table.shape[1], length, PAGE_SIZE=page_size, TILE=tile,
            **dependent_launch(starts),
        )  # fmt: skip
    return rows


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    *,
    window: int | None,
    causal: bool,
    settings: dict[str, int],
) -> torch.Tensor:
    """Launch the kernel; shapes as in `dflash2.ops.window_attention`, checked there.

    Args:
        rows: from `stored_rows`.
        settings: `DEFAULTS`, or a measured choice.
    """
    requests, n, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    kv_heads, length = k.shape[2], rows.shape[1]
    group = heads // kv_heads
    q, k, v = (_dense_rows(x.reshape(-1, *x.shape[2:])) for x in (q, k, v))
    keys, values = _dense_rows(keys), _dense_rows(values)
    dim = max(16, triton.next_power_of_2(head_dim))
    # Products in exact fp32 run on the scalar units, whose operands all sit in registers.
    exact = q.dtype == torch.float32
    tile, warps = (16, 8) if exact else (settings["tile"], settings["num_warps"])
    queries = min(16 if exact else _MOST_QUERIES, max(16, triton.next_power_of_2(n * group)))
    tile, stages = fitted(tile, settings["num_stages"], queries, dim, q.element_size(), shared_bytes(q.device))
    units = requests * kv_heads * triton.cdiv(n * group, queries)
    reach = length if window is None else min(length, window - 1)
    tiles = triton.cdiv(reach, tile)
    splits = _splits(units, tiles, settings, q.device)
    # Several runs of context positions, and then the block by itself.
    parts = splits + 1 if splits > 1 else 1
    partial = torch.empty(units * parts * queries * (dim + 2) * (parts > 1), dtype=torch.float32, device=q.device)
    shape = {"KV_HEADS": kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "PARTS": parts, "QUERIES": queries, "DIM": dim}
    with torch.cuda.device_of(q):
        _window_attention_kernel[(units, parts)](
            q, k, v, keys, values, rows, out, partial, n, length,
            _NO_WINDOW if window is None else min(window, _NO_WINDOW), length - reach,
            triton.cdiv(tiles, splits) * tile, keys.shape[0],
            q.stride(0), k.stride(0), v.stride(0), keys.stride(0), values.stride(0),
            CAUSAL=causal, BLOCK=triton.cdiv(n, _OWN_ROWS) * _OWN_ROWS, OWN=_OWN_ROWS, TILE=tile,
            SCALE=head_dim**-0.5 * 1.4426950408889634,  # log2(e): the hardware has powers of two
            PRECISION="ieee" if exact else "tf32",  # the latter says nothing about 16-bit operands
            PREFETCH=_PREFETCHED // tile * tile, LINES=_power_below(max(1, head_dim * q.element_size() // 128)),
            num_warps=warps, num_stages=stages, **shape, **dependent_launch(q),
        )  # fmt: skip
        if parts > 1:
            lanes = min(queries, _LANES)
            _add_up_kernel[(units, queries // lanes)](
                partial, out, n, units, LANES=lanes, num_warps=4, **shape, **dependent_launch(q)
            )
    return out


def fitted(tile: int, stages: int, queries: int, dim: int, size: int, limit: int) -> tuple[int, int]:
    """Tile and stages that fit into ``limit`` bytes of shared memory: measured for one head size, used for all.

    Keys and values of every stage, the queries, and their weights (what the compiler takes for 16-bit operands, to the
    byte). Two stages at least: see `_OWN_ROWS`.
    """
    while size * (2 * stages * tile * dim + queries * (dim + tile)) > limit:
        if stages == 2 and tile == 16:
            break
        tile, stages = (tile, stages - 1) if stages > 2 else (tile // 2, stages)
    return tile, stages


def _splits(units: int, tiles: int, settings: dict[str, int], device: torch.device) -> int:
    """A power of two, so that a growing context meets few compiled kernels."""
    cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else _NO_GPU
    wanted = min(processors * settings["programs_per_sm"] // units, tiles, settings["max_splits"])
    return _power_below(max(wanted, 1))


def _power_below(number: int) -> int:
    """The greatest power of two up to ``number >= 1``."""
    return 1 << number.bit_length() - 1


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, hd]`` whose heads lie one after the other; rows may lie apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
