"""Context rows from taps into pages: the two forms of `DFlash2Drafter.append`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dflash2.capture import CapturedDrafting
from dflash2.model import DraftNetwork
from dflash2.ops.context_rows import ContextWeights, context_backend, context_features, store_features
from dflash2.ops.place_rows import accept, place_rows, plan_rows
from dflash2.positions import host_integers, integer_ids, integers_on_device, upload
from dflash2.prefix_store import TokenChain
from dflash2.window_kv import WindowKV

__all__ = ["append_on_device", "append_on_host", "append_rows_on_device"]

#: Rows projected at a time: bounds what a long prompt's sums take (0.3 GB for a 27B drafter) without costing speed.
CHUNK_ROWS = 4096


def append_on_host(
    network: DraftNetwork,
    kv: WindowKV,
    seqs: Sequence[int],
    taps: Tensor,
    start_positions: Any,
    lengths: Any,
    valid_lengths: Any,
    token_ids: Sequence[int] | Tensor | None,
) -> None:
    """Check everything, own the pages, project what a query can see, write, account. Fails before the first write."""
    starts = host_integers("start_positions", start_positions, len(seqs))
    counts = host_integers("lengths", lengths, len(seqs))
    valid = counts if valid_lengths is None else host_integers("valid_lengths", valid_lengths, len(seqs))
    if sum(counts) != taps.shape[0] or any(v > n for v, n in zip(valid, counts, strict=True)):
        raise ValueError(f"taps hold {taps.shape[0]} rows, lengths say {counts} and valid_lengths say {valid}.")
    tokens = _split_tokens(token_ids, counts)
    kv.check_positions("append", seqs, starts)
    ranges = kv.own(seqs, valid)
    chains = [kv.chain(q) if ids is not None or n == 0 else None for q, ids, n in zip(seqs, tokens, valid, strict=True)]
    if not seqs:
        return
    try:
        for chain, ids, n in zip(chains, tokens, valid, strict=True):
            if chain is not None and ids is not None:
                chain.extend(ids[:n])
        # With a chain every row is projected, so that it can be published; else those that a query can still see.
        firsts = [s if c is not None else a for s, c, (a, _) in zip(starts, chains, ranges, strict=True)]
        rows = [
            part[first - start : n]
            for part, first, start, n in zip(taps.split(counts), firsts, starts, valid, strict=True)
        ]
        places = upload([*zip(*ranges, strict=True), kv.distinct_slots(seqs)], kv.device)
        kept, weights = sum(len(r) for r in rows), network.context_weights()
        if kept <= CHUNK_ROWS and not any(chains) and _stores_directly(network, weights, taps):
            _store(weights, kv, taps if kept == taps.shape[0] else _joined(rows), *_requests(places), checked=False)
        else:
            new = [
                _keep_and_publish(kv, *args)
                for args in zip(seqs, _project(network, kv, rows, firsts), firsts, ranges, chains, strict=True)
            ]
            keys, values = (_joined(parts, 1) for parts in zip(*new, strict=True))
            _, at = place_rows(*_requests(places), kv.row_pool, keys.shape[1], checked=False)
            kv.write_rows(at, keys, values)
    except BaseException:
        kv.disown(seqs)
        for chain, start in zip(chains, starts, strict=True):
            if chain is not None:
                chain.truncate(start)
        raise
    kv.advance(seqs, ranges, chains)


def append_on_device(
    network: DraftNetwork,
    kv: WindowKV,
    seqs: Sequence[int],
    taps: Tensor,
    start_positions: Any,
    lengths: Any,
    valid_lengths: Any,
    captured: CapturedDrafting | None = None,
) -> None:
    """The same without a look at the numbers: rows of sequences that do not fit go to the page nobody reads."""
    starts = integers_on_device("start_positions", start_positions, len(seqs), kv.device)
    counts = integers_on_device("lengths", lengths, len(seqs), kv.device)
    valid = counts
    if valid_lengths is not None:
        valid = integers_on_device("valid_lengths", valid_lengths, len(seqs), kv.device)
    if not seqs:
        return
    slots = kv.distinct_slots_on_device(seqs)
    if captured is None or not captured.append(slots, taps, starts, counts, valid):
        append_rows_on_device(network, kv, slots, taps, starts, counts, valid)
    kv.advance_on_device(seqs)


def append_rows_on_device(
    network: DraftNetwork,
    kv: WindowKV,
    slots: Tensor,
    taps: Tensor,
    starts: Tensor,
    lengths: Tensor,
    valid_lengths: Tensor,
) -> None:
    """What `append_on_device` does on the device: nothing here waits for it, and a CUDA graph can capture it all.

    Args:
        network: of the context rows.
        kv: gets them. The host's accounting is the caller's (`WindowKV.advance_on_device`).
        slots: int64 ``[R]``; those of requests that fit are different.
        taps: ``[N, T*H]``.
        starts, lengths, valid_lengths: int64 ``[R]``.
    """
    weights = network.context_weights()
    if _stores_directly(network, weights, taps):
        _store(weights, kv, taps, starts, lengths, valid_lengths, slots, checked=True)
        return
    placed = plan_rows(starts, lengths, valid_lengths, slots, kv.row_pool, taps.shape[0], checked=True)
    keys, values = network.context_rows(taps, placed.positions)
    kv.write_rows(placed.rows, keys, values)
    accept(placed, slots, kv.row_pool)


def _stores_directly(network: DraftNetwork, weights: ContextWeights, taps: Tensor) -> bool:
    """Whether rows go from the kernel to the pool, without a copy between."""
    return context_backend(network.backend, taps, weights) == "triton"


def _store(
    weights: ContextWeights,
    kv: WindowKV,
    taps: Tensor,
    starts: Tensor,
    lengths: Tensor,
    valid_lengths: Tensor,
    slots: Tensor,
    *,
    checked: bool,
) -> None:
    """Most of the work, and of what can fail, comes before anything is written."""
    features = context_features(taps, weights, backend="triton")
    n = taps.shape[0]
    positions, rows = place_rows(
        starts, lengths, valid_lengths, slots, kv.row_pool, n, checked=checked, backend="triton"
    )
    store_features(features, positions, rows, weights, kv.keys, kv.values, settled=True, backend="triton")


def _requests(places: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``places [3, R]``, of firsts, ends and slots, as `place_rows` takes them: every row counts."""
    firsts, ends, slots = places
    return firsts, ends - firsts, ends - firsts, slots


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """All parts in one tensor; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _split_tokens(token_ids: Sequence[int] | Tensor | None, counts: list[int]) -> list[list[int] | None]:
    if token_ids is None:
        return [None] * len(counts)
    flat = integer_ids("token_ids", token_ids).flatten().tolist()
    if len(flat) != sum(counts):
        raise ValueError(f"token_ids has {len(flat)} entries: expected one for each of the {sum(counts)} rows.")
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [flat[end - n : end] for end, n in zip(ends, counts, strict=True)]


def _project(
    network: DraftNetwork, kv: WindowKV, rows: list[Tensor], firsts: list[int]
) -> Iterable[Iterable[tuple[Tensor, Tensor]]]:
    """Keys and values of each sequence's rows, in chunks: one product for all of them while they are few."""
    counts = [len(r) for r in rows]
    if sum(counts) <= CHUNK_ROWS:
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(firsts, counts, strict=True)])
        keys, values = network.context_rows(_joined(rows), upload(positions, kv.device))
        return ([pair] for pair in zip(keys.split(counts, 1), values.split(counts, 1), strict=True))
    return (_chunks(network, kv, r, first) for r, first in zip(rows, firsts, strict=True))


def _chunks(network: DraftNetwork, kv: WindowKV, rows: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    for at in range(0, max(len(rows), 1), CHUNK_ROWS):
        part = rows[at : at + CHUNK_ROWS]
        yield network.context_rows(part, torch.arange(first + at, first + at + len(part), device=kv.device))


def _keep_and_publish(
    kv: WindowKV,
    seq: int,
    chunks: Iterable[tuple[Tensor, Tensor]],
    start: int,
    kept: tuple[int, int],
    chain: TokenChain | None,
) -> tuple[Tensor, Tensor]:
    """The rows ``kept`` of one sequence, after publishing every page that is now whole.

    Args:
        kv: where earlier rows of the first page are read back from.
        seq: the sequence.
        chunks: keys and values ``[L, n, nkv, hd]`` of its rows from ``start`` to the end of ``kept``.
        start: position of the first row.
        kept: positions worth storing.
        chain: tokens up to the end of ``kept``; None publishes nothing.
    """
    store, page_size, (first, end) = kv.store, kv.page_size, kept
    if chain is None or store is None:
        keys, values = (_joined(parts, 1) for parts in zip(*chunks, strict=True))
        return keys, values
    page_ends = end // page_size > start // page_size
    begin, keys, values = kv.read_back(seq, start - start % page_size if page_ends else start, start)
    published = -(-begin // page_size)
    for new_keys, new_values in chunks:
        keys, values = torch.cat((keys, new_keys), 1), torch.cat((values, new_values), 1)
        whole = (begin + keys.shape[1]) // page_size
        if whole > published:
            rows = slice(published * page_size - begin, whole * page_size - begin)
            store.put(chain, published, keys[:, rows], values[:, rows])
        published = max(published, whole)
        drop = max(0, min(published * page_size, first) - begin)
        begin, keys, values = begin + drop, keys[:, drop:], values[:, drop:]
    return keys[:, first - begin :], values[:, first - begin :]
