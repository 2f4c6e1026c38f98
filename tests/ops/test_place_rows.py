"""place_rows against a loop over positions, and the kernel against the same loop."""

import pytest
import torch

from dflash2.ops.place_rows import RowPool, place_rows

NEVER = -1


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.triton)])
def backend(request):
    """(backend, device): the kernel in the interpreter, or on the GPU where there is one."""
    return request.param, "cpu" if request.param == "torch" else request.getfixturevalue("kernel_device")


def make_pool(device="cpu", *, slots=4, ring_pages=3, size=4, pages=9) -> RowPool:
    """Slot 0 owns a whole ring, slot 1 all but its middle page, slot 2 a ring of other pages, slot 3 nothing."""
    table = torch.full((slots, ring_pages), NEVER)
    table[0] = torch.tensor([7, 2, 4])
    table[1] = torch.tensor([0, NEVER, 5])
    table[2] = torch.tensor([8, 1, 3])
    tags = torch.arange(1000, 1000 + (pages + 1) * size)
    tags[-size:] = NEVER
    next_, limit = torch.tensor([6, 20, 0, 9]), torch.tensor([30, 40, 12, 50])
    moved = [t.to(device) for t in (table, tags, next_, limit, torch.tensor([0, 3, 0, 1]))]
    return RowPool(*moved, page_size=size)


def by_hand(starts, lengths, valid, slots, pool, rows, checked):
    """(positions or None, pool rows or None for each row; tags, next, faults), one row at a time in Python."""
    table, tags, next_ = pool.page_table.tolist(), pool.tags.tolist(), pool.next.tolist()
    limit, faults, size = pool.limit.tolist(), pool.faults.tolist(), pool.page_size
    ring = size * len(table[0])
    packed = all(n >= 0 for n in lengths) and sum(lengths) == rows
    where, row = [None] * rows, 0
    for start, length, v, slot in zip(starts, lengths, valid, slots, strict=True):
        end = start + v
        fits = packed and next_[slot] == start and 0 <= v <= length and (v == 0 or end <= limit[slot])
        if not (fits or not checked):
            faults[slot] += 1
            row += length
            continue
        for i in range(v):
            page = table[slot][(start + i) // size % len(table[0])]
            if start + i >= end - ring and page != NEVER:
                where[row + i] = (start + i, page * size + (start + i) % size)
                tags[where[row + i][1]] = start + i
        next_[slot] = end
        row += length
    return where, tags, next_, faults


def hold(case, pool, rows, backend, checked=True):
    device = pool.tags.device
    where, tags, next_, faults = by_hand(*case, pool, rows, checked)
    tensors = [torch.tensor(c, dtype=torch.int64, device=device) for c in case]
    before = [t.clone() for t in (pool.page_table, pool.limit)]
    positions, at = place_rows(*tensors, pool, rows, checked=checked, backend=backend)
    assert positions.dtype == at.dtype == torch.int64
    discard = pool.tags.shape[0] - pool.page_size
    for found, expected in zip(zip(positions.tolist(), at.tolist(), strict=True), where, strict=True):
        if expected is None:
            assert found[0] == 0
            assert found[1] >= discard
        else:
            assert found == expected
    assert pool.tags.tolist() == tags
    assert pool.next.tolist() == next_
    assert pool.faults.tolist() == faults
    assert all(torch.equal(a, b) for a, b in zip(before, (pool.page_table, pool.limit), strict=True))


@pytest.mark.parametrize(
    ("starts", "lengths", "valid"),
    [
        ([6, 20], [2, 2], [2, 1]),
        ([6, 20], [5, 9], [5, 9]),  # the second meets a page it does not own
        ([6, 20], [0, 3], [0, 3]),
        ([6, 20], [0, 0], [0, 0]),
        ([6, 20], [24, 1], [24, 1]),  # twice the ring
        ([6, 20], [17, 1], [15, 0]),  # more than the ring, cut in the middle of a page
        ([7, 20], [2, 2], [2, 2]),  # a gap
        ([5, 20], [2, 2], [2, 2]),  # a repeat
        ([-6, 20], [2, 2], [2, 2]),
        ([2**40, 20], [2, 2], [2, 2]),
        ([6, 20], [25, 2], [25, 2]),  # beyond the limit
        ([6, 20], [26, 2], [24, 2]),  # the rejected suffix needs no room
        ([6, 20], [2, 2], [3, 1]),  # more valid rows than rows
        ([6, 20], [2, 2], [-1, 2]),
    ],
)
def test_every_row_is_where_the_loop_puts_it(starts, lengths, valid, backend):
    hold((starts, lengths, valid, [0, 1]), make_pool(backend[1]), sum(lengths), backend[0])


@pytest.mark.parametrize("rows", [0, 3, 4, 40])
def test_rows_that_are_not_those_of_the_lengths_are_kept_nowhere(rows, backend):
    for lengths in ([3, 2], [9, -5], [2**40, 0], [0, 0, 7]):
        n = len(lengths)
        if rows != sum(lengths) or min(lengths) < 0:
            hold(([6, 20, 0][:n], lengths, [0, 1, 2][:n], [0, 1, 2][:n]), make_pool(backend[1]), rows, backend[0])


def test_callers_who_have_checked_are_believed(backend):
    case = ([8, 20, 0], [12, 4, 3], [12, 4, 3], [2, 1, 3])  # past slot 2's next and limit; slot 3 has no page
    hold(case, make_pool(backend[1]), 19, backend[0], checked=False)


def test_requests_of_one_slot_that_fit_nowhere(backend):
    """What fills up a batch: the same slot again and again, whose next position is none."""
    pool = make_pool(backend[1])
    pool.next[3] = NEVER
    integers = [torch.tensor(c, device=backend[1]) for c in ([6, 0, 0, 0], [2, 0, 0, 4], [1, 0, 0, 0], [0, 3, 3, 3])]
    positions, rows = place_rows(*integers, pool, 6, backend=backend[0])
    assert positions.tolist() == [6, 0, 0, 0, 0, 0]
    assert rows[0] == 2 * 4 + 6 % 4
    assert bool((rows[1:] >= 9 * 4).all())
    assert pool.next.tolist() == [7, 20, 0, NEVER]
    assert pool.faults.tolist()[:3] == [0, 3, 0]


def test_no_requests(backend):
    none = torch.zeros(0, dtype=torch.int64, device=backend[1])
    positions, rows = place_rows(none, none, none, none, make_pool(backend[1]), 0, backend=backend[0])
    assert positions.shape == rows.shape == (0,)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("requests", "longest"),
    [
        (5, 60),
        (1, 1500),
        pytest.param(256, 64, marks=pytest.mark.gpu),
        pytest.param(3, 4000, marks=pytest.mark.gpu),
    ],
)
def test_the_kernel_does_what_the_reference_does(requests, longest, kernel_device):
    """Many requests, several blocks of rows, production page sizes; some requests do not fit."""
    g = torch.Generator().manual_seed(requests)
    size, ring_pages = 16, 8
    order = torch.randperm(requests * ring_pages, generator=g)
    starts = torch.randint(0, 5000, (requests,), generator=g)
    lengths = torch.randint(0, longest + 1, (requests,), generator=g)
    valid = (lengths * torch.rand(requests, generator=g)).long()
    pools = []
    for _ in range(2):
        tags = torch.full(((requests * ring_pages + 1) * size,), NEVER)
        limit, next_ = starts + lengths, starts + (torch.arange(requests) % 5 == 3)
        tensors = (order.view(requests, ring_pages), tags, next_, limit, torch.zeros_like(next_))
        pools.append(RowPool(*(t.to(kernel_device) for t in tensors), page_size=size))
    case = [t.to(kernel_device) for t in (starts, lengths, valid, torch.randperm(requests, generator=g))]
    pools[0].next[case[3]], pools[1].next[case[3]] = pools[0].next.clone(), pools[1].next.clone()
    pools[0].limit[case[3]], pools[1].limit[case[3]] = pools[0].limit.clone(), pools[1].limit.clone()
    rows = int(lengths.sum())
    for expected, found in zip(place_rows(*case, pools[0], rows, backend="torch"),
                               place_rows(*case, pools[1], rows, backend="triton"), strict=True):  # fmt: skip
        assert torch.equal(expected, found)
    for name in ("tags", "next", "faults"):
        assert torch.equal(getattr(pools[0], name), getattr(pools[1], name)), name
    assert int(pools[1].faults.sum()) == len(range(3, requests, 5))


def test_wrong_requests_are_named():
    ids = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expected starts, lengths, valid_lengths and slots, each int64 \[R\]"):
        place_rows(ids, ids, ids.int(), ids, make_pool(), 0)
    with pytest.raises(ValueError, match=r"each int64 \[R\]"):
        place_rows(ids, ids[:1], ids, ids, make_pool(), 0)
    with pytest.raises(ValueError, match="a pool on meta; move them together"):
        place_rows(ids, ids, ids, ids, make_pool("meta"), 0)
