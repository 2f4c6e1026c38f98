"""The candidate selector: a low-rank score between neighbouring tokens, gated by the row's hidden state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CandidateSelector"]


class CandidateSelector(nn.Module):
    """``score(p -> c) = unary[c] + sum_r A[p]_r * g_r * B[c]_r`` with ``g = hidden_projection(z)``.

    The codebooks are gathered, never multiplied whole. B starts at zero, so an untrained selector is neutral.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, rank: int, *, device: Any = None, dtype: torch.dtype | None = None
    ):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank, device=device, dtype=dtype))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank, device=device, dtype=dtype))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Neutral: every pair scores 0."""
        nn.init.normal_(self.predecessor_codebook, std=0.02)
        nn.init.zeros_(self.successor_codebook)
        nn.init.normal_(self.hidden_projection.weight, std=0.02)

    def pair_scores(self, gate: Tensor, predecessors: Tensor, candidates: Tensor) -> Tensor:
        """Edge scores in fp32.

        Args:
            gate: ``[..., r]``, `hidden_projection` of the post-norm hidden states.
            predecessors: int64 ``[..., P]``, token ids before this row.
            candidates: int64 ``[..., C]``, token ids of this row.

        Returns:
            fp32 ``[..., P, C]``.
        """
        # `embedding`: the gradient of plain indexing adds up a token's rows one after the other, and in training common
        # tokens are candidates of most rows.
        before = F.embedding(predecessors, self.predecessor_codebook).float() * gate.float().unsqueeze(-2)
        return before @ F.embedding(candidates, self.successor_codebook).float().transpose(-1, -2)

    def path_scores(self, hidden: Tensor, anchors: Tensor, candidates: Tensor, unary: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of all paths through the candidates of k rows, as `selector_walk` reads them.

        Args:
            hidden: ``[R, k, H]``, post-norm hidden states; k >= 1.
            anchors: int64 ``[R]``, the token before the first row.
            candidates: int64 ``[R, k, C]``.
            unary: fp32 ``[R, k, C]``, their shaped logits.

        Returns:
            fp32 ``[R, C]`` of row 1 given the anchor, and ``[R, k-1, C, C]`` of row i+1 (last axis) given row i.
        """
        gate = self.hidden_projection(hidden)
        first = unary[:, 0] + self.pair_scores(gate[:, 0], anchors[:, None], candidates[:, 0])[:, 0]
        edges = unary[:, 1:, None] + self.pair_scores(gate[:, 1:], candidates[:, :-1], candidates[:, 1:])
        return first, edges
