"""The drafter's own linears with int8 weights: half the bytes of a propose. The target verifies, so only acceptance
is at stake.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dflash2.errors import ConfigError
from dflash2.ops.backend import choose_backend
from dflash2.ops.block_linear import block_linear
from dflash2.ops.int8_linear import int8_linear
from dflash2.ops.int8_rows import quantize_rows

__all__ = ["Int8Linear", "Int8Weight", "has_int8_linears", "int8_saving", "quantize_linears"]

#: What is read whole in every pass. The codebooks are only gathered from, and the selector's projection is small.
QUANTISED = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "kernel_projection", "fc")
)
SCALE_BYTES = 4
CHECK_ROWS = 16
#: Rounding to rows of int8 adds crest / (127 sqrt(12)) of a layer's output, crest = largest weight / their rms. Normal
#: rows have a crest of 4 and lose 0.01; this limit is a crest of 44: a few outliers, and nothing left of the rest.
MAX_RELATIVE_ERROR = 0.1


class Int8Weight(nn.Module):
    """An int8 weight with one scale for each output row: what a linear layer and an output head share.

    Attributes:
        weight: int8 ``[O, K]``.
        scale: fp32 ``[O]``, through casts of the model around it too.
        bias: ``[O]`` or None.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.weight: Tensor
        self.scale: Tensor
        self.bias: Tensor | None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Weight:
        """A cast of the model around it moves the scales and leaves them in fp32."""
        scale = self.scale
        super()._apply(fn, recurse)
        self.scale = scale.to(self.scale.device)
        return self


class Int8Linear(Int8Weight):
    """A linear layer with a weight-only int8 weight; activations keep their dtype, sums are in fp32 (`int8_linear`).

    The kernels of block and context rows read the same weight, and take rows as 16-bit integers (`Int16Rows`).
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Int8Linear:
        """Quantise a linear layer, which keeps its own weight.

        Raises:
            ConfigError: the weight holds NaN or infinity.
        """
        weight, scale = quantize_rows(linear.weight)
        if not bool(scale.isfinite().all()):
            raise ConfigError("the weight holds NaN or infinity: the file it came from is damaged. Copy it again.")
        return cls(weight, scale, None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K]`` -> ``[..., O]`` in x's dtype."""
        return int8_linear(x, self.weight, self.scale, self.bias)

    def extra_repr(self) -> str:
        """As of `nn.Linear`."""
        out, features = self.weight.shape
        return f"in_features={features}, out_features={out}, bias={self.bias is not None}"


def has_int8_linears(network: nn.Module) -> bool:
    """Whether `quantize_linears` went over a drafter."""
    return any(isinstance(m, Int8Linear) for m in network.modules())


def _large_linears(network: nn.Module) -> list[tuple[str, nn.Module, str, nn.Linear]]:
    """Name, parent, name in the parent, layer: those that `quantize_linears` replaces."""
    return [
        (f"{name}.{child}".lstrip("."), parent, child, linear)
        for name, parent in network.named_modules()
        for child, linear in parent.named_children()
        if child in QUANTISED and isinstance(linear, nn.Linear)
    ]


def int8_saving(network: nn.Module) -> int:
    """Bytes by which `quantize_linears` would make a drafter smaller; 0 afterwards."""
    weights = [linear.weight for _, _, _, linear in _large_linears(network)]
    return sum(w.nbytes - w.numel() - SCALE_BYTES * w.shape[0] for w in weights)


def quantize_linears(network: nn.Module) -> None:
    """Replace the large linears of a drafter by int8 ones, all or none. Each is held against the one it replaces.

    Args:
        network: a `DraftNetwork`. Norms, convolution taps, codebooks and the selector's projection stay as they are,
            and so do linears that are int8 already.

    Raises:
        ConfigError: naming the layer whose weight is not finite, or whose outputs int8 changes too much.
    """
    found, made = _large_linears(network), []
    for name, _, _, linear in found:
        try:
            made.append(Int8Linear.from_linear(linear))
            _check(linear, made[-1])
        except ConfigError as e:
            raise ConfigError(f"{name} cannot be int8: {e}") from None
    for (_, parent, child, _), new in zip(found, made, strict=True):
        setattr(parent, child, new)


@torch.no_grad()
def _check(linear: nn.Linear, new: Int8Linear) -> None:
    """Compare outputs on random signs, as `Int8Linear` gives them on this device.

    A weight is off by at most half a step, so its K errors add up, under random signs, to more than 8 times
    sqrt(K) / 2 steps with a probability below 3e-14 (Hoeffding). Beyond that the product itself is wrong.
    """
    rows, k = CHECK_ROWS, linear.weight.shape[1]
    signs = torch.randint(0, 2, (rows, k), generator=torch.Generator().manual_seed(0)) * 2 - 1
    x = signs.to(linear.weight)
    expected = linear(x).float()
    errors = [(new(x).float() - expected).abs()]
    if choose_backend("auto", x, dots=True) == "triton":  # what `propose` multiplies with; signs are exact in it
        product = block_linear(x, [new.weight], [new.scale]).float().sum(0)
        errors.append((product + (0 if new.bias is None else new.bias.float()) - expected).abs())
    error = torch.stack(errors).amax(0)
    rounding = 4 * torch.finfo(x.dtype).eps * expected.abs().amax()
    if not bool((error <= 4 * k**0.5 * new.scale + rounding).all()):  # so that a NaN fails
        raise ConfigError(
            f"its product differs from the 16-bit one by up to {float(error.amax()):.3g}, far beyond the rounding of "
            "the weights. The kernel is at fault on this device, not the checkpoint: stay with 16 bits and report it."
        )
    signal = expected if linear.bias is None else expected - linear.bias.float()
    relative = float(error.norm() / signal.norm().clamp_min(torch.finfo(torch.float32).tiny))
    if relative > MAX_RELATIVE_ERROR:
        raise ConfigError(
            f"its outputs would change by {relative:.0%}, the limit is {MAX_RELATIVE_ERROR:.0%}. A few weights dwarf "
            "the others of their rows, and one scale per row cannot hold both: keep this drafter in 16 bits."
        )
