"""The C best of each row from tiles of values that are never written: what the two heads share.

A value and its id make one int64 key that sorts as `dflash2.ops.top_candidates` orders: the value's bits, made to
ascend, above the inverted id. Keys are distinct, so the C best lie in the C tiles whose best keys are largest.

A tile's program takes its candidates out, best first, and stops as soon as none can be among the row's C best. `floor`
knows: for each row it holds the best values of disjoint sets of tiles, at least C of them, so the least of these is
passed or equalled by C candidates. How far other programs are decides how early a tile stops, and never the result.
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, wait_for_inputs

#: Below every value, -inf included, and below every key.
LOWEST = tl.constexpr(-(1 << 31))
LOWEST_KEY = tl.constexpr(-(1 << 63))
_TILES_AT_A_TIME = 2048
#: Ranks compare all keys with all: no more than 64 at a time, which is enough for so many candidates and tiles.
_RANKED_SLOTS, _RANKED_TILES = 16, 4096


@triton.jit
def _flip(bits):
    """Bits of an fp32 to an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _token(keys):
    return ~(keys.to(tl.int32))


@triton.jit
def collect(
    values, token, row, tile, tiles, vocab, rows, count, lists_ptr, lengths_ptr, bests_ptr, floor_ptr,
    SLOTS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write the candidates of a tile that may be among the C best of their row.

    Args:
        values: fp32 ``[BLOCK_V, BLOCK_R]``; ``token`` int32 ``[BLOCK_V]``, ``row`` int32 ``[BLOCK_R]``.
        tile, tiles: of the vocabulary; the tile of rows is ``program_id(0)``.
        vocab, rows: tokens and rows from there on are padding.
        count: C.
        lists_ptr: int64 ``[row tiles, tiles, SLOTS, BLOCK_R]``: keys; the first ``lengths_ptr`` of SLOTS are written.
        lengths_ptr: int32 ``[row tiles, tiles]``.
        bests_ptr: int32 ``[rows, tiles]``: the best value of each tile, made to ascend.
        floor_ptr: int32 ``[rows, SLOTS]``, `LOWEST` before the first tile.
    """
    values = tl.where(values == values, values, float("-inf"))
    values = tl.where(values == 0.0, 0.0, values)  # -0.0 equals 0.0
    left = tl.where((token < vocab)[:, None], _flip(values.to(tl.int32, bitcast=True)), LOWEST)
    best = tl.max(left, 0)
    tl.store(bests_ptr + row.to(tl.int64) * tiles + tile, best, mask=row < rows)
    tl.atomic_max(floor_ptr + row * SLOTS + tile % SLOTS, best, mask=row < rows, sem="relaxed")
    # Past the first-level cache, which keeps what was true some tiles ago.
    slots_at = floor_ptr + row[:, None] * SLOTS + tl.arange(0, SLOTS)[None, :]
    slots = tl.load(slots_at, mask=(row < rows)[:, None], other=0x7FFFFFFF, cache_modifier=".cg")
    floor = tl.maximum(tl.min(slots, 1), LOWEST + 1)
    lists = tl.program_id(0) * tiles + tile
    list_at = lists_ptr + lists.to(tl.int64) * (SLOTS * BLOCK_R) + tl.arange(0, BLOCK_R)
    length = 0
    wanted = tl.max((best >= floor).to(tl.int32), 0)
    while (wanted > 0) & (length < count):
        first = tl.min(tl.where(left == best[None, :], token[:, None], 0x7FFFFFFF), 0)
        tl.store(list_at + length * BLOCK_R, (best.to(tl.int64) << 32) | (~first).to(tl.uint32).to(tl.int64))
        left = tl.where(token[:, None] == first[None, :], LOWEST, left)
        best = tl.max(left, 0)
        wanted = tl.max((best >= floor).to(tl.int32), 0)
        length += 1
    tl.store(lengths_ptr + lists, length)


@triton.jit
def _largest(keys, SLOTS: tl.constexpr):
    """The SLOTS largest of distinct keys, descending; one maximum after the other, which beats sorting for so few."""
    slot = tl.arange(0, SLOTS)
    top = tl.full([SLOTS], LOWEST_KEY, tl.int64)
    for i in range(SLOTS):
        best = tl.max(keys, 0)
        top = tl.where(slot == i, best, top)
        keys = tl.where(keys == best, LOWEST_KEY, keys)
    return top


@triton.jit
def _tile_keys(best, tile):
    """Distinct keys of tiles or runs of tiles: by their best value, then the lower tile, whose ids are lower."""
    return (best.to(tl.int64) << 32) | (~tile).to(tl.uint32).to(tl.int64)


@triton.jit
def _list_keys(lists_ptr, lengths_ptr, entry, tiles, SLOTS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Keys of entries ``tile * SLOTS + slot``, all distinct. What a list never got is lower than any value."""
    tile = entry // SLOTS
    length = tl.load(lengths_ptr + tile, mask=tile < tiles, other=0)
    # Read beside the length, not after it.
    keys = tl.load(lists_ptr + entry.to(tl.int64) * BLOCK_R, mask=tile < tiles, other=LOWEST_KEY)
    return tl.where(entry % SLOTS < length, keys, tl.full(entry.shape, LOWEST_KEY, tl.int64) + entry)


@triton.jit
def _ranks(keys):
    """How many of some distinct keys are larger than each: one step, where `_largest` takes one for each it finds."""
    return tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), 0)


@triton.jit
def _of_largest(keys, names, SLOTS: tl.constexpr):
    """The names of the SLOTS largest of distinct keys."""
    taken = _ranks(keys)[:, None] == tl.arange(0, SLOTS)[None, :]
    return tl.sum(tl.where(taken, names[:, None], 0), 0)


@triton.jit
def _parts(whole, size, SLOTS: tl.constexpr, PARTS: tl.constexpr):
    return tl.reshape(whole[:, None] + tl.arange(0, PARTS)[None, :] * size, [SLOTS * PARTS])


@triton.jit
def _best_groups(bests_ptr, first, tiles, SLOTS: tl.constexpr, SIZE: tl.constexpr):
    """Of groups of SIZE tiles from ``first`` on, the SLOTS with the largest keys."""
    tile = first[:, None] + tl.arange(0, SIZE)[None, :]
    best = tl.max(tl.load(bests_ptr + tile, mask=tile < tiles, other=LOWEST), 1)
    return _of_largest(_tile_keys(best, first), first, SLOTS)


@triton.jit
def _ranked(lists_ptr, lengths_ptr, bests_ptr, tiles, SLOTS: tl.constexpr, BLOCK_R: tl.constexpr):
    """At least the SLOTS largest keys of a row, and the rank of each, for up to 64 * 64 tiles.

    What holds the largest keys lies in the SLOTS groups with the largest keys, so groups become smaller by steps, down
    to tiles, and then to entries of their lists, which descend.
    """
    tile = _best_groups(bests_ptr, tl.arange(0, 64) * 64, tiles, SLOTS, 64)
    tile = _best_groups(bests_ptr, _parts(tile, 16, SLOTS, 4), tiles, SLOTS, 16)
    tile = _best_groups(bests_ptr, _parts(tile, 4, SLOTS, 4), tiles, SLOTS, 4)
    tile = _best_groups(bests_ptr, _parts(tile, 1, SLOTS, 4), tiles, SLOTS, 1)
    run: tl.constexpr = 4 if SLOTS > 4 else SLOTS
    entry = _parts(tile * SLOTS, run, SLOTS, SLOTS // run)
    keys = _list_keys(lists_ptr, lengths_ptr, entry, tiles, SLOTS, BLOCK_R)
    entry = _parts(_of_largest(keys, entry, SLOTS), 1, SLOTS, run)
    keys = _list_keys(lists_ptr, lengths_ptr, entry, tiles, SLOTS, BLOCK_R)
    return keys, _ranks(keys)


@triton.jit
def _one_by_one(
    lists_ptr, lengths_ptr, bests_ptr, tiles, SLOTS: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """The same for any number of tiles and SLOTS."""
    top = tl.full([SLOTS], LOWEST_KEY, tl.int64) + tl.arange(0, SLOTS)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        best = tl.load(bests_ptr + tile, mask=tile < tiles, other=LOWEST)
        more = _largest(_tile_keys(best, tile), SLOTS)
        top = _largest(tl.reshape(tl.join(top, more), [2 * SLOTS]), SLOTS)
    entry = _parts(_token(top) * SLOTS, 1, SLOTS, SLOTS)
    keys = _list_keys(lists_ptr, lengths_ptr, entry, tiles, SLOTS, BLOCK_R)
    return _largest(keys, SLOTS), tl.arange(0, SLOTS)


@triton.jit(do_not_specialize=["tiles", "count", "first_id"])
def _select_kernel(
    lists_ptr, lengths_ptr, bests_ptr, ids_ptr, values_ptr, tiles, count, first_id,
    BLOCK_R: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr, RANKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: the SLOTS tiles with the best values, then the best of what those kept."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    bests_ptr += row * tiles
    lengths_ptr += row // BLOCK_R * tiles
    lists_ptr += row // BLOCK_R * tiles * (SLOTS * BLOCK_R) + row % BLOCK_R
    if RANKED:
        keys, rank = _ranked(lists_ptr, lengths_ptr, bests_ptr, tiles, SLOTS, BLOCK_R)
    else:
        keys, rank = _one_by_one(lists_ptr, lengths_ptr, bests_ptr, tiles, SLOTS, BLOCK_R, TILES)
    # A list that was longer for the sake of another row ends in keys of no value.
    found = keys >= tl.full(keys.shape, LOWEST + 1, tl.int64) << 32
    value = _flip((keys >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    out = row * count + rank
    tl.store(ids_ptr + out, tl.where(found, _token(keys) + first_id, -1), mask=rank < count)
    tl.store(values_ptr + out, tl.where(found, value, float("-inf")), mask=rank < count)


def multiprocessors(device: torch.device) -> int:
    """Of the GPU; the interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Candidates:
    """Scratch of one call, and the selection at its end."""

    def __init__(self, rows: int, vocab: int, count: int, settings: dict[str, int], device: torch.device):
        block_v, block_r = settings["BLOCK_V"], settings["BLOCK_R"]
        self.rows, self.count, self.block_r = rows, count, block_r
        self.tiles, self.row_tiles = triton.cdiv(vocab, block_v), triton.cdiv(rows, block_r)
        programs = settings["PROGRAMS"] * multiprocessors(device) // self.row_tiles
        self.grid = (self.row_tiles, min(self.tiles, programs) or self.tiles)
        self.slots = max(2, triton.next_power_of_2(count))
        self.lists = torch.empty(self.row_tiles, self.tiles, self.slots, block_r, dtype=torch.int64, device=device)
        self.floor = torch.empty(rows, self.slots, dtype=torch.int32, device=device)
        self.lengths = torch.empty(self.row_tiles, self.tiles, dtype=torch.int32, device=device)
        self.bests = torch.empty(rows, self.tiles, dtype=torch.int32, device=device)

    def select(self, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int64 and values fp32, ``[rows, count]``; -1 and -inf where the vocabulary is smaller than that."""
        ids = torch.empty(self.rows, self.count, dtype=torch.int64, device=self.lists.device)
        values = torch.empty(self.rows, self.count, dtype=torch.float32, device=self.lists.device)
        ranked = self.slots <= _RANKED_SLOTS and self.tiles <= _RANKED_TILES
        at_a_time = max(self.slots, min(_TILES_AT_A_TIME, triton.next_power_of_2(self.tiles)))
        options = {"RANKED": ranked, "TILES": 0 if ranked else at_a_time, "num_warps": 8}
        _select_kernel[(self.rows,)](
            self.lists, self.lengths, self.bests, ids, values, self.tiles, self.count, first_id,
            BLOCK_R=self.block_r, SLOTS=self.slots, **options, **dependent_launch(self.lists),
        )  # fmt: skip
        return ids, values
