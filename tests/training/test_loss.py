from __future__ import annotations

import pytest
import torch
from test_blocks import config, network
from torch.nn import functional as F

from dflash2.training.loss import BlockTargets, HeadSettings, block_loss, candidate_logits, head_loss, pair_scores


def inputs(n=13, hidden=16, vocab=31, seed=0):
    g = torch.Generator().manual_seed(seed)
    z, teacher = (torch.randn(n, hidden, generator=g) for _ in range(2))
    token = torch.randint(0, vocab, (n,), generator=g)
    weight = torch.rand(n, generator=g) * (torch.arange(n) % 4 > 0)
    return z.requires_grad_(), torch.randn(vocab, hidden, generator=g) * 0.7, teacher, token, weight


@pytest.mark.parametrize("use_argmax", [True, False])
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.4, None), (0.7, 3.0)])
@pytest.mark.parametrize("hard", [0.0, 0.3, 1.0])
def test_value_and_gradient_are_those_of_autograd(hard, multiplier, softcap, use_argmax):
    z, head, teacher, token, weight = inputs()
    s = HeadSettings(multiplier, softcap, hard, 4, chunk=5)
    loss, gold, best = head_loss(z, head, teacher, token, weight, use_argmax=use_argmax, settings=s)
    (got,) = torch.autograd.grad(3 * loss, z)

    logits = z @ head.T * multiplier
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    p = (teacher @ head.T).softmax(-1)
    label = p.argmax(-1) if use_argmax else token
    rows = hard * F.cross_entropy(logits, label, reduction="none") - (1 - hard) * (p * logits.log_softmax(-1)).sum(-1)
    expected = (rows * weight).sum() / weight.sum()
    (grad,) = torch.autograd.grad(3 * expected, z)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got, grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(gold, label)
    assert torch.equal(best, logits.topk(4).indices)


def test_nothing_supervised_is_a_loss_of_zero():
    z, head, teacher, token, weight = inputs()
    s = HeadSettings(1.0, None, 0.5, 4, chunk=5)
    loss, _, _ = head_loss(z, head, teacher, token, weight * 0, use_argmax=True, settings=s)
    (grad,) = torch.autograd.grad(loss, z)
    assert loss == 0
    assert not grad.any()


def selector_case(token, hard=1.0):
    """Two blocks of three rows whose head gives rows exactly their own logits."""
    c = config(6)
    net = network(c).float()
    head = torch.eye(31, 16)
    z = torch.zeros(2, 4, 16)
    z[..., :5] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    token = torch.tensor(token)
    teacher = torch.zeros(2, 3, 16)
    weight = torch.tensor([[1.0, 0.5, 0.25], [1.0, 0.5, 0.0]])
    targets = BlockTargets(token, (token + 7) % 31, teacher, weight)
    z.requires_grad_()
    settings = HeadSettings(1.0, None, hard, c.selector_top_k, chunk=4)
    return (
        net,
        z,
        head,
        targets,
        block_loss(net, z, head, targets, settings=settings, selector_weight=2.0, use_argmax=False),
    )


def test_selector_loss_is_zero_without_a_hit():
    net, _, _, _, loss = selector_case([[9, 9, 9], [9, 9, 0]])  # the last row is not supervised
    assert loss.selector == 0
    assert torch.isfinite(loss.total)
    loss.total.backward()
    for p in net.candidate_selector.parameters():
        assert p.grad is None or (torch.isfinite(p.grad).all() and not p.grad.any())


def test_selector_loss_of_hits_only_with_its_own_normaliser():
    net, z, _, targets, loss = selector_case([[0, 9, 2], [9, 1, 1]])
    gate = net.candidate_selector.hidden_projection(z[:, 1:])
    total, norm = 0.0, 0.0
    for n, i in ((0, 0), (0, 2), (1, 1)):
        before, gold, w = targets.predecessor[n, i], targets.token[n, i], float(targets.weight[n, i])
        s = net.candidate_selector
        pair = (s.predecessor_codebook[before] * gate[n, i] * s.successor_codebook[:3]).sum(-1).detach()
        total += w * float(F.cross_entropy(torch.tensor([5.0, 4.0, 3.0]) + pair, gold))
        norm += w
    assert loss.selector.item() == pytest.approx(total / norm, rel=1e-5)
    assert loss.total.item() == pytest.approx(loss.base.item() + 2 * total / norm, rel=1e-5)
    assert loss.recall.tolist() == [0.5, 0.5, 1.0]
    assert loss.top1.tolist() == [0.5, 0.0, 0.0]


def test_candidate_logits_are_the_heads():
    z, head, *_ = inputs()
    s = HeadSettings(0.7, 3.0, 0.5, 4, chunk=5)
    ids = torch.randint(0, 31, (13, 4))
    expected = (3 * torch.tanh(z @ head.T * 0.7 / 3)).gather(-1, ids)
    torch.testing.assert_close(candidate_logits(z, head, ids, s), expected, rtol=1e-5, atol=1e-6)


def test_pair_scores_are_the_selectors():
    net = network(config()).float()
    rows, before, ids = torch.randn(7, 16), torch.randint(0, 31, (7,)), torch.randint(0, 31, (7, 3))
    s = net.candidate_selector
    expected = s.pair_scores(s.hidden_projection(rows), before.unsqueeze(-1), ids).squeeze(-2)
    torch.testing.assert_close(pair_scores(s, rows, before, ids), expected, rtol=1e-5, atol=1e-6)
