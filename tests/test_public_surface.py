"""The public surface as somebody outside meets it: names, forms of arguments, results, errors and surroundings."""

import copy
import inspect
import io
import pickle
import threading

import numpy as np
import pytest
import torch
from tiny import FULL, SLIDING, Toy, assert_same, snapshot, tiny_config

import dflash2
from dflash2 import CapacityError, CheckpointError, ConfigError, DFlash2Config, DFlash2Drafter, PositionError

ROWS = 10
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def toy():
    return Toy(tiny_config())


@pytest.fixture
def kv(toy):
    return toy.drafter.new_kv(max_sequences=4, max_tokens=64, page_size=4)


@pytest.fixture
def seq(toy, kv):
    handle = kv.open()
    toy.append(kv, handle, 0, ROWS)
    return handle


def refused(kv, kind, match, call):
    """The call raises, and nothing has changed."""
    before = snapshot(kv)
    with pytest.raises(kind, match=match):
        call()
    assert_same(before, snapshot(kv))


def equal(one, other):
    return all(
        (a is None and b is None) or torch.equal(a, b)
        for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


# -- names and signatures -----------------------------------------------------------------------------------------


def test_signatures_are_those_of_the_design():
    def names(call):
        return [p for p in inspect.signature(call).parameters if p != "self"]

    drafter, kv = DFlash2Drafter, dflash2.WindowKV
    assert names(drafter.from_pretrained) == ["path", "dtype", "device"]
    assert names(drafter.bind_target) == ["embed_weight", "lm_head"]
    assert names(drafter.new_kv)[:4] == ["max_sequences", "max_tokens", "page_size", "prefix_store_bytes"]
    assert names(drafter.append) == [
        "kv", "seqs", "taps", "start_positions", "lengths", "valid_lengths", "token_ids"
    ]  # fmt: skip
    proposing = ["kv", "seqs", "anchor_ids", "start_positions", "num_draft_tokens", "temperature"]
    assert names(drafter.propose)[:6] == proposing
    assert names(kv.open) == ["start_position", "token_ids"]
    assert (names(kv.truncate), names(kv.skip_to)) == (["seq", "position"], ["seq", "position"])
    assert (names(kv.reset), names(kv.reserve)) == (["seq", "start_position"], ["seqs", "up_to"])
    verifying = ["proposal", "target_logits", "temperature", "top_p", "top_k", "generator"]
    assert names(dflash2.verify) == verifying
    assert names(dflash2.generate) == [
        "target", "drafter", "input_ids", "attention_mask", "max_new_tokens", "temperature", "top_p", "top_k",
        "num_draft_tokens", "eos_token_id", "seed", "streamer",
    ]  # fmt: skip
    assert names(dflash2.Int8LMHead.from_linear) == ["linear", "free_source"]
    new_kv = inspect.signature(drafter.new_kv).parameters
    assert [new_kv[n].default for n in names(drafter.new_kv)[:4]] == [64, 262144, 16, 0]


def test_every_error_is_a_value_error_of_one_module():
    for error in (ConfigError, PositionError, CapacityError, CheckpointError):
        assert issubclass(error, ValueError)
        assert error.__module__ == "dflash2.errors"
    assert set(dir(dflash2)) >= set(dflash2.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        dflash2.nothing  # noqa: B018


# -- propose ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 0, 1, 2, 3, np.int64(2)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("requests", [0, 1, 2])
def test_fields_of_a_proposal(toy, kv, seq, k, temperature, requests):
    c = toy.config
    prop = toy.drafter.propose(kv, [seq] * requests, [3] * requests, [ROWS] * requests, k, temperature)
    shape = (requests, c.block_size - 1 if k is None else k)
    assert (prop.tokens.shape, prop.tokens.dtype) == (shape, torch.int64)
    assert (prop.candidates.shape, prop.candidates.dtype) == ((*shape, c.selector_top_k), torch.int64)
    assert (prop.valid.shape, prop.valid.dtype, bool(prop.valid.all())) == ((requests,), torch.bool, True)
    if temperature:
        assert (prop.q.shape, prop.q.dtype) == ((*shape, c.selector_top_k), torch.float32)
        torch.testing.assert_close(prop.q.sum(-1), torch.ones(shape))
    else:
        assert prop.q is None
    out = dflash2.verify(prop, torch.randn(requests, shape[1] + 1, c.vocab_size), temperature=temperature)
    assert (out.accepted.shape, out.accepted.dtype) == ((requests,), torch.int64)
    assert (out.next_token.shape, out.next_token.dtype) == ((requests,), torch.int64)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fields_of_a_proposal_without_a_selector(temperature):
    v1 = Toy(tiny_config(architecture="DFlashDraftModel"))
    kv = v1.drafter.new_kv(2, 64)
    seq = kv.open()
    v1.append(kv, seq, 0, 5)
    for k in (0, 3):
        prop = v1.drafter.propose(kv, [seq], [3], [5], k, temperature)
        assert prop.tokens.shape == (1, k)
        assert prop.candidates is None
        assert (prop.q is None) if not temperature else prop.q.shape == (1, k, v1.config.vocab_size)


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_integers_come_as_lists_arrays_and_tensors(toy, kv, seq, form):
    expected = toy.drafter.propose(kv, [seq], [3], [ROWS])
    assert equal(toy.drafter.propose(kv, form([seq]), form([3]), form([ROWS])), expected)
    args = {
        "start_positions": form([ROWS]),
        "lengths": form([2]),
        "valid_lengths": form([1]),
        "token_ids": form([1, 2]),
    }
    toy.drafter.append(kv, form([seq]), toy.taps(ROWS, ROWS + 2), **args)
    kv.reserve(form([seq]), up_to=form([20]))
    assert kv.span(seq) == (0, ROWS + 1)


@pytest.mark.parametrize(
    "temperature", [1, 1.0, np.float32(1), [1.0], (1,), np.ones(1), torch.tensor(1.0), torch.ones(1)]
)
def test_temperature_in_every_form(toy, kv, seq, temperature):
    def seeded():
        return torch.Generator().manual_seed(1)

    expected = toy.drafter.propose(kv, [seq], [3], [ROWS], temperature=1.0, generator=seeded())
    assert equal(toy.drafter.propose(kv, [seq], [3], [ROWS], temperature=temperature, generator=seeded()), expected)
    logits = torch.randn(1, 4, 37, generator=seeded())
    one, other = (
        dflash2.verify(expected, logits, temperature=t, top_p=p, top_k=k, generator=seeded())
        for t, p, k in ((1.0, 0.9, 5), (temperature, [0.9], [5]))
    )
    assert equal(one, other)


@pytest.mark.parametrize("temperature", [NAN, INF, -INF, 1e40, None, "1", [1.0, 1.0], [[1.0]], torch.ones(2), [NAN]])
def test_a_temperature_that_is_none(toy, kv, seq, temperature):
    refused(kv, ValueError, "temperature", lambda: toy.drafter.propose(kv, [seq], [3], [ROWS], None, temperature))
    prop = toy.drafter.propose(kv, [seq], [3], [ROWS])
    with pytest.raises(ValueError, match="temperature"):
        dflash2.verify(prop, torch.randn(1, 4, 37), temperature=temperature)


def test_a_negative_temperature_is_greedy(toy, kv, seq):
    expected = toy.drafter.propose(kv, [seq], [3], [ROWS])
    for temperature in (-1.0, [-1.0], torch.tensor([-0.5]), torch.tensor(0.0)):
        assert equal(toy.drafter.propose(kv, [seq], [3], [ROWS], temperature=temperature), expected)


def test_greedy_rows_stay_greedy_among_sampled_ones(toy, kv, seq):
    greedy = toy.drafter.propose(kv, [seq], [3], [ROWS])
    for _ in range(5):
        mixed = toy.drafter.propose(kv, [seq, seq], [3, 3], [ROWS, ROWS], temperature=[0.0, 5.0])
        assert torch.equal(mixed.tokens[0], greedy.tokens[0])
        assert set(mixed.q[0].flatten().tolist()) == {0.0, 1.0}


def test_a_generator_moves_on_and_repeats(toy, kv, seq):
    g = torch.Generator().manual_seed(3)
    calls = [toy.drafter.propose(kv, [seq] * 40, [3] * 40, [ROWS] * 40, None, 3.0, g).tokens for _ in range(2)]
    assert not torch.equal(*calls)
    g.manual_seed(3)
    assert torch.equal(toy.drafter.propose(kv, [seq] * 40, [3] * 40, [ROWS] * 40, None, 3.0, g).tokens, calls[0])


@pytest.mark.parametrize("anchor", [-1, 37, 2**40, -(2**40)])
def test_an_anchor_outside_the_vocabulary_is_flagged(toy, kv, seq, anchor):
    prop = toy.drafter.propose(kv, [seq, seq], [anchor, 3], [ROWS, ROWS])
    assert prop.valid.tolist() == [False, True]
    assert bool(((prop.tokens >= 0) & (prop.tokens < 37)).all())
    out = dflash2.verify(prop, torch.randn(2, 4, 37))
    assert int(out.accepted[0]) == 0


@pytest.mark.parametrize("anchors", [[1.7], [True], ["a"], None, [2**70], torch.tensor([3.0]), 3, [[3]], [3, 3]])
def test_anchors_that_are_none(toy, kv, seq, anchors):
    refused(kv, ValueError, "anchor_ids", lambda: toy.drafter.propose(kv, [seq], anchors, [ROWS]))


@pytest.mark.parametrize("k", [-1, 4, 1.5, 2.0, "2", True])
def test_a_number_of_drafts_that_does_not_fit(toy, kv, seq, k):
    refused(kv, ConfigError, "num_draft_tokens", lambda: toy.drafter.propose(kv, [seq], [3], [ROWS], k))


def test_without_context_or_target(toy, kv):
    seq = kv.open(7)
    prop = toy.drafter.propose(kv, [seq], [3], [7])
    assert prop.valid.tolist() == [False]
    loose = DFlash2Drafter(tiny_config())
    own = loose.new_kv(1, 64)
    with pytest.raises(ConfigError, match="bind_target"):
        loose.propose(own, [own.open()], [3], [0])


# -- positions and state ------------------------------------------------------------------------------------------

ODD_POSITIONS = [-1, 1.5, True, None, "3", NAN, 2**63, 2**62, torch.tensor([1, 2])]


@pytest.mark.parametrize("position", ODD_POSITIONS, ids=str)
def test_positions_that_are_none(toy, kv, seq, position):
    taps = toy.taps(ROWS, ROWS + 2)
    refused(kv, PositionError, "position", lambda: kv.open(position))
    refused(kv, PositionError, "position", lambda: kv.truncate(seq, position))
    refused(kv, PositionError, "position", lambda: kv.skip_to(seq, position))
    refused(kv, PositionError, "position", lambda: kv.reset(seq, position))
    refused(kv, PositionError, "position", lambda: kv.reserve([seq], up_to=[position]))
    refused(kv, PositionError, "start_positions", lambda: toy.drafter.append(kv, [seq], taps, [position], [2]))
    refused(kv, PositionError, "start_positions", lambda: toy.drafter.propose(kv, [seq], [3], [position]))
    refused(kv, PositionError, "lengths", lambda: toy.drafter.append(kv, [seq], taps, [ROWS], [position]))
    refused(kv, PositionError, "valid_lengths", lambda: toy.drafter.append(kv, [seq], taps, [ROWS], [2], [position]))


def test_an_error_names_sequence_expected_and_given(toy, kv, seq):
    other = kv.open(5)
    for start in (0, 4, 6, 5000):
        message = f"sequence {other} is at position 5, start position {start} was given"
        both = torch.cat((toy.taps(ROWS, ROWS + 1), toy.taps(start, start + 1)))
        refused(
            kv,
            PositionError,
            message,
            lambda x=both, s=start: toy.drafter.append(kv, [seq, other], x, [ROWS, s], [1, 1]),
        )
        refused(kv, PositionError, message, lambda s=start: toy.drafter.propose(kv, [seq, other], [1, 1], [ROWS, s]))


@pytest.mark.parametrize("argument", ["seqs", "start_positions", "lengths", "valid_lengths"])
@pytest.mark.parametrize("wrong", [0, [], [0, 0]], ids=str)
def test_one_entry_for_each_sequence(toy, kv, seq, argument, wrong):
    args = {
        "seqs": [seq],
        "taps": toy.taps(ROWS, ROWS + 2),
        "start_positions": [ROWS],
        "lengths": [2],
        "valid_lengths": [2],
    }
    refused(kv, PositionError, "one|each", lambda: toy.drafter.append(kv, **args | {argument: wrong}))


def test_taps_that_do_not_fit(toy, kv, seq):
    taps = toy.taps(ROWS, ROWS + 2)
    bad = [
        taps[:, :-1],
        taps[0],
        taps[None],
        taps[:1],
        torch.cat((taps, taps)),
        taps.long(),
        taps.to("meta"),
        taps.cfloat(),
    ]
    for wrong in bad:
        refused(kv, ValueError, "taps", lambda x=wrong: toy.drafter.append(kv, [seq], x, [ROWS], [2]))
    for ids in ([1], [1, 2, 3], [1.5, 2.5], [None, 1], ["a", "b"], [2**70, 1], torch.tensor([1.0, 2.0])):
        refused(kv, ValueError, "token_ids", lambda x=ids: toy.drafter.append(kv, [seq], taps, [ROWS], [2], None, x))


def test_any_floating_taps_of_any_layout(toy, kv, seq):
    taps = toy.taps(ROWS, ROWS + 2)
    expected = None
    for given in (taps, taps.double(), taps.t().contiguous().t(), torch.nn.Parameter(taps), taps.repeat(1, 2)[:, :32]):
        toy.drafter.append(kv, [seq], given, [ROWS], [2])
        prop = toy.drafter.propose(kv, [seq], [3], [ROWS + 2])
        assert not kv.keys.requires_grad
        assert expected is None or equal(prop, expected)
        expected = prop
        kv.truncate(seq, ROWS)


def test_nothing_to_append(toy, kv, seq):
    before = snapshot(kv)
    toy.drafter.append(kv, [], toy.taps(0, 0), [], [])
    toy.drafter.append(kv, [seq], toy.taps(0, 0), [ROWS], [0])
    toy.drafter.append(kv, [seq], toy.taps(0, 3), [ROWS], [3], valid_lengths=[0])
    assert_same(before, snapshot(kv))


def test_handles(toy, kv, seq):
    closed = kv.open()
    kv.close(closed)
    taps = toy.taps(0, 1)
    for handle in (closed, 99, -1, None, "a", [0], torch.tensor(0)):
        for call in (kv.span, kv.close, kv.export_state, lambda q: kv.truncate(q, 0), lambda q: kv.skip_to(q, 1)):
            refused(kv, PositionError, "not open", lambda c=call, q=handle: c(q))
        refused(kv, PositionError, "not open", lambda q=handle: kv.reset(q, 0))
        refused(kv, PositionError, "not open", lambda q=handle: toy.drafter.append(kv, [q], taps, [0], [1]))
        refused(kv, PositionError, "not open", lambda q=handle: toy.drafter.propose(kv, [q], [1], [0]))
    refused(
        kv, PositionError, "twice", lambda: toy.drafter.append(kv, [seq, seq], toy.taps(0, 2), [ROWS, ROWS], [1, 1])
    )
    assert kv.open() != closed


def test_spans(toy, kv):
    seq = kv.open(5)
    assert kv.span(seq) == (5, 5)
    toy.append(kv, seq, 5, 9)
    assert kv.span(seq) == (5, 9)
    kv.skip_to(seq, 12)
    assert kv.span(seq) == (5, 12)
    toy.append(kv, seq, 12, 14)
    kv.truncate(seq, 8)
    assert kv.span(seq) == (5, 8)
    kv.truncate(seq, 2)
    assert (kv.span(seq), kv.pages_in_use) == ((2, 2), 0)
    kv.reset(seq, 100)
    assert kv.span(seq) == (100, 100)
    toy.append(kv, seq, 100, 101)
    kv.skip_to(seq, 10_000)
    assert (kv.span(seq), kv.pages_in_use) == ((10_000, 10_000), 0)


@pytest.mark.parametrize("start", [2**31 - 3, 2**53, 2**61])
def test_positions_far_out(toy, kv, start):
    seq = kv.open(start)
    toy.drafter.append(kv, [seq], toy.taps(0, 6), [start], [6])
    assert kv.span(seq) == (start, start + 6)
    assert toy.drafter.propose(kv, [seq], [3], [start + 6]).valid.tolist() == [True]


def test_the_last_position_is_not_passed(toy, kv):
    seq = kv.open(2**62 - 3)
    refused(kv, PositionError, "2\\^62", lambda: toy.drafter.append(kv, [seq], toy.taps(0, 5), [2**62 - 3], [5]))
    toy.drafter.append(kv, [seq], toy.taps(0, 2), [2**62 - 3], [2])
    assert toy.drafter.propose(kv, [seq], [3], [2**62 - 1]).valid.tolist() == [True]


# -- memory -------------------------------------------------------------------------------------------------------


def test_130_pages_at_any_length():
    wide = DFlash2Drafter(tiny_config(sliding_window=2048))
    kv = wide.new_kv()
    assert (kv.pages_needed(262144), kv.pages_needed(10**9), kv.num_pages) == (130, 130, 64 * 130)
    assert (kv.pages_needed(0), kv.pages_needed(1), kv.pages_needed(17)) == (0, 1, 2)
    assert wide.new_kv(max_tokens=10**9).nbytes == kv.nbytes
    seq = kv.open(20_000)
    for at in range(20_000, 30_000, 1000):
        wide.append(kv, [seq], torch.zeros(1000, 32), [at], [1000])
        assert kv.pages_in_use <= 130
    assert kv.span(seq)[1] == 30_000
    assert 30_000 - kv.span(seq)[0] >= 2047
    kv.close(seq)
    assert kv.pages_in_use == 0


@pytest.mark.parametrize("name", ["max_sequences", "max_tokens", "page_size", "num_pages", "prefix_store_bytes"])
@pytest.mark.parametrize("value", [-1, 1.5, "a", [1], 16.0])
def test_sizes_that_are_none(toy, name, value):
    with pytest.raises(CapacityError, match=name):
        toy.drafter.new_kv(**{name: value})


def test_more_memory_than_there_is(toy):
    with pytest.raises(CapacityError, match=r"bytes.*max_sequences"):
        toy.drafter.new_kv(max_sequences=10**10)
    full = Toy(tiny_config(layer_types=(FULL, SLIDING)))
    with pytest.raises(CapacityError, match="bytes"):
        full.drafter.new_kv(max_tokens=2**40)
    kv = full.drafter.new_kv(2, 20, 4)
    seq = kv.open()
    full.append(kv, seq, 0, 20)
    assert kv.pages_needed(20) == 5
    refused(kv, CapacityError, "max_tokens", lambda: full.append(kv, seq, 20, 21))


def test_a_pool_that_is_too_small(toy):
    kv = toy.drafter.new_kv(8, 64, 4, num_pages=4)
    seqs = [kv.open() for _ in range(8)]
    refused(kv, CapacityError, "sequences are open", kv.open)
    taps = torch.cat([toy.taps(0, 1)] * 8)
    refused(kv, CapacityError, "8 pages", lambda: toy.drafter.append(kv, seqs, taps, [0] * 8, [1] * 8))
    refused(kv, CapacityError, "pages", lambda: kv.reserve(seqs[:3], up_to=[5, 5, 5]))
    toy.drafter.append(kv, seqs[:4], taps[:4], [0] * 4, [1] * 4)
    refused(kv, CapacityError, "0 of 4 are free", lambda: toy.append(kv, seqs[4], 0, 1))
    kv.close(seqs[0])
    toy.append(kv, seqs[4], 0, 1)


# -- moving state -------------------------------------------------------------------------------------------------


def through_torch(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # with weights_only, which is its default


@pytest.mark.parametrize("way", [lambda s: pickle.loads(pickle.dumps(s)), through_torch, copy.deepcopy])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_exported_rows_draft_the_same(toy, kv, seq, way, page_size):
    other = toy.drafter.new_kv(2, 64, page_size)
    moved = other.import_state(way(kv.export_state(seq)))
    assert other.span(moved)[1] == ROWS
    expected = toy.drafter.propose(kv, [seq], [3], [ROWS])
    assert equal(toy.drafter.propose(other, [moved], [3], [ROWS]), expected)


def test_states_that_are_none(toy, kv, seq):
    state = kv.export_state(seq)
    for changes in (
        {"positions": state.positions.float()},
        {"positions": state.positions.flip(0)},
        {"next_position": 3},
        {"keys": state.keys[:, :, :1]},
        {"tokens": [1, 2]},
    ):
        bad = copy.copy(state)
        vars(bad).update(changes)
        refused(kv, ConfigError, "imported", lambda s=bad: kv.import_state(s))
    stranger = Toy(tiny_config(num_key_value_heads=4)).drafter.new_kv(1, 64)
    refused(stranger, ConfigError, "this drafter expects", lambda: stranger.import_state(state))


@pytest.mark.parametrize(
    "changes", [{"num_key_value_heads": 4}, {"sliding_window": 4}, {"head_dim": 16}, {"layer_types": (FULL, SLIDING)}]
)
def test_another_drafters_kv(toy, kv, seq, changes):
    other = Toy(tiny_config(**changes))
    refused(kv, ConfigError, "KV", lambda: other.append(kv, seq, ROWS, ROWS + 1))
    refused(kv, ConfigError, "KV", lambda: other.drafter.propose(kv, [seq], [3], [ROWS]))


def test_a_drafter_that_changed_its_dtype_needs_another_kv():
    moving = Toy(tiny_config())
    kv = moving.drafter.new_kv(1, 64)
    seq = kv.open()
    moving.append(kv, seq, 0, 5)
    moving.drafter.half()
    refused(kv, ConfigError, "float32 rows.*float16", lambda: moving.drafter.propose(kv, [seq], [3], [5]))
    refused(kv, ConfigError, "new_kv", lambda: moving.append(kv, seq, 5, 6))
    fresh = moving.drafter.new_kv(1, 64)
    seq = fresh.open()
    moving.append(fresh, seq, 0, 5)
    assert moving.drafter.propose(fresh, [seq], [3], [5]).valid.tolist() == [True]


def test_copies_share_the_target_and_pickles_leave_it_out(toy, kv, seq):
    twin = copy.deepcopy(toy.drafter)
    assert twin._embedding[0] is toy.embed
    assert twin.fc.weight.data_ptr() != toy.drafter.fc.weight.data_ptr()
    expected = toy.drafter.propose(kv, [seq], [3], [ROWS])
    assert equal(twin.propose(kv, [seq], [3], [ROWS]), expected)
    twin.bind_target(toy.embed, toy.embed)
    assert toy.drafter._head[0].weight is toy.head
    loaded = pickle.loads(pickle.dumps(toy.drafter))
    assert (loaded.is_bound, toy.drafter.is_bound) == (False, True)
    loaded.bind_target(toy.embed, toy.head)
    assert equal(loaded.propose(pickle.loads(pickle.dumps(kv)), [seq], [3], [ROWS]), expected)


# -- surroundings -------------------------------------------------------------------------------------------------


def drafted(toy, kv=None):
    kv = toy.drafter.new_kv(2, 64, 4) if kv is None else kv
    seq = kv.open()
    toy.append(kv, seq, 0, ROWS)
    prop = toy.drafter.propose(kv, [seq], [3], [ROWS])
    return prop, kv.export_state(seq)


@pytest.mark.parametrize(
    "around",
    [
        torch.inference_mode,
        torch.no_grad,
        torch.enable_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.float16),
    ],
)
def test_the_mode_around_a_call_changes_nothing(toy, around):
    expected, rows = drafted(toy)
    with around():
        prop, state = drafted(toy)
    assert equal(prop, expected)
    assert torch.equal(state.keys, rows.keys)
    assert torch.equal(state.values, rows.values)


def test_a_kv_made_in_inference_mode_serves_outside(toy):
    with torch.inference_mode():
        kv = toy.drafter.new_kv(2, 64, 4, prefix_store_bytes=10**5)
        seq = kv.open()
        toy.append(kv, seq, 0, 6, token_ids=range(6))
    toy.append(kv, seq, 6, ROWS, token_ids=range(6, ROWS))
    assert equal(toy.drafter.propose(kv, [seq], [3], [ROWS]), drafted(toy)[0])
    kv.truncate(seq, 8)
    kv.reset(seq, 0)
    assert kv.span(kv.open(8, list(range(8)))) == (0, 8)


def test_the_default_dtype_of_torch_does_not_matter(toy):
    expected, _ = drafted(toy)
    torch.set_default_dtype(torch.float64)
    try:
        assert equal(drafted(toy)[0], expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_two_threads_on_two_kvs(toy):
    expected, _ = drafted(toy)
    failures = []

    def work():
        try:
            failures.extend("differs" for _ in range(20) if not equal(drafted(toy)[0], expected))
        except Exception as e:  # noqa: BLE001 - to be raised in the main thread
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_broken_taps_are_flagged_and_stay_with_their_sequence(toy, kv, bad):
    expected, _ = drafted(toy)
    good, broken = kv.open(), kv.open()
    taps = toy.taps(0, ROWS).clone()
    taps[ROWS - 2] = bad
    toy.drafter.append(kv, [broken, good], torch.cat((taps, toy.taps(0, ROWS))), [0, 0], [ROWS, ROWS])
    for temperature in (0.0, 1.0):
        prop = toy.drafter.propose(kv, [broken, good], [3, 3], [ROWS, ROWS], temperature=temperature)
        assert prop.valid.tolist() == [False, True]
        assert bool(((prop.tokens >= 0) & (prop.tokens < 37)).all())
        assert prop.q is None or bool(prop.q.isfinite().all())
    greedy = toy.drafter.propose(kv, [broken, good], [3, 3], [ROWS, ROWS])
    assert torch.equal(greedy.tokens[1], expected.tokens[0])
    kv.truncate(broken, ROWS - 2)
    assert toy.drafter.propose(kv, [broken], [3], [ROWS - 2]).valid.tolist() == [True]


# -- target and heads ---------------------------------------------------------------------------------------------


def test_tables_that_do_not_fit(toy):
    e, h, linear = toy.embed, toy.head, torch.nn.Linear
    short = dflash2.Int8LMHead.from_linear(linear(16, 30))
    loose = DFlash2Drafter(tiny_config())
    for embed, head, match in (
        (None, h, "embed_weight"),
        (e.tolist(), h, "embed_weight"),
        (e.long(), h, "embed_weight"),
        (e[:30], h, "embed_weight"),
        (e[:, :8], h, "embed_weight"),
        (e, h[:30], "lm_head"),
        (e, linear(16, 30), "lm_head"),
        (e, linear(8, 37), "lm_head"),
        (e, short, "lm_head"),
        (e, h.to(torch.int8), "scales"),
        (e, None, "lm_head"),
        (e, "head", "lm_head"),
        (e, torch.zeros_like(h), "zeros"),
    ):
        with pytest.raises(ConfigError, match=match):
            loose.bind_target(embed, head)
        assert not loose.is_bound
    assert loose.bind_target(e, h) is loose
    with pytest.raises(ConfigError, match="lm_head"):
        loose.bind_target(e, h[:30])
    assert loose._head[0].weight is h


def test_an_int8_head_in_the_place_of_a_linear():
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 9000, dtype=torch.bfloat16).requires_grad_(False)
    head = dflash2.Int8LMHead.from_linear(linear)
    x = torch.randn(9, 64).bfloat16()
    logits = head(x)
    assert (logits.shape, logits.dtype) == ((9, 9000), torch.bfloat16)
    for i in range(9):
        assert torch.equal(head(x[i]), logits[i])
        assert torch.equal(head(x[None, i : i + 1])[0, 0], logits[i])
    assert head(x[:0]).shape == (0, 9000)
    assert float((logits - linear(x)).abs().max()) < 0.05
    cast = copy.deepcopy(head).to(torch.bfloat16)
    assert cast.scale.dtype == torch.float32
    table = torch.nn.Embedding(20, 8)
    assert dflash2.Int8LMHead.from_linear(table).weight.shape == (20, 8)
    for bad in (0.0, NAN, INF):
        torch.nn.init.constant_(table.weight, bad)
        with pytest.raises(ConfigError, match="head's weight"):
            dflash2.Int8LMHead.from_linear(table)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_do_not_fit(toy, kv, seq, temperature):
    prop = toy.drafter.propose(kv, [seq], [3], [ROWS], temperature=temperature)
    for shape in ((4, 37), (1, 3, 37), (1, 5, 37), (2, 4, 37)):
        with pytest.raises(ValueError, match="target_logits"):
            dflash2.verify(prop, torch.randn(shape), temperature=temperature)
    for name, value in (("top_p", NAN), ("top_p", [0.5, 0.5]), ("top_k", None), ("top_k", torch.tensor([1, 2]))):
        with pytest.raises(ValueError, match=name):
            dflash2.verify(prop, torch.randn(1, 4, 37), temperature=temperature, **{name: value})
    for fill in (NAN, INF, -INF):
        out = dflash2.verify(prop, torch.full((1, 4, 37), fill), temperature=temperature)
        assert 0 <= int(out.next_token) < 37
    wide = torch.randn(1, 4, 64, dtype=torch.float16, requires_grad=True)
    assert not dflash2.verify(prop, wide, temperature=temperature).next_token.requires_grad


# -- prefix store -------------------------------------------------------------------------------------------------

IDS = list(range(100, 130))
PAGE_BYTES = 2 * 2 * 4 * 2 * 8 * 4


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_a_prefix_seen_before(toy, form):
    kv = toy.drafter.new_kv(4, 64, 4, prefix_store_bytes=100 * PAGE_BYTES)
    writer = kv.open()
    toy.append(kv, writer, 0, 12, token_ids=form(IDS[:12]))
    for length in (1, 4, 5, 8, 11, 12, 13):
        reader = kv.open(length, form(IDS[:length]))
        assert kv.span(reader) == (0, length) if length <= 12 else (0, 12)
        whole = kv.open()
        toy.append(kv, whole, 0, length)
        if length <= 12:
            one, other = (toy.drafter.propose(kv, [q], [3], [length]) for q in (reader, whole))
            assert equal(one, other)
        kv.close(reader)
        kv.close(whole)
    wrong = kv.open(8, form([1, *IDS[1:8]]))
    assert kv.span(wrong) == (8, 8)
    for ids in (IDS[:7], [1.5] * 8, [None] * 8, "abcdefgh", [2**70] * 8):
        refused(kv, ValueError, "token_ids", lambda x=ids: kv.open(8, x))


def test_a_budget_that_evicts_while_sequences_live(toy):
    with pytest.raises(CapacityError, match="prefix_store_bytes"):
        toy.drafter.new_kv(4, 64, 4, prefix_store_bytes=PAGE_BYTES - 1)
    assert toy.drafter.new_kv(4, 64, 4, prefix_store_bytes=0).store is None
    kv = toy.drafter.new_kv(4, 64, 4, prefix_store_bytes=2 * PAGE_BYTES)
    bytes_before, live = kv.nbytes, kv.open()
    toy.append(kv, live, 0, 20, token_ids=IDS[:20])
    assert kv.span(kv.open(20, IDS[:20])) == (12, 20)
    other = kv.open()
    toy.append(kv, other, 0, 20, branch=1, token_ids=IDS[::-1][:20])
    assert kv.span(kv.open(20, IDS[:20])) == (20, 20)
    plain = toy.drafter.new_kv(1, 64, 4)
    seq = plain.open()
    toy.append(plain, seq, 0, 20)
    assert equal(*(toy.drafter.propose(k, [q], [3], [20]) for k, q in ((kv, live), (plain, seq))))
    assert kv.nbytes == bytes_before


# -- config and checkpoint ----------------------------------------------------------------------------------------


def published(**changes):
    """Values of Qwen3.8-27B-DFlash2's config.json."""
    return {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "is_causal": False, "hidden_size": 5120,
        "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "layer_types": [SLIDING] * 5, "sliding_window": 2048, "use_sliding_window": True,
        "max_window_layers": 5, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "max_position_embeddings": 262144, "vocab_size": 248320, "num_target_layers": 64, "dtype": "bfloat16",
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "dflash_config": {
            "block_size": 8, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
            "mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61],
        },
    } | changes  # fmt: skip


def test_a_published_config_there_and_back(tmp_path):
    config = DFlash2Config.from_pretrained(published())
    assert (config.block_size, config.max_draft_tokens, config.target_layer_ids) == (8, 7, (5, 19, 33, 47, 61))
    assert DFlash2Config.from_pretrained(config.to_dict()) == config
    assert sum(p.numel() for p in DFlash2Drafter(config, device="meta").parameters()) == 1_924_404_480
    with pytest.raises(ConfigError, match="mask_token_id"):
        DFlash2Config.from_pretrained(published(dflash_config={"block_size": 8}))


def test_a_drafter_there_and_back(toy, tmp_path, kv, seq):
    toy.drafter.save_pretrained(str(tmp_path / "saved"))
    for path in (tmp_path / "saved", str(tmp_path / "saved")):
        loaded = DFlash2Drafter.from_pretrained(path)
        assert (loaded.config, loaded.dtype, loaded.device.type) == (toy.config, torch.float32, "cpu")
        loaded.bind_target(toy.embed, toy.head)
        assert equal(loaded.propose(kv, [seq], [3], [ROWS]), toy.drafter.propose(kv, [seq], [3], [ROWS]))
    assert DFlash2Drafter.from_pretrained(path, dtype=torch.float16).dtype == torch.float16
    with pytest.raises(CheckpointError, match="no such folder"):
        DFlash2Drafter.from_pretrained(tmp_path / "nowhere")


# -- generate -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    tf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    target = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, vocab_size=37, eos_token_id=None, pad_token_id=0)).eval()
    return target, DFlash2Drafter(tiny_config())


def test_what_generate_takes(pair):
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    gen = dflash2.generate(*pair, ids, max_new_tokens=6)
    assert (gen.sequences.shape, gen.sequences.dtype) == ((2, 9), torch.int64)
    assert [sum(lengths) for lengths in gen.acceptance_lengths] == [5, 5]
    one = dflash2.generate(*pair, ids[:1], max_new_tokens=1)
    assert (one.sequences[0].tolist(), one.acceptance_lengths) == (gen.sequences[0, :4].tolist(), [[]])
    stop = int(gen.sequences[0, 5])
    cut = gen.sequences[0].tolist().index(stop, 3) + 1
    for eos in (stop, [stop], (stop,), {stop}, torch.tensor(stop), torch.tensor([stop]), np.array([stop]), [-1, stop]):
        assert dflash2.generate(*pair, ids[:1], max_new_tokens=6, eos_token_id=eos).sequences.shape == (1, cut)
    for eos in ([], -1, None):
        assert dflash2.generate(*pair, ids[:1], max_new_tokens=6, eos_token_id=eos).sequences.shape == (1, 9)
    with torch.inference_mode():
        assert torch.equal(dflash2.generate(*pair, ids, max_new_tokens=6).sequences, gen.sequences)


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("input_ids", {"input_ids": torch.tensor([5, 6])}),
        ("input_ids", {"input_ids": torch.zeros(0, 3, dtype=torch.int64)}),
        ("input_ids", {"input_ids": torch.tensor([[5.0, 6.0]])}),
        ("input_ids", {"input_ids": torch.tensor([[5, -1]])}),
        ("input_ids", {"input_ids": torch.tensor([[5, 37]])}),
        ("attention_mask", {"attention_mask": torch.ones(1, 2)}),
        ("attention_mask", {"attention_mask": torch.zeros(1, 3)}),
        ("attention_mask", {"attention_mask": torch.tensor([[1, 0, 1]])}),
        ("max_new_tokens", {"max_new_tokens": 0}),
        ("max_new_tokens", {"max_new_tokens": 1.5}),
        ("max_new_tokens", {"max_new_tokens": None}),
        ("num_draft_tokens", {"num_draft_tokens": 4}),
        ("num_draft_tokens", {"num_draft_tokens": 1.5}),
        ("temperature", {"temperature": NAN}),
        ("temperature", {"temperature": INF}),
        ("temperature", {"temperature": -1.0}),
        ("top_p", {"top_p": 0.0}),
        ("top_k", {"top_k": -1}),
        ("eos_token_id", {"eos_token_id": "</s>"}),
        ("eos_token_id", {"eos_token_id": 2.0}),
    ],
)
def test_what_generate_refuses(pair, match, changes):
    with pytest.raises(ValueError, match=match):
        dflash2.generate(*pair, **{"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 2, **changes})


@pytest.mark.slow
def test_the_real_pair_writes_what_the_target_writes():
    tf = pytest.importorskip("transformers")
    path = dflash2.embedded_target()
    target = tf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = tf.AutoTokenizer.from_pretrained(path)
    drafter = DFlash2Drafter.from_pretrained("smollm2-135m-dflash2", dtype=torch.float32)
    turns = ["Name three primes.", "Write a function that adds two numbers.", "What is 3 + 4 * 2?"]
    chats = [[{"role": "user", "content": t}] for t in turns]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    ids, mask = batch["input_ids"], batch["attention_mask"]
    together = dflash2.generate(target, drafter, ids, mask, max_new_tokens=24)
    for i in range(len(turns)):
        prompt = ids[i : i + 1, mask[i].bool()]
        plain = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
        answer = plain[0, prompt.shape[1] :].tolist()
        assert together.sequences[i, ids.shape[1] :].tolist()[: len(answer)] == answer
        for k in (1, 7):
            alone = dflash2.generate(target, drafter, prompt, max_new_tokens=24, num_draft_tokens=k)
            assert torch.equal(alone.sequences, plain)
    assert together.stats.acceptance_length > 1.5
