"""Context rows from taps: keys and values that stand for committed tokens in every layer.

    c    = hidden_norm(fc taps)
    K_l  = rope_p(k_norm_l(Wk_l c))  per head,    V_l = Wv_l c

A row depends on its own taps and position only, to the bit: whatever the number of rows in a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dflash2.ops.backend import Backend, choose_backend
from dflash2.ops.int8_linear import int8_linear_reference
from dflash2.ops.residual_norm import rms_norm
from dflash2.ops.row_linear import product_settings, row_linear_reference
from dflash2.rope import apply_rope

__all__ = [
    "ContextWeights",
    "RowMap",
    "context_backend",
    "context_features",
    "context_rows",
    "project_rows",
    "project_rows_reference",
    "store_features",
]


class RowMap(NamedTuple):
    """A linear map: ``weight [O, K]``, fp32 ``scale [O]`` if the weight is int8, ``bias [O]`` or None."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, linear: Any) -> RowMap:
        """Of an `nn.Linear` or `Int8Linear`; shares their tensors."""
        return cls(linear.weight, getattr(linear, "scale", None), linear.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """The definition: ``[N, K]`` -> ``[N, O]``."""
        if self.scale is None:
            return row_linear_reference(x, self.weight, self.bias)
        return int8_linear_reference(x, self.weight, self.scale, self.bias)


@dataclass(frozen=True)
class ContextWeights:
    """What context rows are made with. Tensors are shared with the network.

    Attributes:
        fc: ``[H, T*H]``, without bias.
        hidden_norm: ``[H]``; its dtype is that of the rows.
        keys, values: per layer ``[nkv*hd, H]``.
        key_norms: per layer ``[hd]``.
        eps: of all norms.
        frequencies: fp32 ``[hd/2]``, angle per position.
        rope_scale: factor on cos and sin.
    """

    fc: RowMap
    hidden_norm: Tensor
    keys: tuple[RowMap, ...]
    values: tuple[RowMap, ...]
    key_norms: tuple[Tensor, ...]
    eps: float
    frequencies: Tensor
    rope_scale: float

    @property
    def maps(self) -> list[RowMap]:
        """The maps of features, keys before values in each layer."""
        return [m for pair in zip(self.keys, self.values, strict=True) for m in pair]

    @property
    def heads(self) -> tuple[int, int, int]:
        """(L, nkv, hd)."""
        head_dim = self.key_norms[0].shape[0]
        return len(self.keys), self.keys[0].weight.shape[0] // head_dim, head_dim


def context_rows(
    taps: Tensor, positions: Tensor, rows: Tensor, weights: ContextWeights, keys_out: Tensor, values_out: Tensor, *,
    backend: Backend = "auto",
) -> None:  # fmt: skip
    """Write the context row of each token to a row of a pool.

    Args:
        taps: ``[N, T*H]`` floating point, outputs of the tapped target layers, concatenated.
        positions: int64 ``[N]``, absolute.
        rows: int64 ``[N]``, of the pool. Of tokens with the same row any one is left there.
        weights: see `ContextWeights`.
        keys_out, values_out: ``[L, P, nkv, hd]`` contiguous, in the dtype of ``hidden_norm``; changed.
        backend: see `choose_backend`; the kernels are four launches, six with int8 weights.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend cannot run here; nothing is written.
    """
    features = context_features(taps, weights, backend=backend)
    store_features(features, positions, rows, weights, keys_out, values_out, backend=backend)


def project_rows(
    taps: Tensor, positions: Tensor, weights: ContextWeights, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Keys (normed and rotated) and values of each token, each ``[L, N, nkv, hd]``; otherwise as `context_rows`."""
    if context_backend(backend, taps, weights) == "torch":
        return project_rows_reference(taps, positions, weights)
    layers, heads, head_dim = weights.heads
    keys, values = weights.hidden_norm.new_empty(2, layers, taps.shape[0], heads, head_dim)
    rows = torch.arange(taps.shape[0], device=taps.device)
    context_rows(taps, positions, rows, weights, keys, values, backend=backend)
    return keys, values


def project_rows_reference(taps: Tensor, positions: Tensor, weights: ContextWeights) -> tuple[Tensor, Tensor]:
    """The definition, in torch; differentiable. Shapes as in `project_rows`, unchecked."""
    return _project(_features(taps, weights), positions, weights)


def context_features(taps: Tensor, weights: ContextWeights, *, backend: Backend = "auto") -> Tensor:
    """The first half of `context_rows`: ``[N, H]`` in the dtype of ``hidden_norm``, what all layers read.

    Raises:
        ValueError: the taps are no floating-point ``[N, T*H]``, or the backend cannot run here.
    """
    if taps.dim() != 2 or taps.shape[1] != weights.fc.weight.shape[1] or not taps.is_floating_point():
        raise ValueError(
            f"context_rows got taps {list(taps.shape)} {taps.dtype}; expected floating-point rows "
            f"[N, {weights.fc.weight.shape[1]}]."
        )
    if context_backend(backend, taps, weights) == "torch":
        return _features(taps, weights)
    from dflash2.kernels import context_rows as kernel
    from dflash2.kernels import row_linear as product

    x = taps.to(weights.hidden_norm.dtype)
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight, scale, _ = weights.fc
    sums = product.span_sums(x, weight, product_settings(x, weight.shape[0]))
    return kernel.features(sums, scale, weights.hidden_norm, weights.eps)


def store_features(
    features: Tensor, positions: Tensor, rows: Tensor, weights: ContextWeights, keys_out: Tensor, values_out: Tensor, *,
    settled: bool = False, backend: Backend = "auto",
) -> None:  # fmt: skip
    """The second half of `context_rows`: from ``features [N, H]``, as of `context_features`, to rows of the pool.

    ``settled``: the weights were written before a `context_features` that came before this: the kernel may read them
    while what came in between still runs.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend cannot run here; nothing is written.
    """
    _check(features, positions, rows, weights, keys_out, values_out)
    if context_backend(backend, features, weights) == "torch":
        keys, values = _project(features, positions, weights)
        keys_out.index_copy_(1, rows, keys)
        values_out.index_copy_(1, rows, values)
        return
    from dflash2.kernels import context_rows as kernel
    from dflash2.kernels import row_linear as product

    layers, heads, head_dim = weights.heads
    width, first = heads * head_dim, weights.keys[0]
    int8, table = first.scale is not None, _address_table(weights)
    settings = product_settings(features, 2 * layers * width)
    sums = product.span_sums(features, table, settings, (2 * layers, width, int8), settled=settled)
    kernel.heads(
        sums, table, positions, rows, weights.frequencies, (keys_out, values_out), eps=weights.eps,
        rope_scale=weights.rope_scale, int8=int8, bias=first.bias is not None,
    )  # fmt: skip


def context_backend(backend: str, x: Tensor, weights: ContextWeights) -> str:
    """`choose_backend` for taps or features ``x`` of any dtype. Weights no kernel takes make ``auto`` the reference.

    Raises:
        ValueError: as `choose_backend`, or the kernels were asked for and cannot take the weights.
    """
    w = weights
    tensors = [t for m in (w.fc, *w.maps) for t in m if t is not None and t.is_floating_point()]
    chosen = choose_backend(backend, w.hidden_norm, x[:0].to(w.hidden_norm.dtype), *w.key_norms, *tensors, dots=True)
    if chosen == "triton" and (obstacle := _obstacle(w)) is not None:
        if backend == "triton":
            raise ValueError(f"backend='triton' cannot run here: {obstacle}; use backend='auto' or 'torch'.")
        return "torch"
    return chosen


def _features(taps: Tensor, weights: ContextWeights) -> Tensor:
    return rms_norm(weights.fc(taps.to(weights.hidden_norm.dtype)), weights.hidden_norm, weights.eps)


def _project(features: Tensor, positions: Tensor, weights: ContextWeights) -> tuple[Tensor, Tensor]:
    angles = positions.to(torch.float32).unsqueeze(-1) * weights.frequencies
    cos, sin = angles.cos() * weights.rope_scale, angles.sin() * weights.rope_scale
    heads = (-1, weights.heads[2])
    keys = [rms_norm(m(features).unflatten(-1, heads), norm, weights.eps)
            for m, norm in zip(weights.keys, weights.key_norms, strict=True)]  # fmt: skip
    values = [m(features).unflatten(-1, heads) for m in weights.values]
    return torch.stack([apply_rope(k, cos, sin) for k in keys]), torch.stack(values)


#: By hidden norm: (addresses, the same on the device). Graphs read the table, so it lives as long as the network.
_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _address_table(weights: ContextWeights) -> Tensor:
    """int64: addresses of 2 L weights, 2 L biases, 2 L scales (0 where there are none) and L key norms."""
    columns = zip(*((m.weight, m.bias, m.scale) for m in weights.maps), strict=True)
    tensors = [t for column in columns for t in column] + list(weights.key_norms)
    addresses = tuple(0 if t is None else t.data_ptr() for t in tensors)
    known, table = _tables.get(weights.hidden_norm, (None, None))
    if known != addresses:
        table = torch.tensor(addresses, dtype=torch.int64, device=weights.hidden_norm.device)
        _tables[weights.hidden_norm] = addresses, table
    return table


def _obstacle(weights: ContextWeights) -> str | None:
    """Why the kernels cannot take these weights, or None."""
    dtype, maps = weights.hidden_norm.dtype, weights.maps
    if any(t.dtype != dtype for t in (*weights.key_norms, *(m.bias for m in maps if m.bias is not None))):
        return "norms and biases have several dtypes"
    if {weights.fc.weight.dtype, *(m.weight.dtype for m in maps)} - {dtype, torch.int8}:
        return f"weights have another dtype than {dtype} or int8"
    if len({(m.weight.dtype, m.weight.shape, m.bias is None) for m in maps}) > 1:
        return "keys and values of all layers have to be of one dtype and shape, and all with or without bias"
    if weights.fc.bias is not None:
        return "fc has a bias"
    tensors = [t for m in (weights.fc, *maps) for t in m if t is not None] + [*weights.key_norms, weights.hidden_norm]
    if not all(t.is_contiguous() for t in tensors) or any(m.weight.data_ptr() % 16 for m in maps):
        return "weights have to be contiguous and begin at a multiple of 16 bytes"
    return None


def _check(
    features: Tensor, positions: Tensor, rows: Tensor, weights: ContextWeights, keys_out: Tensor, values_out: Tensor
) -> None:
    layers, heads, head_dim = weights.heads
    n, dtype = features.shape[0], weights.hidden_norm.dtype
    if any(t.shape != (n,) or t.dtype != torch.int64 for t in (positions, rows)):
        found = [(list(t.shape), t.dtype) for t in (positions, rows)]
        raise ValueError(f"context_rows got positions and rows {found}; expected each int64 [{n}], one for each token.")
    for name, out in (("keys_out", keys_out), ("values_out", values_out)):
        expected = (layers, keys_out.shape[1] if keys_out.dim() == 4 else -1, heads, head_dim)
        if out.shape != expected or out.dtype != dtype or not out.is_contiguous():
            raise ValueError(
                f"context_rows got {name} {list(out.shape)} {out.dtype}, strides {out.stride()}; expected contiguous "
                f"[{layers}, P, {heads}, {head_dim}] {dtype}."
            )
    if len({t.device for t in (features, positions, rows, keys_out, values_out, weights.hidden_norm)}) > 1:
        raise ValueError("context_rows got tensors on several devices; move them together.")
