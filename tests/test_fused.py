"""A propose by kernels is the propose by the network's modules, and a replayed graph is the call it recorded."""

import pytest
import torch
from tiny import FULL, SLIDING, Toy, poison, tiny_config

from dflash2.errors import ConfigError
from dflash2.ops.launch import override

V1 = {"architecture": "DFlashDraftModel", "is_causal": None}
CONFIGS = {
    "v2": {},
    "causal": {"is_causal": True},
    "mixed": {"layer_types": (SLIDING, FULL), "is_causal": None},
    "bias": {"attention_bias": True, "num_key_value_heads": 4},
    "taps": {"conv_kernel_size": 3, "conv_group_size": 8, "selector_top_k": 1},
    "scaled": {"input_embedding_scale": 2.5, "output_multiplier": 0.2, "final_logit_softcapping": 3.0},
    "window of one": {"sliding_window": 1},
    "v1": V1,
}
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.triton),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.triton]),
]
STARTS = [3, 20, 0, 7]


class OnDevice:
    """A toy, with sequences of several lengths, one with a hole and one without context."""

    def __init__(self, config, device, dtype=torch.float32):
        self.toy = Toy(config, dtype=dtype)
        self.drafter = self.toy.drafter.to(device)
        self.drafter.bind_target(self.toy.embed.to(device), self.toy.head.to(device))
        self.device = device
        self.kv = self.drafter.new_kv(8, 64, page_size=4)
        self.seqs = []
        for i, end in enumerate(STARTS):
            seq = self.kv.open()
            self.seqs.append(seq)
            middle = end // 2
            self.append(seq, 0, middle, i)
            if i == 1:
                self.kv.skip_to(seq, middle + 2)
                middle += 2
            self.append(seq, middle, end, i)
        self.starts = list(STARTS)
        poison(self.kv)

    def append(self, seq, first, end, branch=0, **kw):
        taps = self.toy.taps(first, end, branch).to(self.device)
        self.drafter.append(self.kv, [seq], taps, [first], [end - first], **kw)

    def propose(self, backend="auto", rows=slice(None), **kw):
        self.drafter.backend = backend
        anchors = torch.tensor([5, 36, 0, 11])[rows]
        kw = {"generator": torch.Generator(self.device).manual_seed(3)} | kw
        try:
            return self.drafter.propose(self.kv, self.seqs[rows], anchors, self.starts[rows], **kw)
        finally:
            self.drafter.backend = "auto"


def assert_same_proposal(a, b):
    # Rows that are not valid mean nothing; scores of the toys lie far further apart than fp32 sums in another order.
    assert torch.equal(a.valid, b.valid)
    assert torch.equal(a.tokens[a.valid], b.tokens[a.valid])
    if a.candidates is not None:
        assert torch.equal(a.candidates[a.valid], b.candidates[a.valid])
    if a.q is not None:
        torch.testing.assert_close(a.q[a.valid], b.q[a.valid], rtol=1e-3, atol=1e-4)


#: Seconds each in the interpreter, so those that differ most there; a GPU takes all.
CASES = [
    pytest.param(device, name, marks=marks)
    for device, marks in (("cpu", [pytest.mark.triton]), ("cuda", [pytest.mark.gpu, pytest.mark.triton]))
    for name in CONFIGS
    if device == "cuda" or name in ("mixed", "bias", "scaled", "v1")
]


@pytest.mark.parametrize(("device", "name"), CASES)
def test_kernels_and_modules_propose_the_same(name, device):
    here = OnDevice(tiny_config(**CONFIGS[name]), device)
    kernels, modules = here.propose("triton"), here.propose("torch")
    assert_same_proposal(kernels, modules)
    assert kernels.valid.tolist() == [True, True, name == "window of one", True]


@pytest.mark.parametrize("device", DEVICES)
def test_sampled_and_narrow(device):
    here = OnDevice(tiny_config(), device)
    for kw in ({"temperature": [0.0, 1.0, 1.0, 0.5]}, {"num_draft_tokens": 1}, {"num_draft_tokens": 0}):
        assert_same_proposal(here.propose("triton", **kw), here.propose("torch", **kw))


@pytest.mark.parametrize("device", DEVICES)
def test_mask_row_and_bad_anchors(device):
    here = OnDevice(tiny_config(), device)
    here.drafter.mask_embedding = torch.linspace(-1, 1, 16, device=device)
    here.drafter.backend = "triton"
    kernels = here.drafter.propose(here.kv, here.seqs, [36, 37, -1, 4], here.starts)
    here.drafter.backend = "torch"
    modules = here.drafter.propose(here.kv, here.seqs, [36, 37, -1, 4], here.starts)
    assert_same_proposal(kernels, modules)
    assert kernels.valid.tolist() == [True, False, False, True]


@pytest.mark.parametrize("device", DEVICES)
def test_int8_linears(device):
    here = OnDevice(tiny_config(), device)
    here.drafter.quantize_linears()
    assert_same_proposal(here.propose("triton"), here.propose("torch"))


@pytest.mark.parametrize("device", DEVICES)
def test_a_hidden_state_that_is_no_number_is_flagged(device):
    here = OnDevice(tiny_config(), device)
    here.drafter.layers[1].mlp.down_proj.weight[3] = float("nan")
    assert not here.propose("triton").valid.any()


#: Wide enough for what the kernels do with whole tiles.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "conv_group_size": 16}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("int8", [False, True], ids=["dense", "int8"])
def test_weights_that_are_asked_for_early_change_no_bit(int8, device):
    """Round after round, each kernel of which may start while those before it still run."""
    found = []
    for early in (0, 1):
        layers = 1 if device == "cpu" else 3
        here = OnDevice(tiny_config(**WIDE, num_hidden_layers=layers), device, torch.float16)
        settings = {"EARLY": early, "num_stages": 5}
        if int8:
            here.drafter.quantize_linears()
        rounds = []
        with override("block_linear", settings), override("gated_linear", settings), override("row_linear", settings):
            for step in range(1 if device == "cpu" else 20):
                here.append(here.seqs[0], here.starts[0], here.starts[0] + 1, step)
                here.starts[0] += 1
                rounds.append(here.propose("triton", temperature=1.0))
        found.append((rounds, here.kv.export_state(here.seqs[0])))
    (rounds, state), (rounds_early, state_early) = found
    for a, b in zip(rounds, rounds_early, strict=True):
        assert a.valid.tolist() == [True, True, False, True]
        assert torch.equal(a.candidates, b.candidates)
        assert torch.equal(a.q, b.q)
    assert torch.equal(state.keys, state_early.keys)
    assert torch.equal(state.values, state_early.values)


def test_graphs_need_a_gpu():
    here = OnDevice(tiny_config(), "cpu")
    with pytest.raises(ConfigError, match="on cpu: move it to a GPU first"):
        here.drafter.capture(here.kv)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_replays_equal_calls(name):
    """Rows B160, B162, B164: batches of 1 to 4 in graphs of 2 and 4, positions that move, pages that change."""
    here = OnDevice(tiny_config(**CONFIGS[name]), "cuda")
    plain = {n: here.propose(rows=slice(0, n)) for n in range(1, 5)}
    sampled = here.propose(temperature=[0.0, 1.0, 1.0, 0.5])
    here.drafter.capture(here.kv, batch_sizes=(2, 4))
    assert here.kv.captured.nbytes > 0
    for n, expected in plain.items():
        found = here.propose(rows=slice(0, n))
        for field in ("tokens", "candidates", "valid"):
            a, b = getattr(found, field), getattr(expected, field)
            assert a is b is None or torch.equal(a, b)
    assert_same_proposal(here.propose(temperature=[0.0, 1.0, 1.0, 0.5]), sampled)
    assert here.kv.captured is not None


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rounds_with_graphs_store_and_draft_what_rounds_without_them_do(temperature):
    """Row B163: a rollback between the replays; device positions, rejected suffixes, a batch that shrinks."""
    k, states = 3, []
    for way in ("calls", "graphs", "one graph"):
        here = OnDevice(tiny_config(), "cuda")
        here.kv.reserve(here.seqs, [s + 24 for s in here.starts])
        if way != "calls":
            here.drafter.capture(here.kv, batch_sizes=(1, 4))
        position = torch.tensor(here.starts, device="cuda")
        seqs, tokens = list(here.seqs), []
        for step in range(4):
            taps = torch.cat([here.toy.taps(step * 8, step * 8 + k + 1, i) for i in range(len(seqs))]).cuda()
            lengths = torch.full((len(seqs),), k + 1, device="cuda")
            valid = torch.tensor([1, 4, 2, 3][: len(seqs)], device="cuda")
            anchors = torch.arange(len(seqs), device="cuda")
            heat = torch.full((len(seqs),), temperature, device="cuda") if temperature else 0.0
            drafting = {"temperature": heat, "generator": torch.Generator("cuda").manual_seed(step)}
            append, position = (here.kv, seqs, taps, position, lengths, valid), position + valid
            if way == "one graph":
                out = here.drafter.append_and_propose(*append, anchors, **drafting)
            else:
                here.drafter.append(*append)
                out = here.drafter.propose(here.kv, seqs, anchors, position, **drafting)
            assert out.valid.all()
            tokens.append(out.tokens)
            if step == 1:
                seqs, position = seqs[:3], position[:3]
        assert here.kv.faults.sum() == 0
        states.append((tokens, [here.kv.export_state(q) for q in here.seqs]))
    tokens, plain = states[0]
    for replayed, graphs in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(tokens, replayed, strict=True))
        for a, b in zip(plain, graphs, strict=True):
            assert torch.equal(a.positions, b.positions)
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)


@pytest.mark.gpu
def test_graphs_end_when_what_they_read_moves():
    here = OnDevice(tiny_config(), "cuda")
    here.drafter.capture(here.kv, batch_sizes=(4,))
    assert here.drafter._captured(here.kv) is here.kv.captured
    here.drafter.quantize_linears()
    assert here.drafter._captured(here.kv) is None
    assert here.propose().valid.tolist() == [True, True, False, True]
