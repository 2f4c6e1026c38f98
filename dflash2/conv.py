"""The token-dependent grouped convolution around every sublayer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dflash2.ops.grouped_conv import grouped_conv

__all__ = ["GroupedConv"]


class GroupedConv(nn.Module):
    """K taps per channel, plus a correction per group of G channels that each row computes from itself.

    One projection gives the coefficients of both sides: the sublayer's input and its output. It starts as the identity.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        group_size: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.shape = (2, kernel_size, hidden_size // group_size)
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, hidden_size, device=device, dtype=dtype))
        out = 2 * kernel_size * (hidden_size // group_size)
        self.kernel_projection = nn.Linear(hidden_size, out, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """The identity: tap 0 is 1, everything else 0."""
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x [..., n, H]`` -> the convolved input, and the coefficients ``[..., n, K, H/G]`` for `after`."""
        delta = self.kernel_projection(x).unflatten(-1, self.shape)
        return grouped_conv(x, self.base_kernel[0], delta[..., 0, :, :]), delta[..., 1, :, :]

    def after(self, x: Tensor, delta: Tensor) -> Tensor:
        """Convolve the sublayer's output with coefficients computed from its input."""
        return grouped_conv(x, self.base_kernel[1], delta)
