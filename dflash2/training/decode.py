"""Batched decoding of Llama-like targets: a static cache, a CUDA graph per extent of it, rows refilled as they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2.errors import ConfigError

__all__ = ["LlamaDecoder"]

#: Decoding reads the whole extent of the cache, so graphs are captured for several and the shortest that fits is used.
EXTENT = 256


@dataclass(frozen=True)
class _Layer:
    norm: Tensor
    qkv: Tensor
    out: Tensor
    post: Tensor
    gate_up: Tensor
    down: Tensor


class LlamaDecoder:
    """Rows of a batch that decode independently. All state is in fixed tensors, so a step can be a CUDA graph.

    Attributes:
        tokens: int64 ``[R]``, the newest token of each row, not yet in the cache.
        lengths: int64 ``[R]``, cached tokens.
        written: int64 ``[R]``, answer tokens so far.
        answers: int64 ``[R, max_new_tokens]``.
        temperatures: fp32 ``[R]``; 0 is greedy.
        done: bool ``[R]``; such rows are computed and change nothing.

    Args:
        model: a Transformers causal LM whose decoder is Llama's: RMSNorm, whole rotary heads, SwiGLU, no biases.
        rows: R.
        max_tokens: prompt and answer together.
        max_new_tokens: longest answer.
        eos: ids that end an answer.
        graphs: use CUDA graphs; the model must be on a GPU.
    """

    def __init__(
        self, model: Any, *, rows: int, max_tokens: int, max_new_tokens: int, eos: tuple[int, ...], graphs: bool
    ):
        c = model.config
        _check(model)
        self.head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        self.heads, self.kv_heads, self.eps = c.num_attention_heads, c.num_key_value_heads, c.rms_norm_eps
        decoder = model.get_decoder()
        self.embedding, self.head = decoder.embed_tokens.weight, model.get_output_embeddings().weight
        self.norm, self.layers = decoder.norm.weight, [_fuse(layer) for layer in decoder.layers]
        device, dtype = self.embedding.device, self.embedding.dtype
        self.frequencies = decoder.rotary_emb.inv_freq.to(device, torch.float32)
        self.max_tokens = -(-max_tokens // 8) * 8
        shape = (len(self.layers), rows, self.kv_heads, self.max_tokens, self.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.tokens, self.lengths, self.written = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.answers = torch.zeros(rows, max_new_tokens, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(rows, device=device)
        self.done = torch.ones(rows, dtype=torch.bool, device=device)
        self.eos = torch.tensor(eos, dtype=torch.int64, device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if graphs else None
        self.rows = torch.arange(rows, device=device)

    @torch.no_grad()
    def start(self, slots: Tensor, prompts: list[list[int]], temperatures: Tensor) -> None:
        """Put new requests into rows that are done, and give each its first token.

        Args:
            slots: int64 ``[n]``, rows.
            prompts: token ids, one list per slot.
            temperatures: fp32 ``[n]``.
        """
        device, longest = self.tokens.device, max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = torch.tensor(prompt)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        slots, temperatures = slots.to(device), temperatures.to(device)
        # Padded on the right: under a causal mask no real token sees padding, and decoding overwrites it.
        h = self._prefill(ids.to(device), slots)
        last = h[torch.arange(len(prompts), device=device), lengths - 1]
        first = self._sample(last, temperatures)
        self.tokens[slots], self.lengths[slots], self.written[slots] = first, lengths, 1
        self.answers[slots, 0], self.temperatures[slots] = first, temperatures
        self.done[slots] = torch.isin(first, self.eos) | (self.answers.shape[1] == 1)

    @torch.no_grad()
    def steps(self, count: int, longest: int) -> None:
        """Decode ``count`` tokens in every row that is not done; ``longest`` bounds their cached tokens at the end."""
        extent = min(-(-longest // EXTENT) * EXTENT, self.max_tokens)
        if self.graphs is None:
            for _ in range(count):
                self._step(extent)
            return
        if extent not in self.graphs:
            self.graphs[extent] = self._capture(extent)
        for _ in range(count):
            self.graphs[extent].replay()

    def _capture(self, extent: int) -> torch.cuda.CUDAGraph:
        # Warm-up runs for real: with every row done it changes nothing.
        done = self.done.clone()
        self.done.fill_(True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(extent)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(extent)
        self.done.copy_(done)
        return graph

    def _prefill(self, ids: Tensor, slots: Tensor) -> Tensor:
        length = ids.shape[1]
        cos, sin = self._rope(torch.arange(length, device=ids.device))
        h = self.embedding[ids]
        for i, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, h, cos.unsqueeze(1), sin.unsqueeze(1))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            self.keys[i, slots, :, :length], self.values[i, slots, :, :length] = k, v
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            h = self._rest(layer, h, a.transpose(1, 2).flatten(2))
        return h

    def _step(self, extent: int) -> None:
        at = self.lengths.clamp(max=self.max_tokens - 1)
        cos, sin = self._rope(at)
        seen = torch.arange(extent, device=at.device) <= at.unsqueeze(-1)
        mask = torch.zeros(seen.shape, dtype=self.embedding.dtype, device=at.device).masked_fill(~seen, float("-inf"))
        mask = mask[:, None, None].expand(-1, self.kv_heads, self.heads // self.kv_heads, -1)
        place = (self.rows.unsqueeze(-1), torch.arange(self.kv_heads, device=at.device), at.unsqueeze(-1))
        h = self.embedding[self.tokens]
        for i, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, h, cos.unsqueeze(-2), sin.unsqueeze(-2))
            self.keys[i].index_put_(place, k)
            self.values[i].index_put_(place, v)
            grouped = q.unflatten(1, (self.kv_heads, -1))
            keys, values = self.keys[i, :, :, :extent], self.values[i, :, :, :extent]
            a = F.scaled_dot_product_attention(grouped, keys, values, mask)
            h = self._rest(layer, h, a.flatten(1))
        self._advance(self._sample(h, self.temperatures))

    def _advance(self, token: Tensor) -> None:
        live = ~self.done
        self.tokens.copy_(torch.where(live, token, self.tokens))
        place = self.written.clamp(max=self.answers.shape[1] - 1).unsqueeze(-1)
        kept = torch.where(live.unsqueeze(-1), token.unsqueeze(-1), self.answers.gather(1, place))
        self.answers.scatter_(1, place, kept)
        self.lengths.add_(live)
        self.written.add_(live)
        ended = (token.unsqueeze(-1) == self.eos).any(-1) | (self.written >= self.answers.shape[1])
        self.done.logical_or_(ended)

    def _sample(self, h: Tensor, temperatures: Tensor) -> Tensor:
        logits = (_rms(h, self.norm, self.eps) @ self.head.T).float()
        # Gumbel-max: argmax of logits / T plus noise is a draw from softmax(logits / T), and at T = 0 the argmax.
        noise = -torch.empty_like(logits).exponential_().log_()
        return (logits + noise * temperatures.unsqueeze(-1)).argmax(-1)

    def _qkv(self, layer: _Layer, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.linear(_rms(h, layer.norm, self.eps), layer.qkv).unflatten(-1, (-1, self.head_dim))
        q, k, v = x.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def _rest(self, layer: _Layer, h: Tensor, attended: Tensor) -> Tensor:
        h = h + F.linear(attended, layer.out)
        gate, up = F.linear(_rms(h, layer.post, self.eps), layer.gate_up).chunk(2, dim=-1)
        return h + F.linear(F.silu(gate) * up, layer.down)

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float().unsqueeze(-1) * self.frequencies
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(self.embedding.dtype), both.sin().to(self.embedding.dtype)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _fuse(layer: Any) -> _Layer:
    a, m = layer.self_attn, layer.mlp
    qkv = torch.cat((a.q_proj.weight, a.k_proj.weight, a.v_proj.weight))
    gate_up = torch.cat((m.gate_proj.weight, m.up_proj.weight))
    norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
    return _Layer(norms[0], qkv, a.o_proj.weight, norms[1], gate_up, m.down_proj.weight)


def _check(model: Any) -> None:
    c = model.config
    rope = getattr(c, "rope_parameters", None) or {}
    biased = [n for n, p in model.named_parameters() if n.endswith(".bias")]
    if c.model_type != "llama" or biased or rope.get("rope_type", "default") != "default" or c.hidden_act != "silu":
        raise ConfigError(
            f"synth: model_type={c.model_type!r} (rope {rope.get('rope_type')!r}, {len(biased)} biases) is not a plain "
            "Llama, which is what the fast decoder implements. Write shards with Transformers' generate instead."
        )
