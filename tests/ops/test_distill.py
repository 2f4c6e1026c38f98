"""distill: loss and gradient of the formula by autograd in fp64, and candidates of a full sort."""

import pytest
import torch
from torch.nn import functional as F

from dflash2.ops.distill import LossWeights, distill, top_of_groups

WEIGHTS = [LossWeights(1.0, 0.0), LossWeights(0.3, 0.7), LossWeights(0.0, 0.0, 1.0), LossWeights(0.1, 0.2, 0.4, 0.8)]
SHAPES = [(1, 1), (3, 50), (5, 64), (2, 4096), (3, 9001)]


def inputs(rows, vocab, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(rows * vocab)
    student, teacher = (3 * torch.randn(rows, vocab, generator=g).to(device, dtype) for _ in range(2))
    token = torch.randint(0, vocab, (rows,), generator=g).to(device)
    return student, teacher, token, torch.rand(rows, generator=g).to(device)


def formula(student, teacher, token, scale, w, multiplier, softcap):
    """Loss, gradient and label, by autograd in fp64."""
    raw = student.double().requires_grad_()
    s = raw * multiplier
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    p, log_q = teacher.double().softmax(-1), s.log_softmax(-1)
    gold = teacher.argmax(-1) if token is None else token
    accepted = torch.minimum(p, log_q.exp()).sum(-1)
    loss = w.hard * F.nll_loss(log_q, gold, reduction="none") - w.soft * (p * log_q).sum(-1)
    loss = loss + w.tv * (1 - accepted) - w.lk * accepted.log()
    (grad,) = torch.autograd.grad((loss * scale.double()).sum(), raw)
    return loss.detach(), grad, gold


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.triton)])
def backend(request):
    if request.param == "triton":
        request.getfixturevalue("kernel_device")
    return request.param


@pytest.fixture
def device(backend, request):
    return request.getfixturevalue("kernel_device") if backend == "triton" else "cpu"


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.4, None), (0.7, 3.0)])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradient_are_the_formulas(shape, weights, multiplier, softcap, labelled, backend, device):
    student, teacher, token, scale = inputs(*shape, device=device)
    token = token if labelled else None
    loss, grad, gold = formula(student, teacher, token, scale, weights, multiplier, softcap)
    before = student.clone()
    found = distill(
        student, teacher, token, scale, weights, multiplier=multiplier, softcap=softcap, backend=backend
    )  # fmt: skip
    torch.testing.assert_close(found.loss.double(), loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(teacher.double(), grad, rtol=1e-4, atol=2e-6)
    assert torch.equal(found.gold, gold)
    assert torch.equal(student, before)
    padded = F.pad(student, (0, -shape[1] % 64), value=-torch.inf)
    assert torch.equal(found.peaks, padded.unflatten(-1, (-1, 64)).amax(-1))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_logits_err_by_one_rounding_of_the_gradient(dtype, weights, backend, device):
    student, teacher, _, scale = inputs(4, 700, dtype, device)
    gold = (teacher == teacher.amax(-1, keepdim=True)).int().argmax(-1)  # the first among equals
    loss, grad, _ = formula(student, teacher, gold, scale, weights, 1.0, None)
    found = distill(student, teacher, None, scale, weights, backend=backend)
    assert torch.equal(found.gold, gold)
    torch.testing.assert_close(found.loss.double(), loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(teacher.double(), grad, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(("vocab", "count"), [(1, 1), (50, 50), (64, 3), (700, 16), (9001, 64)])
def test_the_best_of_the_best_groups_are_the_best(vocab, count):
    student, teacher, _, scale = inputs(7, vocab)
    found = distill(student, teacher, None, scale, LossWeights(1.0, 0.0))
    expected = student.sort(descending=True).indices[:, :count]
    assert torch.equal(top_of_groups(student, found.peaks, count), expected)


def test_rows_far_apart_in_size_stay_finite(backend, device):
    student = torch.tensor([[200.0, -200.0, 0.0]], device=device)
    teacher = -student
    found = distill(student, teacher, None, torch.ones(1, device=device), LossWeights(1, 1, 1, 1), backend=backend)
    assert found.loss.isfinite().all()
    assert teacher.isfinite().all()


def test_an_empty_batch_is_fine():
    student, teacher, token, scale = (x[:0] for x in inputs(1, 70))
    found = distill(student, teacher, token, scale, LossWeights(1.0, 0.0))
    assert [list(x.shape) for x in found] == [[0], [0], [0, 2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher": torch.zeros(3, 49)}, "both .N, V. of one dtype"),
        ({"teacher": torch.zeros(3, 50, dtype=torch.float16)}, "both .N, V. of one dtype"),
        ({"scale": torch.zeros(2)}, r"float32 \[3\]"),
        ({"token": torch.zeros(3)}, r"int64 \[3\] or None"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    names = ("student", "teacher", "token", "scale")
    arguments = dict(zip(names, inputs(3, 50), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        distill(**arguments, weights=LossWeights(1.0, 0.0))


@pytest.mark.gpu
@pytest.mark.parametrize("weights", WEIGHTS)
def test_rows_of_a_real_vocabulary(weights):
    student, teacher, _, scale = inputs(300, 49152, torch.bfloat16, "cuda")
    original = teacher.double()
    gold = (teacher == teacher.amax(-1, keepdim=True)).int().argmax(-1)  # the first among equals
    loss, grad, _ = formula(student, teacher, gold, scale, weights, 1.0, None)
    found = distill(student, teacher, None, scale, weights, backend="triton")
    torch.testing.assert_close(found.loss.double(), loss, rtol=1e-5, atol=1e-4)
    # One rounding of each entry, which an fp32 softmax that errs by 1e-5 may tip over; where p and q are as near as
    # that, either may be the smaller one.
    p, q = original.softmax(-1), student.double().softmax(-1)
    clear = (p - q).abs() > 1e-4 * p
    torch.testing.assert_close(teacher.double()[clear], grad[clear], rtol=2**-7, atol=1e-6)
    best = student.gather(1, top_of_groups(student, found.peaks, 16))
    assert torch.equal(best, student.topk(16).values)  # ids may differ among equals
    assert torch.equal(found.gold, gold)
