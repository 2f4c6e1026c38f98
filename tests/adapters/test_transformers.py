"""``model.generate`` with drafts gives what it gives without, whatever shapes the target's distribution."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from test_generate import V, batch, drafter, target
from test_verification import assert_follows

import dflash2.adapters.transformers as adapter
from dflash2 import ConfigError, DFlash2Drafter

LENGTHS = [9, 4, 13]


@pytest.fixture
def helpful(monkeypatch):
    """Drafts what the target will say, wrong now and then, so that rounds of all lengths occur."""

    def use(made: DFlash2Drafter, said: torch.Tensor, padding: list[int]) -> list[int]:
        real, counted = made.propose, []

        def propose(kv, seqs, anchors, starts, k, temperature, generator):
            prop = real(kv, seqs, anchors, starts, k, temperature, generator)
            for i, (row, start) in enumerate(zip(seqs, starts, strict=True)):  # handles count from 0, as rows do
                at = padding[row] + start + 1
                truth = said[row, at : at + k]
                prop.tokens[i, : len(truth)] = truth
                if (wrong := (start * 7 + row) % (k + 3)) < k:
                    prop.tokens[i, wrong] = (prop.tokens[i, wrong] + 1) % V
            counted.append(len(seqs))
            return prop

        monkeypatch.setattr(made, "propose", propose)
        return counted

    return use


SETTINGS = {
    "greedy": {},
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated pair": {"no_repeat_ngram_size": 2},
    "least length": {"min_new_tokens": 12, "eos_token_id": [5, 7, 11, 20]},
    "stops": {"eos_token_id": [5, 7, 11, 20, 31, 40]},
    "banned": {"bad_words_ids": [[5], [17], [20, 21]]},
    "short": {"max_new_tokens": 1},
}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rows", [1, 3])
def test_same_tokens_as_without_drafts(family, setting, rows, helpful):
    model, made = target(family), drafter()
    lengths = LENGTHS[:rows]
    ids, mask = batch(lengths)
    how = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False} | SETTINGS[setting]
    plain = model.generate(ids, **how)
    counted = helpful(made, plain, [ids.shape[1] - n for n in lengths])
    ours = model.generate(ids, **how, custom_generate=adapter.generate, drafter=made)
    assert torch.equal(ours, plain)
    new = plain.shape[1] - ids.shape[1]
    assert len(counted) < max(new - 1, 1) or new <= 4, "some drafts stood"


@pytest.mark.parametrize("k", [0, 1, 3, "auto"])
def test_number_of_drafts(k):
    model, made = target(), drafter()
    ids, mask = batch(LENGTHS)
    how = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "repetition_penalty": 1.3}
    plain = model.generate(ids, **how)
    ours = model.generate(ids, **how, custom_generate=adapter.generate, drafter=made, num_draft_tokens=k)
    assert torch.equal(ours, plain)


def test_stopping_criteria_are_asked_after_every_token(helpful):
    model, made = target(), drafter()
    ids, mask = batch([6])
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    seen = []

    class AtSeventh(tf.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append(input_ids.shape[1])
            return torch.full((len(input_ids),), input_ids.shape[1] == ids.shape[1] + 7)

    helpful(made, plain, [0])
    ours = model.generate(
        ids, attention_mask=mask, max_new_tokens=20, do_sample=False, stopping_criteria=[AtSeventh()],
        custom_generate=adapter.generate, drafter=made,
    )  # fmt: skip
    assert torch.equal(ours, plain[:, : ids.shape[1] + 7])
    assert seen == list(range(ids.shape[1] + 1, ids.shape[1] + 8))


class Streamer(tf.generation.BaseStreamer):
    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, value):
        self.got += value.flatten().tolist()

    def end(self):
        self.ended += 1


def test_a_streamer_gets_the_prompt_and_every_token_once():
    model, made = target(), drafter()
    ids, mask = batch([6])

    streamer = Streamer()
    ours = model.generate(
        ids, attention_mask=mask, max_new_tokens=20, do_sample=False, streamer=streamer,
        custom_generate=adapter.generate, drafter=made,
    )  # fmt: skip
    assert streamer.got == ours[0].tolist()
    assert streamer.ended == 1


@pytest.mark.parametrize("how", [{"temperature": 0.8}, {"temperature": 1.4, "top_k": 6}, {"top_p": 0.7}])
def test_sampled_output_follows_the_target(how):
    """The first two tokens of many samples against the exact distribution, by the target's own processors."""
    model, made = target(), drafter()
    ids, _ = batch([7])
    many = ids.expand(600, -1).contiguous()
    settings = {"attention_mask": torch.ones_like(many), "max_new_tokens": 3, "do_sample": True, "top_k": 0} | how
    torch.manual_seed(3)
    out = model.generate(many, **settings, custom_generate=adapter.generate, drafter=made)
    torch.manual_seed(4)
    plain = model.generate(many, **settings)
    pairs = [torch.bincount(x[:, 7] * 1 + 0, minlength=V).double() for x in (out, plain)]
    logits = model(ids).logits[0, -1].float()
    config = tf.GenerationConfig(**{"do_sample": True, "top_k": 0} | how)
    warped = logits[None]
    for processor in model._get_logits_processor(config, 7, ids, None, [], device="cpu", model_kwargs={}):
        warped = processor(ids, warped)
    assert_follows(pairs[0], warped.softmax(-1)[0].double() * 600)
    second = [torch.bincount(x[:, 8], minlength=V).double() for x in (out, plain)]
    both = second[0] + second[1]
    alike = ((second[0] - second[1]) ** 2 / both.clamp_min(1)).sum()
    assert alike < both.count_nonzero() + 5 * (2 * both.count_nonzero()) ** 0.5


def test_wrong_requests_are_refused():
    model, made = target(), drafter()
    ids, mask = batch(LENGTHS)
    how = {"attention_mask": mask, "max_new_tokens": 4, "custom_generate": adapter.generate}
    with pytest.raises(ConfigError, match="needs drafter="):
        model.generate(ids, **how)
    with pytest.raises(ConfigError, match="num_beams=2"):
        model.generate(ids, **how, drafter=made, num_beams=2)
    with pytest.raises(ConfigError, match="return_dict_in_generate"):
        model.generate(ids, **how, drafter=made, return_dict_in_generate=True)
    with pytest.raises(ConfigError, match="expected 0 to 7, or 'auto'"):
        model.generate(ids, **how, drafter=made, num_draft_tokens=8)
    with pytest.raises(ValueError, match="a streamer takes one request"):
        model.generate(ids, **how, drafter=made, streamer=Streamer())
    with pytest.raises(ConfigError, match="another target"):
        model.generate(ids, **how, drafter=drafter(vocab_size=70))


def test_auto_model_gives_the_drafter_and_leaves_qwen_alone(tmp_path):
    made = drafter()
    made.save_pretrained(tmp_path / "v2")
    drafter(architecture="DFlashDraftModel").save_pretrained(tmp_path / "v1")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    qwen = tf.Qwen3Model(tf.Qwen3Config(**shape, num_key_value_heads=1, head_dim=8, vocab_size=20))
    qwen.save_pretrained(tmp_path / "qwen")
    adapter.register()  # once more: importing the module did
    loaded = tf.AutoModel.from_pretrained(tmp_path / "v2")
    assert isinstance(loaded, DFlash2Drafter)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), made.parameters(), strict=True))
    assert tf.AutoModel.from_pretrained(tmp_path / "v2", dtype=torch.float16).dtype == torch.float16
    assert tf.AutoModel.from_pretrained(tmp_path / "v1").candidate_selector is None
    assert isinstance(tf.AutoModel.from_pretrained(tmp_path / "qwen"), tf.Qwen3Model)
    with pytest.raises(ConfigError, match="one device"):
        tf.AutoModel.from_pretrained(tmp_path / "v2", device_map="auto")
