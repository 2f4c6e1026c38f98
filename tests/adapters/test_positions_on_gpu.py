"""On a GPU: drafts through graphs and positions on the device, against positions from the host, without a wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from adapters.scripted import Request, ScriptedEngine, texts
from tiny import tiny_config

from dflash2 import DFlash2Drafter
from dflash2.adapters.base import RequestDrafter
from dflash2.adapters.chunks import Live

V = 261


def drafter(dtype: torch.dtype) -> DFlash2Drafter:
    torch.manual_seed(3)
    config = tiny_config(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=V,
        mask_token_id=V - 1, sliding_window=48, conv_group_size=16, selector_rank=16, selector_top_k=8,
    )  # fmt: skip
    made = DFlash2Drafter(config, dtype=dtype, device="cuda").requires_grad_(False)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.2)
    table = torch.randn(2, V, 64, device="cuda").to(dtype)
    return made.bind_target(table[0], table[1])


def run(under_test: RequestDrafter, live: bool) -> tuple[dict[tuple[str, int], list[int]], int]:
    """Drafts by request and position, and steps in which a wait for the device would have been an error."""
    pool = {f"r{i}": Request(f"r{i}", t, max(1, len(t) - 40)) for i, t in enumerate(texts(7, 9, V - 1, 30, 90))}
    drafts: dict[tuple[str, int], list[int]] = {}
    watched = 0

    def step(chunks, taps):
        nonlocal watched
        taps, where = taps.to("cuda", under_test.drafter.dtype), None
        if live:
            numbers = [[c.start, c.valid, c.anchor or 0] for c in chunks]
            where = Live(*torch.tensor(numbers, device="cuda").reshape(-1, 3).T.contiguous())
            moved = [c.start >= pool[c.request].prompt or c.valid < c.rows for c in chunks]
            at, reserved = under_test.contexts, under_test.contexts._reserved
            known = all(moved) and all(c.request in under_test.requests and at[c.request] in reserved for c in chunks)
            chunks = [
                replace(c, start=c.start + 2, tokens=(), moved=True) if m else c
                for m, c in zip(moved, chunks, strict=True)
            ]
            chunks = [replace(c, valid=c.rows, anchor=None if c.anchor is None else 0) for c in chunks]
            watched += known
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if known else "default")
        try:
            return under_test.step(chunks, taps, live=where)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    host = ScriptedEngine(step, taps_width=2 * 64, vocab=V - 1, chunk=20)
    waiting, running = list(pool.values()), []
    for _ in range(400):
        while waiting and len(running) < 4:
            running.append(waiting.pop(0))
            host.admit(running[-1])
        host.step(running, lambda r, d: drafts.update({(r.name, r.computed): d}))
        for r in [r for r in running if r.done]:
            running.remove(r)
            under_test.finish(r.name, lambda r=r: r.text)
        if not running:
            break
    return drafts, watched


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_positions_on_the_device_draft_the_same_without_a_wait(dtype, graphs):
    sizes = {"max_requests": 4, "max_tokens": 256, "page_size": 16, "prefix_store_bytes": 1 << 22}
    on_host = RequestDrafter(drafter(dtype), **sizes)
    expected, _ = run(on_host, live=False)
    under_test = RequestDrafter(drafter(dtype), **sizes)
    if graphs:
        under_test.drafter.capture(under_test.kv, (1, 2, 4), under_test.k)
    under_test.warm_up(torch.zeros(128, 2 * 64, dtype=dtype, device="cuda"))
    got, watched = run(under_test, live=True)
    assert watched > 50
    assert under_test.invalid == 0
    assert not under_test.counters.failures
    assert under_test.counters.restored >= on_host.counters.restored > 0
    assert under_test.kv.pages_in_use == 0
    common = expected.keys() & got.keys()
    assert len(common) > 0.9 * len(expected)
    same = sum(expected[key] == got[key] for key in common) / len(common)
    assert same > (0.99 if dtype == torch.float32 else 0.9), same
