"""P12: whatever the numbers are, tokens are in range, probabilities finite, and a row that means nothing says so."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check_row
from tiny import FULL, SLIDING, Toy, poison, tiny_config

from dflash2.ops.selector_walk import draw, selector_walk
from dflash2.ops.top_candidates import top_candidates

NAN, INF = float("nan"), float("inf")
V1, V2 = "DFlashDraftModel", "DFlash2DraftModel"


def assert_sane(toy: Toy, prop) -> None:
    v = toy.config.vocab_size
    assert bool(((prop.tokens >= 0) & (prop.tokens < v)).all())
    if prop.candidates is not None:
        assert bool(((prop.candidates >= 0) & (prop.candidates < v)).all())
        ids = prop.candidates.sort(-1).values
        assert bool((ids[..., 1:] != ids[..., :-1]).all())
        assert bool((prop.candidates == prop.tokens[..., None]).any(-1).all())
    if prop.q is not None:
        assert bool(prop.q.isfinite().all())
        assert bool((prop.q >= 0).all())
        torch.testing.assert_close(prop.q.sum(-1), torch.ones(prop.q.shape[:2]), atol=1e-5, rtol=0)


def ready(toy: Toy, lengths: list[int]):
    kv = toy.drafter.new_kv(len(lengths), 64, 4)
    poison(kv)
    seqs = [kv.open() for _ in lengths]
    for i, (seq, n) in enumerate(zip(seqs, lengths, strict=True)):
        toy.append(kv, seq, 0, n, branch=i)
    return kv, seqs


# -- dtypes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [V1, V2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0, 6e4])
def test_every_dtype_with_taps_of_every_size(dtype, scale, architecture):
    """Row B151. The context is normed, so the size of taps matters only where their dtype gives up."""
    toy = Toy(tiny_config(architecture=architecture, layer_types=(SLIDING, FULL)), dtype=dtype)
    kv = toy.drafter.new_kv(2, 64, 4)
    poison(kv)
    seqs = [kv.open(), kv.open()]
    taps = (toy.taps(0, 20).float() * scale).to(dtype)
    toy.drafter.append(kv, [seqs[0]], taps, [0], [20])
    toy.append(kv, seqs[1], 0, 20)
    for temperature in (0.0, 1.0):
        prop = toy.drafter.propose(kv, seqs, [1, 2], [20, 20], temperature=temperature)
        assert_sane(toy, prop)
        assert bool(prop.valid[1])
        stored = kv.export_state(seqs[0])
        overflowed = not bool(stored.keys.isfinite().all() and stored.values.isfinite().all())
        assert bool(prop.valid[0]) == (not overflowed)
    assert overflowed == (dtype == torch.float16 and scale > 1e4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.06), (torch.float16, 0.01)])
def test_sixteen_bits_stay_near_the_oracle(dtype, tolerance):
    toy = Toy(tiny_config(layer_types=(SLIDING, FULL)), dtype=dtype)
    kv, (seq,) = ready(toy, [20])
    _, hidden = toy.hidden(lambda: toy.drafter.propose(kv, [seq], [1], [20]))
    draft = toy.oracle.draft(toy.context(0, 20), 1, 20, 3)
    assert float((hidden[0].double() - draft.hidden).pow(2).mean().sqrt()) < tolerance


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_tap_spoils_its_own_request_only(bad):
    toy = Toy(tiny_config())
    kv, seqs = ready(toy, [9, 9, 9])
    expected = toy.drafter.propose(kv, seqs, [1, 2, 3], [9, 9, 9]).tokens
    taps = toy.taps(9, 10)
    taps[0, 3] = bad
    toy.drafter.append(kv, [seqs[1]], taps, [9], [1])
    prop = toy.drafter.propose(kv, seqs, [1, 2, 3], [9, 10, 9])
    assert prop.valid.tolist() == [True, False, True]
    assert prop.tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert_sane(toy, prop)
    assert_sane(toy, toy.drafter.propose(kv, seqs, [1, 2, 3], [9, 10, 9], temperature=1.0))
    kv.truncate(seqs[1], 9)  # and the bad row leaves nothing behind
    assert toy.drafter.propose(kv, seqs, [1, 2, 3], [9, 9, 9]).tokens.tolist() == expected.tolist()


# -- logits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [V1, V2])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-3])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("where", "bad", "valid"),
    [
        ("all", NAN, False),
        ("all", INF, False),
        ("all", -INF, False),
        ("one", INF, False),
        ("one", NAN, True),  # that token is out of the question, the others are not
        ("one", -INF, True),
        ("all but one", -INF, True),  # a grammar or a padded head may allow a single token
        ("padding", NAN, True),
        ("padding", INF, True),
    ],
)
def test_bad_logits_give_tokens_in_range_and_a_flag(where, bad, valid, softcap, temperature, architecture):
    """Rows B155, B156, B159."""
    toy = Toy(tiny_config(architecture=architecture, final_logit_softcapping=softcap))
    v = toy.config.vocab_size
    columns = {
        "all": slice(0, v),
        "one": [7],
        "all but one": [i for i in range(v) if i != 7],
        "padding": slice(v, v + 3),
    }

    def head(hidden):
        logits = hidden.float() @ toy.head.T
        logits[3:6, columns[where]] = bad  # the three rows of the second request
        return logits

    kv, seqs = ready(toy, [9, 9, 9])
    expected = toy.drafter.propose(kv, seqs, [1, 2, 3], [9, 9, 9])
    toy.drafter.bind_target(toy.embed, head)
    prop = toy.drafter.propose(kv, seqs, [1, 2, 3], [9, 9, 9], temperature=temperature)
    assert_sane(toy, prop)
    assert prop.valid.tolist() == [True, valid, True]
    if temperature == 0:
        assert prop.tokens[[0, 2]].tolist() == expected.tokens[[0, 2]].tolist()
    if where == "all but one":
        assert prop.tokens[1].tolist() == [7] * 3
    if where == "one" and valid:
        assert 7 not in prop.tokens[1].tolist()
        if prop.q is not None and prop.candidates is None:
            assert float(prop.q[1, :, 7].max()) == 0.0


@pytest.mark.parametrize("architecture", [V1, V2])
@pytest.mark.parametrize("temperature", [1e-38, 1e-20, 1e-3, 50.0, 1e20])
def test_extreme_temperatures_keep_q_a_distribution(temperature, architecture):
    toy = Toy(tiny_config(architecture=architecture))
    kv, seqs = ready(toy, [9, 20])
    prop = toy.drafter.propose(kv, seqs, [1, 2], [9, 20], temperature=temperature)
    assert_sane(toy, prop)
    assert prop.valid.all()
    if temperature < 1e-2:
        assert prop.tokens.tolist() == toy.drafter.propose(kv, seqs, [1, 2], [9, 20]).tokens.tolist()


@pytest.mark.parametrize("anchor", [-1, 37, 40, 2**40, -(2**40)])
def test_an_anchor_outside_the_vocabulary_is_flagged(anchor):
    """Row B159: nothing is read out of range, the neighbours draft on."""
    toy = Toy(tiny_config())
    kv, seqs = ready(toy, [9, 9, 9])
    expected = toy.drafter.propose(kv, seqs, [1, 2, 3], [9, 9, 9]).tokens
    prop = toy.drafter.propose(kv, seqs, [1, anchor, 3], [9, 9, 9])
    assert prop.valid.tolist() == [True, False, True]
    assert prop.tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert_sane(toy, prop)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_anchors_of_any_value(data):
    toy = Toy(tiny_config())
    kv, seqs = ready(toy, [5, 9])
    anchors = data.draw(st.lists(st.integers(-(2**62), 2**62) | st.integers(-2, 40), min_size=2, max_size=2))
    prop = toy.drafter.propose(kv, seqs, anchors, [5, 9])
    assert_sane(toy, prop)
    assert prop.valid.tolist() == [0 <= a < 37 for a in anchors]
    for r, (anchor, n) in enumerate(zip(anchors, (5, 9), strict=True)):
        if 0 <= anchor < 37:
            check_row(prop, r, toy.oracle, toy.oracle.draft(toy.context(0, n, r), anchor, n, 3), anchor)


# -- candidates --------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, 1.5, -1.0, 1e-45, -1e-45, 3e38, -3e38]) | st.floats(width=32),
        min_size=1, max_size=40,
    ),
    st.integers(1, 40),
)  # fmt: skip
def test_candidates_are_the_largest_with_ties_to_the_lowest_id(values, count):
    count, values = min(count, len(values)), torch.tensor(values).tolist()  # as fp32 has them
    order = sorted(range(len(values)), key=lambda i: (-(-INF if values[i] != values[i] else values[i] + 0.0), i))
    ids, best = top_candidates(torch.tensor([values]), count)
    assert ids[0].tolist() == order[:count]
    torch.testing.assert_close(
        best[0], torch.tensor([-INF if values[i] != values[i] else values[i] for i in order[:count]])
    )


def test_ties_between_candidates_go_to_the_first():
    ids, books = torch.tensor([3, 1, 4, 0]).expand(1, 3, 4), torch.randn(5, 2)
    walk = selector_walk(torch.zeros(1, 3, 2), torch.tensor([2]), ids, torch.zeros(1, 3, 4), books, books)
    assert walk.index.tolist() == [[0, 0, 0]]
    assert walk.tokens.tolist() == [[3, 3, 3]]
    assert walk.q is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-30, 0.25, 1.0]), min_size=2, max_size=6), st.floats(0, 1, exclude_max=True))
def test_a_draw_never_takes_what_has_no_probability(p, u):
    if not any(p):
        p[0] = 1.0
    index = int(draw(torch.tensor(p), torch.tensor(u, dtype=torch.float64)))
    assert p[index] > 0


def test_q_ignores_everything_but_the_temperature():
    """Row B172: top-p, top-k and penalties have no way in."""
    import inspect

    from dflash2 import DFlash2Drafter

    assert not {"top_p", "top_k", "penalty"} & set(inspect.signature(DFlash2Drafter.propose).parameters)
