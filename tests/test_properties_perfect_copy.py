"""P8: a drafter built by hand to copy what stands P positions back predicts a periodic text without a miss.

Every query looks exactly P positions back (its key is turned by P positions, and sharp), reads the token that the taps
carry there, and the head names it. A tap, a position or a row that is off by one breaks it.
"""

from __future__ import annotations

import math

import pytest
import torch
from oracle import rotate
from tiny import FULL, SLIDING, tiny_config

from dflash2 import DFlash2Drafter

V = 16
HEAD = 16


def copying_drafter(period: int, tap: int, **changes) -> DFlash2Drafter:
    """One layer that copies; the tokens are in tap number ``tap``, the other taps carry noise."""
    config = tiny_config(
        hidden_size=V, vocab_size=V, mask_token_id=V - 1, num_attention_heads=1, num_key_value_heads=1, head_dim=HEAD,
        attention_bias=True, selector_top_k=4, target_layer_ids=(0, 1, 3), rope_parameters={"rope_theta": 100.0},
        **{"num_hidden_layers": 1, "conv_kernel_size": 2, **changes},
    )  # fmt: skip
    drafter = DFlash2Drafter(config).requires_grad_(False)
    for p in drafter.parameters():
        if p.dim() == 2:
            p.zero_()
    eye = torch.eye(V)
    drafter.fc.weight[:, tap * V : (tap + 1) * V] = eye
    layer = drafter.layers[0].self_attn  # later layers add nothing
    layer.k_proj.bias.fill_(1.0)
    # A query at q must match a key at q - period: turned back by the period, their dot product depends on the rest.
    layer.q_proj.bias.copy_(rotate(torch.ones(1, 1, HEAD, dtype=torch.float64), [-period], 100.0)[0, 0])
    layer.q_norm.weight.fill_(60.0)
    layer.v_proj.weight.copy_(eye)
    layer.o_proj.weight.copy_(eye)
    return drafter.bind_target(torch.zeros(V, V), eye * 10)


def taps_of(tokens: list[int], tap: int, first: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(first)
    taps = torch.randn(len(tokens), 3, V, generator=g)
    taps[:, tap] = torch.nn.functional.one_hot(torch.tensor(tokens), V).float()
    return taps.flatten(1)


def text(length: int, period: int) -> list[int]:
    g = torch.Generator().manual_seed(period)
    unit = torch.randint(0, V, (period,), generator=g).tolist()
    return [unit[p % period] for p in range(length)]


@pytest.mark.parametrize("tap", [0, 1, 2])
@pytest.mark.parametrize("architecture", ["DFlash2DraftModel", "DFlashDraftModel"])
@pytest.mark.parametrize(
    ("layers", "is_causal"),
    [((SLIDING,), False), ((SLIDING,), None), ((FULL,), None), ((FULL,), True), ((SLIDING, FULL), None)],
)
@pytest.mark.parametrize("start", [0, 1000])
def test_a_periodic_text_is_drafted_without_a_miss(tap, architecture, layers, is_causal, start):
    """Rows B92, B115, B118, B202: row i drafts position anchor + i, for every length, chunking and wrap of the ring."""
    period, block = 11, 6
    drafter = copying_drafter(
        period, tap, architecture=architecture, layer_types=layers, is_causal=is_causal, block_size=block,
        sliding_window=period + 1,
    )  # fmt: skip
    kv, tokens = drafter.new_kv(1, 512, 4), text(400, period)
    seq, at, accepted, drafted = kv.open(start), 0, 0, 0
    for produced in [period, *(1 + (i * 5) % block for i in range(60))]:
        rows = tokens[at : at + produced]
        drafter.append(kv, [seq], taps_of(rows, tap, at), [start + at], [produced])
        at += produced
        prop = drafter.propose(kv, [seq], [tokens[at]], [start + at], temperature=0.0 if at % 2 else 1e-3)
        truth = tokens[at + 1 : at + block]
        accepted += sum(a == b for a, b in zip(prop.tokens[0].tolist(), truth, strict=True))
        drafted += len(truth)
        assert prop.valid.all()
    assert accepted == drafted == 61 * (block - 1)


@pytest.mark.parametrize("window", [5, 6, 11])
def test_one_position_beyond_the_window_is_out_of_sight(window):
    """Row i of the block sees W-1 back and no further, so a period of W is never copied."""
    period = window
    drafter = copying_drafter(period, 0, layer_types=(SLIDING,), block_size=4, sliding_window=window)
    kv, tokens = drafter.new_kv(1, 512, 4), list(range(V)) * 4
    seq = kv.open()
    drafter.append(kv, [seq], taps_of(tokens[:40], 0, 0), [0], [40])
    hidden = []
    handle = drafter.norm.register_forward_hook(lambda module, args, out: hidden.append(out))
    drafter.propose(kv, [seq], [tokens[40]], [40])
    handle.remove()
    weight = hidden[0][0] / math.sqrt(V)
    for i in range(4):
        assert abs(float(weight[i, tokens[40 + i - period]])) < 0.5
        assert int(weight[i].argmax()) == tokens[40 + i - (period - 1)]  # the nearest that it sees
