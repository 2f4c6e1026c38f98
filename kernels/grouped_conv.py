"""Triton kernel of `dflash2.ops.grouped_conv`: one program for each tile of rows and channels, one rounding."""

import torch
import triton
import triton.language as tl

# 16 sums for each of 128 threads.
_ROWS, _TILE = 4, 512


@triton.jit
def _grouped_conv_kernel(
    x_ptr,
    base_ptr,
    delta_ptr,
    y_ptr,
    rows,
    block_rows,
    hidden,
    group,
    x_row_stride,
    base_tap_stride,
    delta_row_stride,
    delta_tap_stride,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    # 64-bit before multiplying: rows times channels passes 2**31 in a large batch.
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    channel = (tl.program_id(1) * TILE + tl.arange(0, TILE))[None, :]
    inside = (row < rows) & (channel < hidden)
    row_in_block = row % block_rows
    total = tl.zeros([ROWS, TILE], dtype=tl.float32)
    for o in tl.static_range(TAPS):
        # Masked loads, so that a NaN in another block's rows is never touched.
        mask = inside & (row_in_block >= o)
        base = tl.load(base_ptr + o * base_tap_stride + channel, mask=channel < hidden, other=0.0).to(tl.float32)
        delta_at = delta_ptr + row * delta_row_stride + o * delta_tap_stride + channel // group
        delta = tl.load(delta_at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + (row - o) * x_row_stride + channel, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(mask, (base + delta) * x, 0.0)
    tl.store(y_ptr + row * hidden + channel, total.to(y_ptr.dtype.element_ty), mask=inside)


def grouped_conv(x: torch.Tensor, base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Launch the kernel; shapes as in `dflash2.ops.grouped_conv`, checked there. Strided ``delta`` is not copied."""
    hidden, taps, groups = x.shape[-1], base.shape[0], delta.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x_rows = _last_contiguous(x.reshape(-1, hidden))
    base = _last_contiguous(base)
    delta = _last_contiguous(delta.reshape(-1, taps, groups))
    tile = min(_TILE, triton.next_power_of_2(hidden))
    rows = x_rows.shape[0]
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(hidden, tile))
    with torch.cuda.device_of(x):
        _grouped_conv_kernel[grid](
            x_rows,
            base,
            delta,
            y,
            rows,
            x.shape[-2],
            hidden,
            hidden // groups,
            x_rows.stride(0),
            base.stride(0),
            delta.stride(0),
            delta.stride(1),
            TAPS=taps,
            ROWS=_ROWS,
            TILE=tile,
        )
    return y


def _last_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
