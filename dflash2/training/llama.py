"""The network of Llama and its kin with fused projections, for decoding whose attention others define."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash2.errors import ConfigError
from dflash2.ops.decode_attention import HeadNorm
from dflash2.ops.residual_norm import residual_norm, rms_norm

__all__ = ["LlamaNetwork", "why_not"]

#: Model types whose layers are Llama's: RMSNorm, whole rotary heads, SwiGLU; biases and norms of heads may be there.
KIN = ("llama", "mistral", "qwen2", "qwen3")
#: Rotations that do not change with the length.
ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class _Layer:
    """Weights and biases ``(weight, bias or None)``; ``after`` is the norm that follows the layer."""

    qkv: tuple[Tensor, Tensor | None]
    out: tuple[Tensor, Tensor | None]
    post: Tensor
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    after: Tensor
    head_norm: HeadNorm | None


class LlamaNetwork:
    """A Transformers causal LM, read into fused weights (a second copy of its linears; the tables are shared).

    Attributes:
        embedding, head: ``[V, H]``.
        layers: one after the other.
        heads, kv_heads, head_dim: nq, nkv, hd.

    Args:
        model: of one of the types in `KIN`.

    Raises:
        ConfigError: the model is another; the message says in what.
    """

    def __init__(self, model: Any):
        if reason := why_not(model):
            raise ConfigError(
                f"{reason}: expected one of {', '.join(KIN)}, plain. Use dflash2.training.general_decode."
            )
        c, decoder = model.config, model.get_decoder()
        self.heads, self.kv_heads, self.eps = c.num_attention_heads, c.num_key_value_heads, c.rms_norm_eps
        self.head_dim = decoder.layers[0].self_attn.head_dim
        self.embedding, self.head = decoder.embed_tokens.weight, model.get_output_embeddings().weight
        norms = [layer.input_layernorm.weight for layer in decoder.layers] + [decoder.norm.weight]
        self.norm = norms[0]
        self.layers = [_fuse(layer, after, self.eps) for layer, after in zip(decoder.layers, norms[1:], strict=True)]
        rotary = decoder.rotary_emb
        self._frequencies = rotary.inv_freq.to(self.embedding.device, torch.float32)
        self._rope_scale = float(rotary.attention_scaling)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int ``[...]`` to cos and sin, fp32 ``[..., hd/2]``, rounded to the dtype the model gives them."""
        angles = positions.float().unsqueeze(-1) * self._frequencies
        cos, sin = ((x * self._rope_scale).to(self.embedding.dtype).float() for x in (angles.cos(), angles.sin()))
        return cos, sin

    def states(self, tokens: Tensor, attend: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The normed output of the last layer, which the head takes.

        Args:
            tokens: int64 ``[N]``.
            attend: layer and products ``[N, (nq + 2 nkv) hd]`` to what the queries found, ``[N, nq hd]``.

        Returns:
            ``[N, H]``.
        """
        h = F.embedding(tokens, self.embedding)
        x = rms_norm(h, self.norm, self.eps)
        for i, layer in enumerate(self.layers):
            h, x = self._add(h, F.linear(attend(i, F.linear(x, *layer.qkv)), *layer.out), layer.post)
            gate, up = F.linear(x, *layer.gate_up).chunk(2, dim=-1)
            h, x = self._add(h, F.linear(F.silu(gate) * up, *layer.down), layer.after)
        return x

    def _add(self, h: Tensor, update: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        return residual_norm(h, update.unsqueeze(0), None, None, None, norm, self.eps, 1)


def _joined(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    weights = [linear.weight.detach() for linear in linears]
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return torch.cat(weights) if len(weights) > 1 else weights[0], torch.cat(biases) if biases else None


def _fuse(layer: Any, after: Tensor, eps: float) -> _Layer:
    a, m = layer.self_attn, layer.mlp
    norm = HeadNorm(a.q_norm.weight, a.k_norm.weight, eps) if hasattr(a, "q_norm") else None
    return _Layer(
        qkv=_joined(a.q_proj, a.k_proj, a.v_proj),
        out=_joined(a.o_proj),
        post=layer.post_attention_layernorm.weight,
        gate_up=_joined(m.gate_proj, m.up_proj),
        down=_joined(m.down_proj),
        after=after,
        head_norm=norm,
    )


def why_not(model: Any) -> str | None:
    """What `LlamaNetwork` cannot read in a model, or None."""
    c = model.config
    if c.model_type not in KIN:
        return f"model_type={c.model_type!r}"
    rope = getattr(c, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ROPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"rope_parameters={rope}"
    kinds = getattr(c, "layer_types", None) or (["sliding_attention"] if getattr(c, "sliding_window", None) else [])
    if set(kinds) - {"full_attention"}:
        return f"layers with {sorted(set(kinds))}"
    if c.hidden_act != "silu":
        return f"hidden_act={c.hidden_act!r}"
    linears = [m for layer in model.get_decoder().layers for m in layer.modules() if not [*m.children()]]
    odd = {type(m).__name__ for m in linears if hasattr(m, "weight") and "Linear" in type(m).__name__} - {"Linear"}
    return f"{', '.join(sorted(odd))} instead of Linear" if odd else None
