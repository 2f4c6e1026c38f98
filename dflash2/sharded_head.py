"""An output head whose vocabulary is split over ranks: each looks at its own rows, and all get the same answer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dflash2.lm_head import LMHead
from dflash2.ops.top_candidates import merge_top

__all__ = ["ShardedLMHead"]


class ShardedLMHead:
    """Rows ``first_id, first_id + 1, ...`` of a head here, the others on other ranks; an `LMHead`.

    Every call is one collective of the group: all ranks make the same calls, with the same hidden states. What comes
    back is the same on all of them, and what one head with all the rows would have given.

    Args:
        shard: the rows that are here, padding behind them; None where all are padding.
        first_id: token of the first row.
        rows: how many tokens a rank has room for, the same on all of them; rank r begins at ``r * rows``.
        gather: ``[...] -> [S, ...]``, the tensors of all S ranks in their order.
    """

    def __init__(self, shard: LMHead | None, first_id: int, rows: int, gather: Callable[[Tensor], Tensor]):
        self.shard, self.first_id, self.rows, self.gather = shard, first_id, rows, gather

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """See `LMHead`; fp32."""
        part, own = hidden.new_zeros(hidden.shape[0], self.rows, dtype=torch.float32), self._own(vocab_size)
        if self.shard is not None and own:
            part[:, :own] = self.shard.logits(hidden, own)
        return self.gather(part).movedim(0, 1).flatten(1)[:, :vocab_size]

    def top(self, hidden: Tensor, vocab_size: int, count: int) -> tuple[Tensor, Tensor]:
        """See `LMHead`. A rank sends ``2 * count`` numbers of 32 bits for each row."""
        shape, own = (hidden.shape[0], count), self._own(vocab_size)
        ids = torch.full(shape, -1, dtype=torch.int32, device=hidden.device)
        values = torch.full(shape, -torch.inf, dtype=torch.float32, device=hidden.device)
        if self.shard is not None and own:
            kept = min(count, own)
            found, values[:, :kept] = self.shard.top(hidden, own, kept)
            ids[:, :kept] = found + self.first_id
        of_all = self.gather(torch.cat((ids, values.view(torch.int32)), -1))  # ids as floats would lose bits
        ids, bits = of_all.chunk(2, -1)
        return merge_top(ids.long(), bits.contiguous().view(torch.float32), count)

    def _own(self, vocab_size: int) -> int:
        return min(max(vocab_size - self.first_id, 0), self.rows)
