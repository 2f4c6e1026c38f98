"""P13: memory is fixed at creation, by the window; the vocabulary's tables are the target's and are never copied."""

from __future__ import annotations

import pytest
import torch
from tiny import FULL, SLIDING, Toy, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from dflash2 import DFlash2Drafter
from dflash2.errors import CapacityError


class Allocations(TorchDispatchMode):
    """Remembers the largest storage that any operation made anew."""

    def __init__(self):
        super().__init__()
        self.largest, self.by = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        for t in out if isinstance(out, tuple | list) else (out,):
            if not isinstance(t, torch.Tensor) or t.device.type == "meta" or t.untyped_storage()._cdata in known:
                continue
            self.largest, self.by = max((self.largest, self.by), (t.untyped_storage().nbytes(), str(func)))
        return out


def per_token(config) -> int:
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


@pytest.mark.parametrize("max_tokens", [8192, 131_072, 1_048_576])
def test_bytes_follow_from_the_window(max_tokens):
    """Row B73: 64 sequences of 131072 at window 2048 and page 16: 130 pages each, one spare, under 2 % of accounts."""
    config = tiny_config(sliding_window=2048, max_position_embeddings=max_tokens, head_dim=64, num_hidden_layers=3)
    drafter = DFlash2Drafter(config, device="meta")
    kv = drafter.new_kv(64, max_tokens, 16)
    rows = (64 * 130 + 1) * 16
    assert kv.num_pages == 64 * 130
    assert kv.keys.nbytes + kv.values.nbytes == rows * per_token(config)
    assert kv.nbytes <= 1.02 * rows * per_token(config)
    assert kv.nbytes <= 1.02 * 64 * (2048 + 2 * 16) * per_token(config)


@pytest.mark.parametrize("start", [0, 4096, 65_536, 1_000_000])
def test_pages_and_bytes_do_not_follow_the_position(start):
    """Row B77."""
    toy = Toy(tiny_config(sliding_window=64))
    kv = toy.drafter.new_kv(1, 2_000_000, 16)
    expected = toy.drafter.new_kv(1, 4096, 16).nbytes
    assert kv.nbytes == expected
    seq = kv.open(start)
    for n in range(start, start + 300, 50):
        toy.append(kv, seq, n, n + 50)
        assert kv.pages_in_use <= 6
    assert kv.pages_in_use == kv.ring_pages == kv.pages_needed(300) == 6
    assert kv.nbytes == expected


def test_pages_needed_says_what_is_owned():
    for layers in ((SLIDING,), (SLIDING, FULL)):
        toy = Toy(tiny_config(layer_types=layers, sliding_window=8))
        for start in (0, 3, 4, 1001):
            for n in (0, 1, 4, 5, 17, 60):
                kv = toy.drafter.new_kv(1, 64, 4)
                seq = kv.open(start)
                toy.append(kv, seq, start, start + n)
                assert kv.pages_in_use == min(kv.pages_needed(n, start), kv.ring_pages)
    assert kv.pages_needed(10_000) == 2500


def test_memory_that_cannot_be_had_is_a_capacity_error():
    """Rows B80, B87: the message says how much, and what to lower."""
    drafter = DFlash2Drafter(tiny_config(layer_types=(FULL,)))
    with pytest.raises(CapacityError, match=r"needs [\d,]+ bytes .* Lower max_sequences, max_tokens or num_pages"):
        drafter.new_kv(1 << 20, 1 << 30)
    with pytest.raises(CapacityError, match="needs .* bytes"):
        drafter.new_kv(1, 64, prefix_store_bytes=1 << 55)


@pytest.mark.parametrize("name", ["max_sequences", "max_tokens", "page_size"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(CapacityError, match=f"{name}=0"):
        DFlash2Drafter(tiny_config()).new_kv(**{name: 0})


def test_no_table_of_the_vocabulary_is_made(tmp_path):
    """Row B83: construct, load, bind and append allocate nothing of vocabulary x hidden; the tables are shared."""
    config = tiny_config(vocab_size=60_000, mask_token_id=59_999, selector_rank=2)
    table_bytes = config.vocab_size * config.hidden_size * 4
    embed = torch.randn(config.vocab_size, config.hidden_size)
    head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False).requires_grad_(False)
    with Allocations() as made:
        drafter = DFlash2Drafter(config)
        drafter.save_pretrained(tmp_path)
        drafter = DFlash2Drafter.from_pretrained(tmp_path)
        drafter.bind_target(embed, head)
        kv = drafter.new_kv(2, 128)
        seq = kv.open()
        drafter.append(kv, [seq], torch.randn(9, 2 * config.hidden_size), [0], [9])
        drafter.embed(torch.tensor([1]), 3)
    assert 0 < made.largest < table_bytes / 2, made.by
    assert drafter._embedding[0].data_ptr() == embed.data_ptr()
    assert drafter._head[0].weight.data_ptr() == head.weight.data_ptr()
    names = set(drafter.state_dict())
    assert not any("embed" in n or "head" in n for n in names)
    assert sum(p.numel() for p in drafter.parameters()) == sum(t.numel() for t in drafter.state_dict().values())


def test_a_propose_makes_no_copy_of_a_table():
    config = tiny_config(vocab_size=60_000, mask_token_id=59_999, selector_rank=2)
    toy = Toy(config)
    kv = toy.drafter.new_kv(2, 128)
    seq = kv.open()
    toy.append(kv, seq, 0, 9)
    with Allocations() as made:
        toy.drafter.propose(kv, [seq], [1], [9])
    assert made.largest <= config.max_draft_tokens * config.vocab_size * 8, made.by  # logits of its rows, as sort keys


def test_all_tensors_of_a_kv_are_made_at_creation():
    toy = Toy(tiny_config())
    kv = toy.drafter.new_kv(2, 4096, 4)
    before = {name: t.data_ptr() for name, t in vars(kv).items() if isinstance(t, torch.Tensor)}
    seq = kv.open()
    for n in range(0, 200, 20):
        toy.append(kv, seq, n, n + 20)
        toy.drafter.propose(kv, [seq], [1], [n + 20])
    kv.reset(seq, 7)
    after = {name: t.data_ptr() for name, t in vars(kv).items() if isinstance(t, torch.Tensor)}
    assert before == after
