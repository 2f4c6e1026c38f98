"""Requests to an engine whose every draft is compared with that of a drafter that saw the whole context itself."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from adapters.pairs import BYTES, K

from dflash2 import DFlash2Drafter


@dataclass(frozen=True)
class Round:
    """One request's drafts, after ``anchor`` at position ``end``, in the step that began at ``start``."""

    request: str
    end: int
    anchor: int
    drafts: list[int]
    start: int


def conversation(count: int, seed: int = 0, name: str = "r", tokens: int = BYTES) -> dict[str, list[int]]:
    """Prompts of 20 to 160 tokens, ids below ``tokens``, most of which begin as another one does."""
    rng = random.Random(seed)
    heads = [[rng.randrange(tokens) for _ in range(130)] for _ in range(4)]
    made = {}
    for i in range(count):
        head = rng.choice(heads)[: rng.choice((0, 33, 64, 97, 130))]
        made[f"{name}{i}"] = head + [rng.randrange(tokens) for _ in range(rng.randrange(20, 31))]
    return made


def assert_cold(pair: tuple[str, str], texts: dict[str, list[int]], rounds: Iterable[Round]) -> int:
    """Every recorded draft is what a drafter makes that saw the whole context itself; returns how many.

    Args:
        pair: folders of target and drafter.
        texts: prompt and output of each request.
        rounds: of these requests; those at the end of a text, whose anchor is not in it, do not count.
    """
    cold, by_name = Cold(*pair, K), defaultdict(dict)
    for r in rounds:
        by_name[r.request][r.end] = r
    checked = ties = 0
    for name, mine in by_name.items():
        text = texts[name]
        known = {end: r for end, r in mine.items() if end < len(text)}
        assert all(text[end] == r.anchor for end, r in known.items()), name
        expected = cold.drafts(text, list(known))
        different = [end for end, r in known.items() if r.drafts != expected[end]]
        wrong = [end for end in different if tuple(known[end].drafts) not in cold.near_ties(text, end)]
        assert not wrong, f"{name}: {len(wrong)} of {len(known)} rounds differ, the first at {wrong[0]}"
        ties += len(different)
        checked += len(known)
    assert ties <= checked / 1000
    return checked


class Cold:
    """Drafts of one that has seen the whole context itself: taps of Transformers, one append, one propose."""

    def __init__(self, target: str, drafter: str, k: int):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self.drafter = DFlash2Drafter.from_pretrained(drafter, dtype=torch.float32)
        self.drafter.bind_target(self.model.get_input_embeddings().weight.data, self.model.lm_head.weight.data)
        self.k = k
        self._outputs: list[torch.Tensor] = []
        for i in self.drafter.config.target_layer_ids:  # hidden_states would hold the last layer's after the final norm
            self.model.model.layers[i].register_forward_hook(lambda _module, _args, out: self._outputs.append(out))

    @torch.inference_mode()
    def taps(self, tokens: list[int]) -> torch.Tensor:
        self._outputs.clear()
        self.model(torch.tensor([tokens]))
        return torch.cat([out[0] for out in self._outputs], dim=-1)

    @torch.inference_mode()
    def near_ties(self, tokens: list[int], end: int) -> set[tuple[int, ...]]:
        """Drafts of the same context under changes of the taps as small as another order of summation makes."""
        taps, made = self.taps(tokens[:end]), set()
        for seed in range(40):
            noise = torch.randn(taps.shape, generator=torch.Generator().manual_seed(seed))
            kv = self.drafter.new_kv(1, len(tokens) + 16)
            seq = kv.open()
            self.drafter.append(kv, [seq], taps * (1 + 2e-6 * noise), [0], [end])
            tokens_drafted = self.drafter.propose(kv, [seq], [tokens[end]], [end], self.k).tokens
            made.add(tuple(tokens_drafted[0].tolist()))
        return made

    @torch.inference_mode()
    def drafts(self, tokens: list[int], ends: list[int]) -> dict[int, list[int]]:
        """For each end e: drafts after tokens[e], with tokens[:e] as context."""
        taps = self.taps(tokens)
        kv = self.drafter.new_kv(1, len(tokens) + 16)
        made = {}
        for end in sorted(ends):
            seq = kv.open()
            self.drafter.append(kv, [seq], taps[:end], [0], [end])
            made[end] = self.drafter.propose(kv, [seq], [tokens[end]], [end], self.k).tokens[0].tolist()
            kv.close(seq)
        return made
