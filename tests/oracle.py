"""The drafter once more, written from the method's formulas by loops, to hold the package to.

Calls nothing of dflash2: it reads a config's fields and the tensors of ``state_dict()`` under their published names.
fp64 inside, so what differs is the package's rounding; only the rotary angles are fp32 products, as in the method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

SLIDING = "sliding_attention"
#: Position -> taps ``[T*H]`` of every valid context row. A hole is a position that is absent.
Context = dict[int, Tensor]


def context_visible(query: int, key: int, start: int, window: int | None) -> bool:
    """Context lies before the anchor; a sliding layer sees W keys to the left, the query among them."""
    if key >= start:
        return False
    return window is None or query - key < window


def block_visible(query: int, key: int, window: int | None, causal: bool) -> bool:
    if causal and key > query:
        return False
    if window is None:
        return True
    return query - key < window and key - query < window


def layer_rules(config) -> list[tuple[int | None, bool]]:
    """(window, causal) per layer. Undeclared causality: causal exactly on the sliding layers."""
    rules = []
    for kind in config.layer_types:
        slides = kind == SLIDING
        causal = slides if config.is_causal is None else bool(config.is_causal)
        rules.append((config.sliding_window if slides else None, causal))
    return rules


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: list[int], theta: float) -> Tensor:
    """``x [n, heads, hd]``, one position per row: channel j turns with channel j + hd/2."""
    half = x.shape[-1] // 2
    frequency = 1.0 / theta ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angle = (torch.tensor(positions, dtype=torch.float32)[:, None] * frequency).double()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


def convolve(x: Tensor, base: Tensor, delta: Tensor, group: int) -> Tensor:
    """``x [n, H]``, ``base [K, H]``, ``delta [n, K, H/G]``: tap o of row i reads row i-o of the same block."""
    y = torch.zeros_like(x)
    for i in range(x.shape[0]):
        for o in range(base.shape[0]):
            if i - o >= 0:
                y[i] += (base[o] + delta[i, o].repeat_interleave(group)) * x[i - o]
    return y


@dataclass
class Row:
    """What one block row offers: the C candidates by value (all tokens in v1), their unary scores."""

    logits: Tensor
    gate: Tensor | None


@dataclass
class Draft:
    hidden: Tensor  # [n, H], post-norm, anchor row included
    rows: list[Row]  # k of them
    sees_context: bool
    seen: list[list[list[int]]] = field(default_factory=list)  # [layer][row] context positions


class Oracle:
    """One request at a time. ``embed [V', H]``, ``head [V', H]``: the target's tables."""

    def __init__(self, drafter, embed: Tensor, head: Tensor):
        self.config = drafter.config
        self.weights = {name: t.detach().double().cpu() for name, t in drafter.state_dict().items()}
        self.embed, self.head = embed.detach().double().cpu(), head.detach().double().cpu()

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.config.head_dim)

    def keys_values(self, layer: int, x: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
        """``x [n, H]`` -> ``[n, nkv, hd]`` each."""
        name = f"layers.{layer}.self_attn"
        key = self._norm(f"{name}.k_norm", self._heads(self._linear(f"{name}.k_proj", x)))
        value = self._heads(self._linear(f"{name}.v_proj", x))
        return rotate(key, positions, self.config.rope_parameters["rope_theta"]), value

    def context_rows(self, layer: int, taps: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Keys and values ``[n, nkv, hd]`` that stand for committed tokens, from ``taps [n, T*H]``."""
        features = self._norm("hidden_norm", self._linear("fc", taps.double().cpu()))
        return self.keys_values(layer, features, positions)

    def _attention(self, layer: int, x: Tensor, start: int, context: Context, seen: list[list[int]]) -> Tensor:
        c, name = self.config, f"layers.{layer}.self_attn"
        window, causal = layer_rules(c)[layer]
        block = [start + i for i in range(len(x))]
        stored = sorted(context)
        q = self._norm(f"{name}.q_norm", self._heads(self._linear(f"{name}.q_proj", x)))
        q = rotate(q, block, c.rope_parameters["rope_theta"])
        keys, values = self.keys_values(layer, x, block)
        if stored:
            k, v = self.context_rows(layer, torch.stack([context[p] for p in stored]), stored)
            keys, values = torch.cat((k, keys)), torch.cat((v, values))
        out = torch.zeros(len(x), c.num_attention_heads, c.head_dim, dtype=torch.float64)
        for i, query in enumerate(block):
            visible = [n for n, p in enumerate(stored) if context_visible(query, p, start, window)]
            seen.append([stored[n] for n in visible])
            visible += [len(stored) + j for j, p in enumerate(block) if block_visible(query, p, window, causal)]
            for h in range(c.num_attention_heads):
                shared = h // (c.num_attention_heads // c.num_key_value_heads)
                weight = torch.softmax(keys[visible, shared] @ q[i, h] / math.sqrt(c.head_dim), 0)
                out[i, h] = weight @ values[visible, shared]
        return self._linear(f"{name}.o_proj", out.flatten(1))

    def _sublayer(self, layer: int, which: str, x: Tensor, function) -> Tensor:
        c = self.config
        if not c.conv_kernel_size:
            return function(x)
        name, n = f"layers.{layer}.{which}_conv", len(x)
        base = self.weights[f"{name}.base_kernel"]
        groups = c.hidden_size // c.conv_group_size
        delta = self._linear(f"{name}.kernel_projection", x).view(n, 2, c.conv_kernel_size, groups)
        x = convolve(x, base[0], delta[:, 0], c.conv_group_size)
        return convolve(function(x), base[1], delta[:, 1], c.conv_group_size)

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        gate, up = (self._linear(f"layers.{layer}.mlp.{which}_proj", x) for which in ("gate", "up"))
        return self._linear(f"layers.{layer}.mlp.down_proj", gate * torch.sigmoid(gate) * up)

    def draft(self, context: Context, anchor: int, start: int, k: int) -> Draft:
        """Everything about one block before the walk."""
        c = self.config
        scale = c.input_embedding_scale
        h = torch.stack([self.embed[anchor]] + [self.embed[c.mask_token_id]] * k) * scale
        seen: list[list[list[int]]] = []
        for layer in range(c.num_hidden_layers):
            x, of_layer = self._norm(f"layers.{layer}.input_layernorm", h), []
            h = h + self._sublayer(
                layer, "attention", x, lambda y, i=layer, s=of_layer: self._attention(i, y, start, context, s)
            )
            x = self._norm(f"layers.{layer}.post_attention_layernorm", h)
            h = h + self._sublayer(layer, "mlp", x, lambda y, i=layer: self._mlp(i, y))
            seen.append(of_layer)
        z = self._norm("norm", h)
        rows = []
        for i in range(1, k + 1):
            logits = self.head[: c.vocab_size] @ z[i]
            logits = logits * c.output_multiplier
            if c.final_logit_softcapping:
                logits = c.final_logit_softcapping * torch.tanh(logits / c.final_logit_softcapping)
            gate = self._linear("candidate_selector.hidden_projection", z[i]) if c.selector_top_k else None
            rows.append(Row(logits, gate))
        return Draft(z, rows, any(p for of_layer in seen for p in of_layer), seen)

    def scores(self, row: Row, predecessor: int, candidates: list[int]) -> Tensor:
        """Score of each candidate token after ``predecessor``."""
        scores = []
        for token in candidates:
            pair = 0.0
            if row.gate is not None:
                before = self.weights["candidate_selector.predecessor_codebook"][predecessor]
                after = self.weights["candidate_selector.successor_codebook"][token]
                pair = float((before * row.gate * after).sum())
            scores.append(float(row.logits[token]) + pair)
        return torch.tensor(scores, dtype=torch.float64)

    def walk(self, draft: Draft, anchor: int) -> list[int]:
        """The greedy path."""
        path = []
        for row in draft.rows:
            count = self.config.selector_top_k or 1
            candidates = sorted(range(self.config.vocab_size), key=lambda t: (-float(row.logits[t]), t))[:count]
            scores = self.scores(row, path[-1] if path else anchor, candidates)
            path.append(candidates[int(scores.argmax())])
        return path


def check_row(prop, r: int, oracle: Oracle, draft: Draft, anchor: int, temperature: float = 0.0, tol: float = 2e-4):
    """Hold row ``r`` of a proposal to the oracle's draft. Where two scores are closer than ``tol`` either may win."""
    c = oracle.config
    blind = all(window == 1 for window, _ in layer_rules(c))  # no layer looks at context, so none can be missed
    assert bool(prop.valid[r]) == (draft.sees_context or blind), f"row {r}: valid={bool(prop.valid[r])}"
    path = prop.tokens[r].tolist()
    assert len(path) == len(draft.rows)
    for i, (row, token) in enumerate(zip(draft.rows, path, strict=True)):
        slack = tol * (1 + float(row.logits.abs().max()))
        count = c.selector_top_k or 1
        if c.selector_top_k:
            candidates = prop.candidates[r, i].tolist()
            assert len(set(candidates)) == count
            least = row.logits.topk(count).values[-1]
            values = row.logits[candidates]
            assert bool((values >= least - slack).all()), f"row {r} step {i}: not the best candidates"
            assert bool((values[1:] <= values[:-1] + slack).all()), f"row {r} step {i}: not ordered by value"
        else:
            assert prop.candidates is None
            candidates = list(range(c.vocab_size))
        assert token in candidates
        scores = oracle.scores(row, path[i - 1] if i else anchor, candidates)
        if temperature <= 0:
            best = float(scores.max())
            mine = float(scores[candidates.index(token)])
            assert mine >= best - slack, f"row {r} step {i}: score {mine}, best {best}"
        if prop.q is not None:
            q = prop.q[r, i].double()
            if temperature <= 0:
                assert q.tolist() == [float(t == token) for t in candidates]
            else:
                expected = torch.softmax(scores / temperature, 0)
                torch.testing.assert_close(q, expected, atol=slack / temperature + 1e-6, rtol=0)
                assert float(q[candidates.index(token)]) > 0
