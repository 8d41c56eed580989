"""Policy and value losses against naive loops over tokens.

The tests cover values, gradients, metrics, micro-batch splits and extreme log-probs.
"""

import math

import pytest
import torch

from tests.algorithms.differential import COMPARISONS, REJECT, check, run
from tests.algorithms.reference import random_case
from verlite.algorithms.aggregation import AGGREGATION_MODES, token_weights
from verlite.algorithms.losses import (
    PolicyLossInputs,
    entropy_sum,
    policy_loss,
    select_clip_cov,
    select_kl_cov,
)
from verlite.spec.catalog import LOSSES

NAN = math.nan


@pytest.mark.parametrize("name", LOSSES)
def test_agrees_with_the_naive_reference(name: str) -> None:
    check(COMPARISONS["Policy losses"][name])


def test_bypass_reinforce_agrees_with_the_naive_reference() -> None:
    check(COMPARISONS["Policy losses"]["bypass_mode, reinforce"])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_micro_batches_add_up(name: str, mode: str) -> None:
    case = random_case(5)
    loss, gradient, metrics = run(name, case, mode)
    for micro in (1, 2, 3):
        parts = [
            run(name, case, mode, slice(start, start + micro))
            for start in range(0, case.shape[0], micro)
        ]
        torch.testing.assert_close(sum(p[0] for p in parts), loss)
        torch.testing.assert_close(torch.cat([p[1] for p in parts]), gradient)
        for key, value in metrics.items():
            torch.testing.assert_close(sum(p[2][key] for p in parts), value)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("gap", [60.0, -60.0, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
def test_extremes_keep_value_and_gradient_finite(name: str, gap: float, advantage: float) -> None:
    case = random_case(1)
    case.mask[:, 0] = 1
    case.old[:, 0], case.log_prob[:, 0], case.advantages[:, 0] = (
        -70,
        -70 + gap if gap < math.inf else 0,
        advantage,
    )
    if gap == math.inf:
        case.old[:, 0] = -math.inf
    loss, gradient, metrics = run(name, case)
    assert (
        loss.isfinite()
        and gradient.isfinite().all()
        and all(m.isfinite() for m in metrics.values())
    )


@pytest.mark.parametrize("name", LOSSES)
def test_empty_mask_gives_zero_loss(name: str) -> None:
    case = random_case(2)
    case.mask[:] = 0
    loss, gradient, metrics = run(name, case)
    assert loss == 0 and (gradient == 0).all() and all(m == 0 for m in metrics.values())


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"clip_cov"}))
def test_on_policy_gradient_is_the_policy_gradient(name: str) -> None:
    case = random_case(4)
    case.log_prob = case.old.clone()
    advantage = (
        case.advantages.nan_to_num().sum(-1, keepdim=True).expand(case.shape)
    )  # geo_mean needs one advantage per row
    case.advantages = advantage.contiguous()
    _, gradient, metrics = run(
        name, case, "seq-mean-token-mean", extra={"rollout_correction": REJECT}
    )
    want = -advantage * token_weights(
        case.mask, "seq-mean-token-mean", tokens=1, sequences=int(case.mask.any(-1).sum())
    )
    torch.testing.assert_close(gradient, want)
    assert all(value == 0 for value in metrics.values())


def test_selection_by_covariance() -> None:
    log_prob = torch.tensor([[-1.0, -2.0, -3.0, -6.0, NAN]])
    advantages = torch.tensor([[4.0, 0.0, 2.0, -2.0, NAN]])
    mask = torch.tensor([[True, True, True, True, False]])
    # The means are -3 and 1, so the covariances are 6, -1, 0 and 9.
    assert select_kl_cov(log_prob, advantages, mask, {"kl_cov_ratio": 0.5}).tolist() == [
        [True, False, False, True, False]
    ]
    assert select_kl_cov(log_prob, advantages, mask, {}).tolist() == [
        [False, False, False, True, False]
    ]
    band = {"clip_cov_lb": 1.0, "clip_cov_ub": 8.0}
    assert select_clip_cov(log_prob, advantages, mask, band).tolist() == [
        [True, False, False, False, False]
    ]
    assert not select_clip_cov(log_prob, advantages, mask, band | {"clip_cov_ub": 2.0}).any()
    for ratio, count in ((0.0001, 1), (0.5, 2), (1.0, 2)):
        selected = select_clip_cov(
            log_prob, advantages, mask, {"clip_cov_ratio": ratio, "clip_cov_ub": 99.0}
        )
        assert selected.sum() == count and not selected[0, [1, 2, 4]].any()
    nothing = torch.zeros_like(mask)
    assert (
        not select_kl_cov(log_prob, advantages, nothing, {}).any()
        and not select_clip_cov(log_prob, advantages, nothing, {}).any()
    )


def test_clip_cov_does_not_select_clipped_tokens() -> None:
    log_prob, advantages = (
        torch.tensor([[-1.0, -2.0, -3.0, -6.0]]),
        torch.tensor([[3.0, -1.0, 1.0, -3.0]]),
    )
    mask, clipped = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[True, False, False, False]])
    settings = {"clip_cov_ratio": 1.0, "clip_cov_ub": 99.0}
    assert select_clip_cov(log_prob, advantages, mask, settings, clipped).tolist() == [
        [False, False, False, True]
    ]


@pytest.mark.parametrize("name,select", [("clip_cov", select_clip_cov), ("kl_cov", select_kl_cov)])
def test_losses_select_tokens_if_no_selection_is_given(name: str, select) -> None:
    case = random_case(12)
    settings = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.0, "clip_cov_ub": 1e9, "kl_cov_ratio": 0.3}
    chosen = select(case.log_prob.clamp(min=-1e4), case.advantages, case.mask.bool(), settings)
    assert chosen.any()
    own = run(name, case, extra=settings, clip_low=1.0, clip_high=1e9)
    given = run(name, case, extra={"selected": lambda case: chosen}, clip_low=1.0, clip_high=1e9)
    torch.testing.assert_close(own[1], given[1])
    torch.testing.assert_close(own[0], given[0])


def test_dual_clip_hand_values() -> None:
    ratios = torch.tensor([[0.5, 1.0, 1.5, 0.5, 1.0, 1.5, 4.0]])
    log_prob = ratios.log().requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]])
    ones = torch.ones(1, 7)
    loss, metrics = policy_loss(
        "vanilla",
        PolicyLossInputs(
            log_prob=log_prob,
            old_log_prob=torch.zeros(1, 7),
            advantages=advantages,
            response_mask=ones,
            weights=ones,
            tokens=7,
        ),
    )
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 - 1.0 - 1.2 + 0.8 + 1.0 + 1.5 + 3.0)
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-0.5, -1.0, 0.0, 0.0, 1.0, 1.5, 0.0]]))
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 7)
    assert metrics["actor/pg_clipfrac_lower"].item() == pytest.approx(1 / 7)


def test_errors() -> None:
    one = torch.ones(1, 1)
    good = dict(
        log_prob=one, old_log_prob=one, advantages=one, response_mask=one, weights=one, tokens=1
    )
    with pytest.raises(ValueError, match="unknown policy loss 'vanila': did you mean vanilla"):
        policy_loss("vanila", PolicyLossInputs(**good))
    with pytest.raises(
        ValueError, match=r"advantages has shape \(1, 2\), but log_prob has \(1, 1\)"
    ):
        policy_loss("vanilla", PolicyLossInputs(**good | {"advantages": torch.ones(1, 2)}))


@pytest.mark.parametrize("name", COMPARISONS["Value loss and entropy"])
def test_value_loss_agrees_with_the_naive_reference(name: str) -> None:
    check(COMPARISONS["Value loss and entropy"][name])


def test_entropy_counts_trainable_tokens_only() -> None:
    entropy = torch.tensor([[1.0, NAN], [3.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [0, 1]])
    total = entropy_sum(entropy, mask, token_weights(mask, "token-mean", tokens=2, sequences=2))
    total.backward()
    assert total.item() == 3.0 and entropy.grad.tolist() == [[0.5, 0], [0, 0.5]]
