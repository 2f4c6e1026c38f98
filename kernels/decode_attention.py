"""Triton kernel of `dflash2.ops.decode_attention`: one program for each row and key head.

It owns that head of the row's cache: it norms and rotates the new key, stores it, and begins the online softmax with it
from registers, so that no other launch has to write first. Decoding for data has thousands of rows: nothing is split.
"""

import torch
import triton
import triton.language as tl

DEFAULTS = {"TILE": 64, "num_warps": 4, "num_stages": 3}
CANDIDATES = [
    {"TILE": tile, "num_warps": warps, "num_stages": stages}
    for tile, warps, stages in (
        (32, 1, 3), (32, 1, 4), (32, 2, 4), (64, 1, 3), (64, 2, 2), (64, 2, 3), (64, 2, 4), (64, 4, 2), (64, 4, 3),
        (64, 4, 4), (128, 4, 2), (128, 4, 3),
    )
]  # fmt: skip


@triton.jit
def _rotated(
    ptr, head_at, norm_ptr, cos, sin, channel, inside, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Heads ``[N, DIM]`` that begin at ``head_at [N, 1]``, normed, rotated and rounded.

    Each channel meets its partner, half a head away, by a second load; ``sin`` has the sign of its half.
    """
    dtype = ptr.dtype.element_ty
    partner = tl.where(channel < HEAD_DIM // 2, channel + HEAD_DIM // 2, channel - HEAD_DIM // 2)
    x = tl.load(ptr + head_at + channel, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(ptr + head_at + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        weight = tl.load(norm_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        partner_weight = tl.load(norm_ptr + partner, mask=inside, other=0.0).to(tl.float32)
        x = (weight * (x * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        y = (partner_weight * (y * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return (x * cos + y * sin).to(dtype)


@triton.jit(do_not_specialize=["tokens"])
def _decode_attention_kernel(
    qkv_ptr, keys_ptr, values_ptr, slots_ptr, lengths_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, out_ptr,
    tokens, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, QUERIES: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    cache_at = (slot * KV_HEADS + head) * tokens * HEAD_DIM
    channel = tl.arange(0, DIM)[None, :]
    inside = channel < HEAD_DIM
    half: tl.constexpr = HEAD_DIM // 2
    cos = tl.load(cos_ptr + row * half + channel % half, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + row * half + channel % half, mask=inside, other=0.0)
    sin = tl.where(channel < half, -sin, sin)

    # Queries past the group are copies of its last: they need no masks of their own and are not stored.
    query = tl.arange(0, QUERIES)[:, None]
    q_head = head * GROUP + tl.minimum(query, GROUP - 1)
    qkv_ptr += row * (KV_HEADS * (GROUP + 2) * HEAD_DIM)
    q = _rotated(qkv_ptr, q_head * HEAD_DIM, q_norm_ptr, cos, sin, channel, inside, eps, HEAD_DIM, NORM)
    k_at = (KV_HEADS * GROUP + head + tl.zeros([1, 1], tl.int32)) * HEAD_DIM
    k = _rotated(qkv_ptr, k_at, k_norm_ptr, cos, sin, channel, inside, eps, HEAD_DIM, NORM)
    v = tl.load(qkv_ptr + k_at + KV_HEADS * HEAD_DIM + channel, mask=inside, other=0.0)
    new_at = cache_at + length.to(tl.int64) * HEAD_DIM + channel
    tl.store(keys_ptr + new_at, k, mask=inside)
    tl.store(values_ptr + new_at, v, mask=inside)

    # In base 2, and from the new token on, which every query sees.
    top = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * SCALE
    total = tl.full([QUERIES], 1.0, tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32) + v.to(tl.float32)
    for start in range(0, length, TILE):
        position = start + tl.arange(0, TILE)
        there = position < length
        at = cache_at + position[:, None] * HEAD_DIM + channel
        keys = tl.load(keys_ptr + at, mask=there[:, None] & inside, other=0.0)
        values = tl.load(values_ptr + at, mask=there[:, None] & inside, other=0.0)
        score = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * SCALE
        score = tl.where(there[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        decay = tl.exp2(top - new_top)
        acc = tl.dot(weight.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
        total = total * decay + tl.sum(weight, 1)
        top = new_top
    out_at = out_ptr + row * (KV_HEADS * GROUP * HEAD_DIM) + q_head * HEAD_DIM + channel
    tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=(query < GROUP) & inside)


def decode_attention(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    settings: dict[str, int],
) -> torch.Tensor:
    """Launch; shapes as in `dflash2.ops.decode_attention`, checked there."""
    rows, width = qkv.shape
    _, kv_heads, tokens, head_dim = keys.shape
    group = width // head_dim // kv_heads - 2
    out = torch.empty(rows, kv_heads * group * head_dim, dtype=qkv.dtype, device=qkv.device)
    if rows == 0:
        return out
    q_norm, k_norm, eps = norm or (qkv, qkv, 0.0)
    # Products in exact fp32 run on the scalar units, whose operands all sit in registers.
    exact = qkv.dtype == torch.float32
    options = settings | ({"TILE": 16, "num_warps": 4} if exact else {})
    with torch.cuda.device_of(qkv):
        _decode_attention_kernel[(rows, kv_heads)](
            qkv.contiguous(), keys, values, slots.contiguous(), lengths.contiguous(), cos.contiguous(),
            sin.contiguous(), q_norm, k_norm, out, tokens, eps,
            KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, NORM=norm is not None,
            QUERIES=max(16, triton.next_power_of_2(group)), DIM=max(16, triton.next_power_of_2(head_dim)),
            SCALE=head_dim**-0.5 * 1.4426950408889634,  # log2(e): the hardware has powers of two
            PRECISION="ieee" if exact else "tf32",  # the latter says nothing about 16-bit operands
            **options,
        )  # fmt: skip
    return out
