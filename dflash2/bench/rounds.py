"""A drafter of a published shape on random weights, and one decoding round of it that can be repeated."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dflash2.config import DFlash2Config
from dflash2.drafter import DFlash2Drafter
from dflash2.lm_head import Int8LMHead
from dflash2.proposal import Proposal

__all__ = ["Head", "Round", "Target", "random_drafter", "random_taps", "random_target"]

Head = Literal["int8", "bf16"]
FILL_ROWS = 8192


class Target(NamedTuple):
    """What a drafter borrows: an embedding table ``[V, H]`` and a head."""

    embedding: Tensor
    head: nn.Linear


def random_target(c: DFlash2Config, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Target:
    """Normal weights."""
    head = nn.Linear(c.hidden_size, c.vocab_size, bias=False, device=device, dtype=dtype).requires_grad_(False)
    nn.init.normal_(head.weight, std=0.02)
    return Target(torch.empty_like(head.weight).normal_(std=0.02), head)


def random_drafter(c: DFlash2Config, target: Target, head: Head, *, int8_linears: bool = False) -> DFlash2Drafter:
    """A drafter whose every weight counts (nothing is zero or the identity), bound to the target."""
    weight = target.embedding
    drafter = DFlash2Drafter(c, device=weight.device, dtype=weight.dtype).requires_grad_(False)
    for name, parameter in drafter.named_parameters():
        if name.endswith(("kernel_projection.weight", "codebook")):
            nn.init.normal_(parameter, std=0.02)
    if int8_linears:
        drafter.quantize_linears()
    return drafter.bind_target(weight, Int8LMHead.from_linear(target.head) if head == "int8" else target.head)


def random_taps(drafter: DFlash2Drafter, rows: int) -> Tensor:
    """``[rows, T*H]``, as the target's hidden states."""
    c = drafter.config
    width = len(c.target_layer_ids) * c.hidden_size
    return torch.randn(rows, width, device=drafter.device, dtype=drafter.dtype)


class Round:
    """What the drafter does between two verifications: `append` the block's rows, `propose` the next block.

    The rows of a whole block are appended and the first half of them counts, as where half of the drafts were accepted;
    positions are tensors on the device, as an engine has them that does not wait for them. A round changes nothing but
    the rows it writes and the sequences' next positions, so setting these back (one copy, inside the timed region)
    makes the next round the same work on the same values.

    Args:
        drafter: bound, on the device.
        sequences: R.
        context: tokens appended to each sequence before, through `append`; `start` is where the block then begins.
        max_tokens: of the KV; equal ones let KVs be compared.
        captured: replay CUDA graphs, on a GPU.
    """

    def __init__(
        self, drafter: DFlash2Drafter, sequences: int, context: int, max_tokens: int = 1 << 18, *, captured: bool = True
    ):
        self.drafter, self.sequences = drafter, sequences
        self.rows = drafter.config.block_size
        self.stored = max(1, self.rows // 2)
        self.start = context + self.stored
        self.kv = drafter.new_kv(max_sequences=sequences, max_tokens=max(max_tokens, context + self.rows))
        self.seqs = [self.kv.open() for _ in range(sequences)]
        self._fill(context)
        self.kv.reserve(self.seqs, [context + self.rows] * sequences)
        device = drafter.device
        self.taps = random_taps(drafter, sequences * self.rows)
        self.anchors = torch.randint(drafter.config.vocab_size, (sequences,), device=device)

        def counts(value: int) -> Tensor:
            return torch.full((sequences,), value, dtype=torch.int64, device=device)

        self.lengths, self.valid = counts(self.rows), counts(self.stored)
        self.before, self.starts = counts(context), counts(self.start)
        self.nexts = self.kv.next.clone()
        self._append = self.kv, self.seqs, self.taps, self.before, self.lengths, self.valid
        if captured and device.type == "cuda":
            drafter.capture(self.kv, batch_sizes=(sequences,))

    def _fill(self, context: int) -> None:
        """The same random rows over and over: what is stored is a window of them."""
        taps = random_taps(self.drafter, min(context, FILL_ROWS))
        for first in range(0, context, FILL_ROWS):
            n = min(FILL_ROWS, context - first)
            for seq in self.seqs:
                self.drafter.append(self.kv, [seq], taps[:n], [first], [n])

    def __call__(self) -> Proposal:
        """Append and propose, from the same state each time; captured, as one graph."""
        self.kv.next.copy_(self.nexts)
        proposal = self.drafter.append_and_propose(*self._append, self.anchors)
        if proposal is None:
            self.drafter.append(*self._append)
            proposal = self.propose()
        return proposal

    def append(self) -> None:
        """Only that half."""
        self.kv.next.copy_(self.nexts)
        self.drafter.append(*self._append)

    def propose(self) -> Proposal:
        """The other half, after at least one `append`."""
        return self.drafter.propose(self.kv, self.seqs, self.anchors, self.starts)

    def check(self) -> None:
        """Run a round and see that every sequence drafted on a context without faults.

        Raises:
            RuntimeError: one did not: the round would measure something else.
        """
        valid = self()
        faults = int(self.kv.faults.sum())
        if not bool(valid.valid.all()) or faults:
            raise RuntimeError(f"the measured round is not valid: {valid.valid.tolist()}, {faults} faults.")

    def facts(self) -> dict[str, Any]:
        """What a result should say of it besides its time."""
        return {"kv_bytes": self.kv.nbytes, "kv_pages": self.kv.pages_in_use, "start": self.start}
