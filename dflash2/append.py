"""Context rows from taps into pages: the two forms of `DFlash2Drafter.append`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash2.model import DraftNetwork
from dflash2.positions import host_integers, integers_on_device
from dflash2.prefix_store import TokenChain
from dflash2.window_kv import WindowKV

__all__ = ["append_on_device", "append_on_host"]

#: Rows projected at a time: bounds the features of a long prompt to 8192 x H without costing speed.
CHUNK_ROWS = 8192


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
        parts = [part[:n] for part, n in zip(taps.split(counts), valid, strict=True)]
        positions = torch.cat([torch.arange(a, b) for a, b in ranges]).to(kv.device)
        if any(chains):
            new = [
                _project_and_publish(network, kv, q, *args)
                for q, *args in zip(seqs, parts, starts, ranges, chains, strict=True)
            ]
            keys, values = (torch.cat(rows, 1) for rows in zip(*new, strict=True))
        else:
            kept = [part[a - s :] for part, s, (a, _) in zip(parts, starts, ranges, strict=True)]
            keys, values = _project(network, torch.cat(kept), positions)
    except BaseException:
        kv.disown(seqs)
        for chain, start in zip(chains, starts, strict=True):
            if chain is not None:
                chain.truncate(start)
        raise
    repeats = torch.tensor([b - a for a, b in ranges], device=kv.device)
    kv.write(kv.slots(seqs).repeat_interleave(repeats), positions, keys, values)
    for seq, (first, end), chain in zip(seqs, ranges, chains, strict=True):
        kv.advance(seq, first, end, chain)


def append_on_device(
    network: DraftNetwork,
    kv: WindowKV,
    seqs: Sequence[int],
    taps: Tensor,
    start_positions: Any,
    lengths: Any,
    valid_lengths: Any,
) -> None:
    """The same without a look at the numbers: rows of sequences that do not fit go to the page nobody reads."""
    starts = integers_on_device(start_positions, len(seqs), kv.device)
    counts = integers_on_device(lengths, len(seqs), kv.device)
    valid = counts if valid_lengths is None else integers_on_device(valid_lengths, len(seqs), kv.device)
    if not seqs:
        return
    slots, ends = kv.distinct_slots(seqs), counts.cumsum(0)
    row = torch.arange(taps.shape[0], device=kv.device)
    owner = torch.searchsorted(ends, row, right=True).clamp_max(len(seqs) - 1)
    offset = row - (ends - counts)[owner]
    nexts = starts + valid
    in_order = (kv.next[slots] == starts) & (valid >= 0) & (valid <= counts)
    packed = (counts >= 0).all() & (counts.sum() == taps.shape[0])
    fits = in_order & packed & ((nexts <= kv.limit[slots]) | (valid == 0))
    positions = (starts[owner] + offset).clamp_min(0)
    keep = fits[owner] & (offset < valid[owner]) & (positions >= nexts[owner] - kv.ring)
    keys, values = network.context_rows(taps, positions)
    kv.write(slots[owner], positions, keys, values, keep)
    kv.advance_on_device(seqs, slots, nexts, fits)


def _split_tokens(token_ids: Sequence[int] | Tensor | None, counts: list[int]) -> list[list[int] | None]:
    if token_ids is None:
        return [None] * len(counts)
    flat = token_ids.flatten().tolist() if isinstance(token_ids, Tensor) else [int(t) for t in token_ids]
    if len(flat) != sum(counts):
        raise ValueError(f"token_ids has {len(flat)} entries: expected one for each of the {sum(counts)} rows.")
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [flat[end - n : end] for end, n in zip(ends, counts, strict=True)]


def _project(network: DraftNetwork, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    parts = [
        network.context_rows(taps[i : i + CHUNK_ROWS], positions[i : i + CHUNK_ROWS])
        for i in range(0, max(len(positions), 1), CHUNK_ROWS)
    ]
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, 1), torch.cat(values, 1)


def _project_and_publish(
    network: DraftNetwork,
    kv: WindowKV,
    seq: int,
    taps: Tensor,
    start: int,
    kept: tuple[int, int],
    chain: TokenChain | None,
) -> tuple[Tensor, Tensor]:
    """Rows ``kept`` of one sequence, after publishing every page that is now whole. Projects all rows, in chunks."""
    store, page_size, (first, end) = kv.store, kv.page_size, kept
    if chain is None or store is None:
        return _project(network, taps[first - start :], torch.arange(first, end, device=kv.device))
    begin, keys, values = kv.read_back(seq, start - start % page_size, start)
    published = -(-begin // page_size)
    for at in range(start, end, CHUNK_ROWS):
        positions = torch.arange(at, min(at + CHUNK_ROWS, end), device=kv.device)
        new = network.context_rows(taps[at - start : at - start + CHUNK_ROWS], positions)
        keys, values = torch.cat((keys, new[0]), 1), torch.cat((values, new[1]), 1)
        whole = (begin + keys.shape[1]) // page_size
        for page in range(published, whole):
            rows = slice(page * page_size - begin, (page + 1) * page_size - begin)
            store.put(chain, page, keys[:, rows], values[:, rows])
        published = max(published, whole)
        drop = max(0, min(published * page_size, first) - begin)
        begin, keys, values = begin + drop, keys[:, drop:], values[:, drop:]
    return keys[:, first - begin :], values[:, first - begin :]
