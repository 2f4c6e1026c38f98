"""Byte counts against the method's own table (SPEC 6.1, 6.2) and against the tensors of real modules."""

import pytest

from dflash2 import DFlash2Drafter
from dflash2.bench import traffic
from dflash2.bench.shapes import SHAPES
from dflash2.int8_linear import QUANTISED

# parameters; then of SPEC 6.2, one sequence at a full window, GB: layers, fc, head, total
TABLE = {
    "27b": (1_924_404_480, 3.330, 0.262, 2.543, 6.29),
    "30b": (2_772_159_744, 4.891, 0.443, 2.690, 8.22),
    "flash": (1_171_080_448, 2.014, 0.168, 1.269, 3.58),
}
GATHERED = ("predecessor_codebook", "successor_codebook")


def whole(drafter) -> dict[str, int]:
    """Elements of every weight that a pass reads whole."""
    return {n: t.numel() for n, t in drafter.named_parameters() if not n.endswith(GATHERED)}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_the_published_ones(name):
    drafter = DFlash2Drafter(SHAPES[name], device="meta")
    assert sum(t.numel() for t in drafter.parameters()) == TABLE[name][0]


@pytest.mark.parametrize("name", SHAPES)
def test_totals_are_those_of_the_method(name):
    c = SHAPES[name]
    _, layers, fc, head, total = TABLE[name]
    assert c.num_hidden_layers * traffic._layer(c, False) == pytest.approx(layers * 1e9, abs=5e5)
    assert 2 * len(c.target_layer_ids) * c.hidden_size**2 == pytest.approx(fc * 1e9, abs=5e5)
    assert traffic.head_bytes(c.vocab_size, c.hidden_size, 0, 16, int8=False) == pytest.approx(head * 1e9, abs=5e5)
    logits = 4 * c.max_draft_tokens * c.vocab_size  # written and read where top-k is not fused; not counted here
    moved = traffic.round_bytes(c, 1, 4096, c.block_size, c.block_size, int8_head=False)
    assert moved + logits == pytest.approx(total * 1e9, abs=5e6)


def test_eight_sequences():
    """The total for n = 8 at the 27B drafter: only rows grow."""
    moved = traffic.round_bytes(SHAPES["27b"], 8, 4096, 8, 8, int8_head=False)
    assert moved + 8 * 4 * 7 * 248320 == pytest.approx(6.63e9, abs=1e7)


def test_the_int8_head_case_is_about_five_gigabytes():
    c = SHAPES["27b"]
    moved = traffic.round_bytes(c, 1, 4096, 8, 8, int8_head=True)
    assert moved == pytest.approx(5.01e9, abs=1e7)
    smaller = traffic.round_bytes(c, 1, 4096, 8, 8, int8_head=True, int8_linears=True)
    assert 1.5 < moved / smaller < 2


@pytest.mark.parametrize("int8", [False, True])
def test_weights_are_those_of_the_modules(int8):
    """Append and propose of no sequence read exactly the tensors that the drafter has, and k and v twice."""
    c = SHAPES["27b"]
    expected = 0
    for name, elements in whole(DFlash2Drafter(c, device="meta")).items():
        part = name.removesuffix(".weight").rpartition(".")[2]
        reads = 2 if part in ("k_proj", "v_proj", "k_norm") else 1
        if int8 and part in QUANTISED:
            inner = {"fc": 5 * c.hidden_size, "o_proj": 4096, "down_proj": c.intermediate_size}.get(part, c.hidden_size)
            expected += reads * (elements + 4 * elements // inner)
        else:
            expected += reads * 2 * elements
    moved = traffic.append_bytes(c, 0, 0, int8=int8)
    moved += traffic.propose_bytes(c, 0, 4096, int8_head=True, int8_linears=int8)
    head = traffic.head_bytes(c.vocab_size, c.hidden_size, 0, 16, int8=True)
    assert moved - head - 2 * c.hidden_size == expected  # one embedded mask row


def test_context_stops_growing_at_the_window():
    c = SHAPES["27b"]
    assert traffic.context_bytes(c, 100) == 100 * 20_480
    assert traffic.context_bytes(c, 2047) == traffic.context_bytes(c, 262_144) == 2047 * 20_480


def test_head_counts_rows_once():
    one, many = (traffic.head_bytes(248_320, 5120, n, 16, int8=True) for n in (1, 56))
    assert many - one == 55 * (2 * 5120 + 16 * 12)
    assert one == pytest.approx(1.272e9, abs=1e6)
