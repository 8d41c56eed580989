"""The distillation term equals the closed form of the reverse KL, enumerated over a vocabulary of
5 tokens in float64, and loops over tokens."""

import math

import pytest
import torch

from verlite.algorithms.distillation import distillation_loss
from verlite.algorithms.losses import PolicyLossInputs, gspo, vanilla
from verlite.spec.roles import DistillationSpec

V = 5
STUDENT = [0.3, -1.2, 0.0, 2.0, 0.7]
TEACHER = [1.0, 0.4, -2.0, 0.5, 0.1]


def spec(loss_mode="k1", gradient=True, **values):
    settings = {"log_prob_min_clamp": None, "loss_max_clamp": None, **values}
    return DistillationSpec(loss_mode, gradient, True, 1.0, **settings)


def inputs(log_prob, weights=None, mask=None, old=None, **values):
    """Return one micro-batch [b, R] whose tokens are all trained."""
    mask = torch.ones(log_prob.shape, dtype=torch.int64) if mask is None else mask
    weights = mask.to(log_prob.dtype) if weights is None else weights
    return PolicyLossInputs(
        log_prob=log_prob,
        old_log_prob=log_prob.detach() if old is None else old,
        advantages=torch.full_like(log_prob, 99.0),  # of the task, not used
        response_mask=mask,
        weights=weights,
        tokens=int(mask.sum()),
        **values,
    )


def reverse_kl(student, teacher):
    """Return KL(student || teacher) of logits [V], written out."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    return sum(p[i] * (p[i].log() - q[i].log()) for i in range(V))


def expected_gradient(settings, function=vanilla):
    """Return the gradient of the term in the logits, in expectation over all tokens: each token is
    one row, with its probability as weight."""
    logits = torch.tensor(STUDENT, dtype=torch.float64, requires_grad=True)
    log_prob = logits.log_softmax(-1)[:, None]
    teacher = torch.tensor(TEACHER, dtype=torch.float64).log_softmax(-1)[:, None]
    weights = log_prob.detach().exp()
    loss, metrics = distillation_loss(settings, inputs(log_prob, weights), teacher, function)
    loss.backward()
    return logits.grad, metrics


def closed_form(divergence):
    logits = torch.tensor(STUDENT, dtype=torch.float64, requires_grad=True)
    divergence(logits, torch.tensor(TEACHER, dtype=torch.float64)).backward()
    return logits.grad


@pytest.mark.parametrize(
    "settings", [spec("k1"), spec("kl"), spec("k2", False), spec("k3+", False), spec("k1+", False)]
)
def test_expected_gradient_is_that_of_the_reverse_kl(settings):
    found, _ = expected_gradient(settings)
    assert found == pytest.approx(closed_form(reverse_kl), abs=1e-12)
    assert found.abs().max() > 0.1


def test_gspo_trains_the_same_gradient_as_one_token_responses():
    found, _ = expected_gradient(spec("k1"), gspo)
    assert found == pytest.approx(closed_form(reverse_kl), abs=1e-12)


def test_k3_as_loss_is_the_forward_kl_and_k1_nothing():
    found, _ = expected_gradient(spec("k3", False))
    assert found == pytest.approx(closed_form(lambda p, q: reverse_kl(q, p)), abs=1e-12)
    nothing, _ = expected_gradient(spec("k1", False))
    assert nothing == pytest.approx(torch.zeros(V, dtype=torch.float64), abs=1e-12)


def test_reverse_kl_of_hand_worked_numbers():
    """Two tokens, p = 3/4 and 1/4, q = 1/2 each. d KL / d logit = p (log p/q - KL)."""
    logits = torch.tensor([math.log(3), 0.0], dtype=torch.float64, requires_grad=True)
    log_prob = logits.log_softmax(-1)[:, None]
    teacher = torch.full((2, 1), math.log(0.5), dtype=torch.float64)
    loss, metrics = distillation_loss(
        spec(), inputs(log_prob, log_prob.detach().exp()), teacher, vanilla
    )
    loss.backward()
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl == pytest.approx(0.1308, abs=1e-4)
    first = 0.75 * (math.log(1.5) - kl)
    assert logits.grad.tolist() == pytest.approx([first, -first], abs=1e-12)
    assert metrics["distillation/kl"].item() == pytest.approx(
        (math.log(1.5) + math.log(0.5)) / 2, abs=1e-12
    )


def test_policy_gradient_clips_as_the_actor():
    """Token 1: the teacher prefers it, and its ratio e^0.5 is above 1.2, so it has no gradient.
    Token 2: the teacher does not, ratio 1."""
    log_prob = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-0.5, -4.0]], dtype=torch.float64)
    old = torch.tensor([[-1.5, -2.0]], dtype=torch.float64)
    loss, metrics = distillation_loss(spec(), inputs(log_prob, old=old), teacher, vanilla)
    loss.backward()
    assert log_prob.grad.tolist() == [[0.0, 2.0]]
    assert loss.item() == pytest.approx(-0.5 * 1.2 + 2.0)
    assert metrics["distillation/loss"].item() == loss.item()
    assert metrics["distillation/pg_clipfrac"].item() == 0.5
    assert metrics["distillation/abs_loss"].item() == pytest.approx((0.5 + 2.0) / 2)


def test_clamps():
    """At least -3: the teacher's -9 counts as -3, and so does the policy's -5, without gradient. At
    most 0.75: 2.5 and -1 count as 0.75 and -0.75, without gradient."""
    log_prob = torch.tensor([[-1.0, -0.5, -5.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-1.5, -9.0, -2.0]], dtype=torch.float64)
    least = spec("k1", False, log_prob_min_clamp=-3.0)
    loss, metrics = distillation_loss(least, inputs(log_prob), teacher, vanilla)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 + 2.5 - 1.0)
    assert log_prob.grad.tolist() == [[1.0, 1.0, 0.0]]
    log_prob.grad = None
    clamped = spec("k1", False, log_prob_min_clamp=-3.0, loss_max_clamp=0.75)
    loss, metrics = distillation_loss(clamped, inputs(log_prob), teacher, vanilla)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 + 0.75 - 0.75)
    assert log_prob.grad.tolist() == [[1.0, 0.0, 0.0]]
    assert metrics["distillation/kl"].item() == pytest.approx((0.5 + 8.5 - 3.0) / 3)


@pytest.mark.parametrize("gradient", [True, False])
def test_masked_tokens_change_nothing(gradient):
    """Whatever the teacher says about them, and for a token that it thinks impossible."""
    mask = torch.tensor([[1, 0, 1]])
    log_prob = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-1.5, float("nan"), float("-inf")]], dtype=torch.float64)
    limited = spec("k2", gradient, loss_max_clamp=2.0)
    loss, metrics = distillation_loss(limited, inputs(log_prob, mask=mask), teacher, vanilla)
    loss.backward()
    assert math.isfinite(loss.item()) and all(math.isfinite(v) for v in metrics.values())
    assert log_prob.grad[0, 1] == 0 and log_prob.grad[0, 0] != 0
    assert torch.isfinite(log_prob.grad).all()


def test_loss_form_ignores_importance_weights_and_policy_gradient_has_them():
    """As the KL to the reference does, and as the policy loss does."""
    log_prob = torch.tensor([[-1.0]], dtype=torch.float64)
    teacher = torch.tensor([[-2.0]], dtype=torch.float64)
    weighted = inputs(log_prob, rollout_is_weights=torch.tensor([[0.5]], dtype=torch.float64))
    assert distillation_loss(spec("k1", False), weighted, teacher, vanilla)[0].item() == 1.0
    assert distillation_loss(spec("k1", True), weighted, teacher, vanilla)[0].item() == 0.5
