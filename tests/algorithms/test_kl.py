"""KL estimators, the KL penalty and its controllers.

Expected gradients are exact sums over the actions of a small softmax.
"""

import math

import pytest
import torch

from tests.algorithms.differential import COMPARISONS, check
from verlite.algorithms.kl import (
    KL_KINDS,
    KLController,
    kl_estimate,
    kl_loss,
)

VALUES = {  # formulas in d
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: min(math.exp(min(max(-d, -20), 20)) - 1 - min(max(-d, -20), 20), 10),
}
NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def base(kind: str) -> str:
    kind = kind.removesuffix("+")
    return NAMES.get(kind, kind)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_values(kind: str) -> None:
    d = torch.tensor([0.0, 1e-3, -1e-3, 0.5, -0.5, 2.0, -2.0, 5.0, -5.0], dtype=torch.float64)
    got = kl_estimate(d - 7, torch.full_like(d, -7), kind)
    torch.testing.assert_close(
        got, torch.tensor([VALUES[base(kind)](x) for x in d.tolist()], dtype=torch.float64)
    )


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize(
    "new,ref",
    [(-60, 0), (0, -60), (-5000, 0), (-math.inf, -1), (-1, -math.inf), (-math.inf, -math.inf)],
)
def test_extremes_keep_value_and_gradient_finite(kind: str, new: float, ref: float) -> None:
    log_prob = torch.tensor([float(new)], requires_grad=True)
    value = kl_estimate(log_prob, torch.tensor([float(ref)]), kind)
    value.sum().backward()
    assert value.isfinite().all() and log_prob.grad.isfinite().all()


def test_k3_is_accurate_near_zero() -> None:
    d = torch.tensor([1e-3, -2e-3])
    torch.testing.assert_close(
        kl_estimate(d, torch.zeros(2), "k3"), d.square() / 2 - d**3 / 6, rtol=2e-4, atol=0
    )


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'.*low_var_kl"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def expected_gradient(kind: str) -> dict[str, torch.Tensor]:
    """Return gradients with respect to the logits of a softmax over 5 actions.

    Expectations are exact sums in float64.
    """
    torch.manual_seed(0)
    logits, ref = (
        torch.randn(2, 5, dtype=torch.float64).mul(0.7).unbind()
    )  # k3 stays below its upper limit of 10
    ref = ref.log_softmax(0)
    sampling = logits.softmax(0)

    def grad(loss) -> torch.Tensor:
        x = logits.clone().requires_grad_()
        loss(x.log_softmax(0)).backward()
        return x.grad

    return {
        "in loss": grad(lambda lp: (sampling * kl_estimate(lp, ref, kind)).sum()),
        "in reward": grad(lambda lp: (sampling * kl_estimate(lp.detach(), ref, kind) * lp).sum()),
        "KL(pi||ref)": grad(lambda lp: (lp.exp() * (lp - ref)).sum()),
        "KL(ref||pi)": grad(lambda lp: (ref.exp() * (ref - lp)).sum()),
    }


def test_gradient_identities() -> None:
    k1, k2, k3 = (expected_gradient(kind) for kind in ("k1", "k2", "k3"))
    torch.testing.assert_close(k1["in loss"], torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(k1["in reward"], k1["KL(pi||ref)"])
    torch.testing.assert_close(k2["in loss"], k2["KL(pi||ref)"])
    torch.testing.assert_close(k3["in loss"], k3["KL(ref||pi)"])
    assert (k3["in loss"] - k3["KL(pi||ref)"]).abs().max() > 0.05
    for kind in ("k1+", "k3+", "low_var_kl+", "abs+"):
        torch.testing.assert_close(expected_gradient(kind)["in loss"], k2["KL(pi||ref)"])


def test_kl_loss_ignores_masked_tokens() -> None:
    log_prob = torch.tensor([[-1.0, math.nan], [math.inf, -2.0]], requires_grad=True)
    mask, weights = torch.tensor([[1, 0], [0, 1]]), torch.tensor([[0.5, 0.0], [0.0, 0.25]])
    loss = kl_loss(log_prob, torch.tensor([[-3.0, 1.0], [math.nan, -2.5]]), mask, weights, "k2")
    loss.backward()
    assert loss.item() == 0.5 * 2.0 + 0.25 * 0.125
    assert log_prob.grad.tolist() == [[0.5 * 2.0, 0.0], [0.0, 0.25 * 0.5]]


@pytest.mark.parametrize("kind", KL_KINDS)
def test_agrees_with_the_naive_reference(kind: str) -> None:
    check(COMPARISONS["KL in the loss"][kind])


@pytest.mark.parametrize("kind", COMPARISONS["KL in the reward"])
def test_penalty_agrees_with_the_naive_reference(kind: str) -> None:
    check(COMPARISONS["KL in the reward"][kind])


def test_controllers() -> None:
    adaptive = KLController(0.1, target=2.0, horizon=100)
    adaptive.update(current_kl=2.2, n_steps=10)  # error 0.1
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    adaptive.update(current_kl=100.0, n_steps=10)  # error clipped to 0.2
    assert adaptive.value == pytest.approx(0.1 * 1.01 * 1.02)
    adaptive.update(current_kl=0.0, n_steps=10)
    assert adaptive.value == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)
    resumed = KLController(9.0, target=2.0, horizon=100)
    resumed.load_state_dict(adaptive.state_dict())
    assert resumed == adaptive
    fixed = KLController(0.1)
    fixed.update(100.0, 10)
    assert fixed.value == 0.1 and fixed.state_dict() == {"value": 0.1}
