from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_blocks import config, drafter
from torch.nn import functional as F

from dflash2.ops.distill import LossWeights
from dflash2.training.loss import BlockTargets, LossOptions, block_loss, candidate_logits, head_loss


def inputs(n=13, hidden=16, vocab=31, seed=0):
    g = torch.Generator().manual_seed(seed)
    z, teacher = (torch.randn(n, hidden, generator=g) for _ in range(2))
    token = torch.randint(0, vocab, (n,), generator=g)
    weight = torch.rand(n, generator=g) * (torch.arange(n) % 4 > 0)
    return z.requires_grad_(), torch.randn(vocab, hidden, generator=g) * 0.7, teacher, token, weight


@pytest.mark.parametrize("use_argmax", [True, False])
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.4, None), (0.7, 3.0)])
@pytest.mark.parametrize("weights", [(1, 0, 0, 0), (0.3, 0.7, 0, 0), (0.1, 0.2, 0.4, 0.8)])
def test_value_and_gradient_are_those_of_autograd(weights, multiplier, softcap, use_argmax):
    z, head, teacher, token, scale = inputs()
    net = shaped(head, multiplier, softcap)
    label = None if use_argmax else token
    loss, gold, best = head_loss(net, z, head, teacher, label, scale, LossWeights(*weights), chunk=5)
    (got,) = torch.autograd.grad(3 * loss, z)

    logits = z @ head.T * multiplier
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    p, log_q = (teacher @ head.T).softmax(-1), logits.log_softmax(-1)
    label = p.argmax(-1) if use_argmax else token
    accepted = torch.minimum(p, log_q.exp()).sum(-1)
    hard, soft, tv, lk = weights
    rows = hard * F.nll_loss(log_q, label, reduction="none") - soft * (p * log_q).sum(-1)
    expected = ((rows + tv * (1 - accepted) - lk * accepted.log()) * scale).sum()
    (grad,) = torch.autograd.grad(3 * expected, z)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got, grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(gold, label)
    assert torch.equal(best, logits.topk(4).indices)


def test_nothing_supervised_is_a_loss_of_zero():
    net, z, targets, _ = selector_case([[0, 1, 2], [0, 1, 2]])
    targets = replace(targets, weight=torch.zeros(2, 3))
    loss = block_loss(net, z, torch.eye(31, 16), targets, LossOptions(LossWeights(0.5, 0.5)))
    loss.total.backward()
    assert loss.total == 0
    assert not z.grad.any()
    assert not loss.recall.any()


def shaped(head, multiplier=1.0, softcap=None):
    c = config(output_multiplier=multiplier, final_logit_softcapping=softcap, selector_top_k=4)
    return drafter(c, head)


def selector_case(token, **options):
    """Two blocks of three rows whose head gives rows exactly their own logits."""
    head = torch.eye(31, 16)
    net = drafter(config(6), head)
    z = torch.zeros(2, 4, 16)
    z[..., :5] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    token = torch.tensor(token)
    teacher = torch.zeros(2, 3, 16)
    weight = torch.tensor([[1.0, 0.5, 0.25], [1.0, 0.5, 0.0]])
    targets = BlockTargets(token, (token + 7) % 31, teacher, weight)
    z.requires_grad_()
    how = LossOptions(LossWeights(1.0, 0.0), selector_weight=2.0, gold="token", chunk=4, **options)
    loss = block_loss(net, z, head, targets, how)
    return net, z, targets, loss


def test_selector_loss_is_zero_without_a_hit():
    net, _, _, loss = selector_case([[9, 9, 9], [9, 9, 0]])  # the last row is not supervised
    assert loss.selector == 0
    assert torch.isfinite(loss.total)
    loss.total.backward()
    for p in net.candidate_selector.parameters():
        assert p.grad is None or (torch.isfinite(p.grad).all() and not p.grad.any())


def selector_losses(net, z, targets, cases):
    """(weight, loss) of these (block, row, candidates)."""
    s, gate = net.candidate_selector, net.candidate_selector.hidden_projection(z[:, 1:])
    for n, i, ids in cases:
        before, gold = targets.predecessor[n, i], targets.token[n, i]
        pair = (s.predecessor_codebook[before] * gate[n, i] * s.successor_codebook[ids]).sum(-1).detach()
        label = torch.tensor(ids.index(int(gold)))
        yield float(targets.weight[n, i]), float(F.cross_entropy(z[n, i + 1, ids].detach() + pair, label))


@pytest.mark.parametrize("mean", ["hits", "rows"])
def test_selector_loss_of_hits_only(mean):
    net, z, targets, loss = selector_case([[0, 9, 2], [9, 1, 1]], selector_mean=mean)
    best = [0, 1, 2]
    judged = list(selector_losses(net, z, targets, [(0, 0, best), (0, 2, best), (1, 1, best)]))
    among = sum(w for w, _ in judged) if mean == "hits" else float(targets.weight.sum())
    expected = sum(w * x for w, x in judged) / among
    assert loss.selector.item() == pytest.approx(expected, rel=1e-5)
    assert loss.total.item() == pytest.approx(loss.base.item() + 2 * expected, rel=1e-5)
    assert loss.recall.tolist() == [0.5, 0.5, 1.0]
    assert loss.top1.tolist() == [0.5, 0.0, 0.0]


def test_gold_that_is_no_candidate_can_take_the_last_ones_place():
    net, z, targets, loss = selector_case([[0, 9, 2], [9, 1, 1]], selector_miss="inject")
    best, with_nine = [0, 1, 2], [0, 1, 9]
    cases = [(0, 0, best), (0, 1, with_nine), (0, 2, best), (1, 0, with_nine), (1, 1, best)]
    judged = list(selector_losses(net, z, targets, cases))
    assert loss.selector.item() == pytest.approx(sum(w * x for w, x in judged) / sum(w for w, _ in judged), rel=1e-5)
    assert loss.recall.tolist() == [0.5, 0.5, 1.0]  # of the drafter's own candidates


@pytest.mark.parametrize("detach", [True, False])
def test_the_selectors_gradient_can_be_kept_from_the_layers(detach):
    net, z, targets, _ = selector_case([[0, 1, 2], [0, 1, 2]])
    how = LossOptions(LossWeights(1.0, 0.0), gold="token", selector_detach=detach)
    without = block_loss(net, z, torch.eye(31, 16), targets, replace(how, selector_weight=0.0))
    loss = block_loss(net, z, torch.eye(31, 16), targets, how)
    (base,), (both,) = (torch.autograd.grad(x.total, z, retain_graph=True) for x in (without, loss))
    assert torch.equal(base, both) == detach
    assert torch.autograd.grad(loss.total, net.candidate_selector.successor_codebook)[0].any()


def test_candidate_logits_are_the_heads():
    z, head, *_ = inputs()
    ids = torch.randint(0, 31, (13, 4))
    expected = (3 * torch.tanh(z @ head.T * 0.7 / 3)).gather(-1, ids)
    torch.testing.assert_close(candidate_logits(shaped(head, 0.7, 3.0), z, head, ids), expected, rtol=1e-5, atol=1e-6)


def test_pair_scores_and_their_gradients_are_the_formulas():
    s = drafter(config(), torch.eye(31, 16)).candidate_selector
    gate, before, ids = torch.randn(7, 4), torch.randint(0, 31, (7, 2)), torch.randint(0, 5, (7, 3))
    got = s.pair_scores(gate, before, ids)
    a, b = s.predecessor_codebook[before], s.successor_codebook[ids]
    expected = (a[:, :, None] * gate[:, None, None] * b[:, None]).sum(-1)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    books, pull = (s.predecessor_codebook, s.successor_codebook), torch.randn_like(got)
    for mine, true in zip(
        torch.autograd.grad(got, books, pull), torch.autograd.grad(expected, books, pull), strict=True
    ):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-6)
