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


@triton.jit
def _flip(bits):
    """Bits of an fp32 to an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _token(keys):
    return ~(keys.to(tl.int32))


@triton.jit
def collect(
    values, token, row, tile, tiles, vocab, rows, count, lists_ptr, lengths_ptr, floor_ptr,
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
        floor_ptr: int32 ``[rows, SLOTS]``, `LOWEST` before the first tile.
    """
    values = tl.where(values == values, values, float("-inf"))
    values = tl.where(values == 0.0, 0.0, values)  # -0.0 equals 0.0
    left = tl.where((token < vocab)[:, None], _flip(values.to(tl.int32, bitcast=True)), LOWEST)
    best = tl.max(left, 0)
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
def _best_keys(lists_ptr, lengths_at, tile, tiles, SLOTS: tl.constexpr, BLOCK_R: tl.constexpr):
    """The SLOTS best of the first keys of some tiles."""
    length = tl.load(lengths_at + tile, mask=tile < tiles, other=0)
    best = tl.load(lists_ptr + tile.to(tl.int64) * (SLOTS * BLOCK_R), mask=length > 0, other=LOWEST_KEY)
    return _largest(best, SLOTS)


@triton.jit(do_not_specialize=["tiles", "count", "first_id"])
def _select_kernel(
    lists_ptr, lengths_ptr, ids_ptr, values_ptr, tiles, count, first_id,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: the SLOTS tiles with the best keys, then the best of what those kept."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    lengths_at = lengths_ptr + row // BLOCK_R * tiles
    lists_ptr += row // BLOCK_R * tiles * (SLOTS * BLOCK_R) + row % BLOCK_R
    top = _best_keys(lists_ptr, lengths_at, tl.arange(0, TILES), tiles, SLOTS, BLOCK_R)
    for start in range(TILES, tiles, TILES):
        more = _best_keys(lists_ptr, lengths_at, start + tl.arange(0, TILES), tiles, SLOTS, BLOCK_R)
        top = _largest(tl.reshape(tl.join(top, more), [2 * SLOTS]), SLOTS)
    tile = _token(top) // BLOCK_V
    length = tl.load(lengths_at + tile, mask=top > LOWEST_KEY, other=0)
    slot = tl.arange(0, SLOTS)
    keys_at = tile.to(tl.int64)[:, None] * (SLOTS * BLOCK_R) + slot[None, :] * BLOCK_R
    keys = tl.load(lists_ptr + keys_at, mask=slot[None, :] < length[:, None], other=LOWEST_KEY)
    top = _largest(tl.reshape(keys, [SLOTS * SLOTS]), SLOTS)
    # A list that was longer for the sake of another row ends in keys of no value.
    found = top >= tl.full([SLOTS], LOWEST + 1, tl.int64) << 32
    value = _flip((top >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    out = row * count + slot
    tl.store(ids_ptr + out, tl.where(found, _token(top) + first_id, -1), mask=slot < count)
    tl.store(values_ptr + out, tl.where(found, value, float("-inf")), mask=slot < count)


def multiprocessors(device: torch.device) -> int:
    """Of the GPU; the interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Candidates:
    """Scratch of one call, and the selection at its end."""

    def __init__(self, rows: int, vocab: int, count: int, settings: dict[str, int], device: torch.device):
        block_v, block_r = settings["BLOCK_V"], settings["BLOCK_R"]
        self.rows, self.count, self.block_v, self.block_r = rows, count, block_v, block_r
        self.tiles, self.row_tiles = triton.cdiv(vocab, block_v), triton.cdiv(rows, block_r)
        programs = settings["PROGRAMS"] * multiprocessors(device) // self.row_tiles
        self.grid = (self.row_tiles, min(self.tiles, programs) or self.tiles)
        self.slots = max(2, triton.next_power_of_2(count))
        self.lists = torch.empty(self.row_tiles, self.tiles, self.slots, block_r, dtype=torch.int64, device=device)
        self.floor = torch.empty(rows, self.slots, dtype=torch.int32, device=device)
        self.lengths = torch.empty(self.row_tiles, self.tiles, dtype=torch.int32, device=device)

    def select(self, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int64 and values fp32, ``[rows, count]``; -1 and -inf where the vocabulary is smaller than that."""
        ids = torch.empty(self.rows, self.count, dtype=torch.int64, device=self.lists.device)
        values = torch.empty(self.rows, self.count, dtype=torch.float32, device=self.lists.device)
        _select_kernel[(self.rows,)](
            self.lists, self.lengths, ids, values, self.tiles, self.count, first_id,
            BLOCK_V=self.block_v, BLOCK_R=self.block_r, SLOTS=self.slots,
            TILES=max(self.slots, min(_TILES_AT_A_TIME, triton.next_power_of_2(self.tiles))), num_warps=8,
            **dependent_launch(self.lists),
        )  # fmt: skip
        return ids, values
