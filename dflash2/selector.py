"""The candidate selector: a low-rank score between neighbouring tokens, gated by the row's hidden state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dflash2.ops.backend import Backend, choose_backend
from dflash2.ops.block_linear import block_linear
from dflash2.ops.selector_walk import Walk, pair_scores, selector_walk

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
        return pair_scores(gate, predecessors, candidates, self.predecessor_codebook, self.successor_codebook)

    def walk(
        self,
        hidden: Tensor,
        anchors: Tensor,
        candidates: Tensor,
        logits: Tensor,
        *,
        multiplier: float = 1.0,
        softcap: float | None = None,
        temperature: Tensor | None = None,
        uniforms: Tensor | None = None,
        backend: Backend = "auto",
    ) -> Walk:
        """`selector_walk` through the candidates of k rows.

        Args:
            hidden: ``[R, k, H]``, post-norm hidden states.
            anchors, candidates, logits, multiplier, softcap, temperature, uniforms, backend: see `selector_walk`.
        """
        return selector_walk(
            self._gate(hidden, backend),
            anchors,
            candidates,
            logits,
            self.predecessor_codebook,
            self.successor_codebook,
            multiplier=multiplier,
            softcap=softcap,
            temperature=temperature,
            uniforms=uniforms,
            backend=backend,
        )

    def _gate(self, hidden: Tensor, backend: Backend) -> Tensor:
        """``[R, k, r]``, or fp32 parts of it where a kernel makes it: a small product must fill the GPU too."""
        weight = self.hidden_projection.weight
        if choose_backend(backend, hidden, weight, dots=True) == "torch":
            return self.hidden_projection(hidden)
        return block_linear(hidden.flatten(0, 1), [weight], [None], backend=backend).unflatten(1, hidden.shape[:2])
