"""The draft network, v1 and v2 in one. Its parameter names are the published tensor names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash2.config import DFlash2Config
from dflash2.conv import GroupedConv
from dflash2.ops.backend import Backend
from dflash2.ops.context_rows import ContextWeights, RowMap, project_rows
from dflash2.ops.residual_norm import rms_norm
from dflash2.rope import RotaryTable, apply_rope
from dflash2.selector import CandidateSelector

__all__ = ["Attend", "DraftNetwork", "RMSNorm"]

#: ``attend(layer, q, k, v)``: q ``[..., n, nq, hd]``, k and v ``[..., n, nkv, hd]`` of the block rows, rotated.
#: Returns ``[..., n, nq, hd]``. It owns the context and the mask: paged at inference, packed documents in training.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps)`` in fp32, rounded to x's dtype, times the weight."""

    def __init__(self, size: int, eps: float, *, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]``, any dtype."""
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, c: DFlash2Config, layer: int, **kw: Any):
        super().__init__()
        self.layer, self.head_dim, self.window, self.causal = layer, c.head_dim, c.windows[layer], c.causal[layer]
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, q, bias=c.attention_bias, **kw)
        self.k_proj = nn.Linear(c.hidden_size, kv, bias=c.attention_bias, **kw)
        self.v_proj = nn.Linear(c.hidden_size, kv, bias=c.attention_bias, **kw)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=c.attention_bias, **kw)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, **kw)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, **kw)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.o_proj(attend(self.layer, *self.project(x, cos, sin)).flatten(-2))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x [..., n, H]`` -> q ``[..., n, nq, hd]``, k and v ``[..., n, nkv, hd]``; q and k normed and rotated."""
        heads = (-1, self.head_dim)
        q = apply_rope(self.q_norm(self.q_proj(x).unflatten(-1, heads)), cos, sin)
        k = apply_rope(self.k_norm(self.k_proj(x).unflatten(-1, heads)), cos, sin)
        return q, k, self.v_proj(x).unflatten(-1, heads)


class MLP(nn.Module):
    def __init__(self, c: DFlash2Config, **kw: Any):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False, **kw)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False, **kw)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False, **kw)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, c: DFlash2Config, layer: int, **kw: Any):
        super().__init__()
        self.self_attn = Attention(c, layer, **kw)
        self.mlp = MLP(c, **kw)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, **kw)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, **kw)
        conv = (c.hidden_size, c.conv_kernel_size, c.conv_group_size)
        self.attention_conv = GroupedConv(*conv, **kw) if c.has_conv else None
        self.mlp_conv = GroupedConv(*conv, **kw) if c.has_conv else None

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = self.input_layernorm(h)
        h = h + _convolved(self.attention_conv, x, lambda y: self.self_attn(y, cos, sin, attend))
        x = self.post_attention_layernorm(h)
        return h + _convolved(self.mlp_conv, x, self.mlp)


def _convolved(conv: GroupedConv | None, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    if conv is None:
        return sublayer(x)
    x, delta = conv.before(x)
    return conv.after(sublayer(x), delta)


class DraftNetwork(nn.Module):
    """Context features, draft layers, final norm and selector. Embedding and head are the target's, not ours."""

    #: ``"auto"``: kernels on a GPU, modules elsewhere. ``"torch"``: these modules, whose convolutions keep their kernel
    #: on a GPU, as does a bound head. ``"triton"``: kernels, or an error.
    backend: Backend = "auto"

    def __init__(self, config: DFlash2Config, *, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        c = config
        kw: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = c
        self.fc = nn.Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size, bias=False, **kw)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, **kw)
        self.layers = nn.ModuleList([DraftLayer(c, i, **kw) for i in range(c.num_hidden_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, **kw)
        self.candidate_selector = (
            CandidateSelector(c.vocab_size, c.hidden_size, c.selector_rank, **kw) if c.has_selector else None
        )
        self.rope = RotaryTable(c.head_dim, c.rope_parameters)
        if torch.device(device or "cpu").type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of std 0.02, norms 1, convolutions as identity, selector neutral."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, GroupedConv | CandidateSelector):
                module.reset_parameters()

    @property
    def draft_layers(self) -> list[DraftLayer]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def context_rows(self, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that stand for committed tokens. A row depends on its own taps and position only.

        Args:
            taps: ``[N, T*H]``, outputs of the tapped target layers, concatenated.
            positions: int64 ``[N]``, absolute.

        Returns:
            keys (normed and rotated) and values, each ``[L, N, nkv, hd]``. Bit-equal however rows are split into
            calls (`project_rows`).
        """
        return project_rows(taps, positions, self.context_weights(), backend=self.backend)

    def context_weights(self) -> ContextWeights:
        """What context rows are made with, shared."""
        attention = [layer.self_attn for layer in self.draft_layers]
        return ContextWeights(
            fc=RowMap.of(self.fc),
            hidden_norm=self.hidden_norm.weight,
            keys=tuple(RowMap.of(a.k_proj) for a in attention),
            values=tuple(RowMap.of(a.v_proj) for a in attention),
            key_norms=tuple(a.k_norm.weight for a in attention),
            eps=self.hidden_norm.eps,
            frequencies=self.rope.frequencies(self.hidden_norm.weight.device),
            rope_scale=self.rope.scale,
        )

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Block rows to final hidden states.

        Args:
            hidden: ``[..., n, H]``, embedded anchor and masks; dimension -2 is one block, which bounds the convolution.
            positions: int64 ``[..., n]``, absolute.
            attend: attention over context and block.

        Returns:
            ``[..., n, H]``, after the final norm: what head and selector read.
        """
        cos, sin = self.rope(positions)
        for layer in self.draft_layers:
            hidden = layer(hidden, cos, sin, attend)
        return self.norm(hidden)
