"""Importance weights, rejection and metrics against naive loops, and errors of settings."""

import math

import pytest
import torch

from tests.algorithms.differential import COMPARISONS, CORRECTIONS, check
from tests.algorithms.reference import Case, random_case
from verlite.algorithms.rollout_correction import correct_rollout
from verlite.spec.correction import PRESETS, RolloutCorrection


def correct(case: Case, settings: RolloutCorrection):
    """The trainer's log-probs are case.old, the rollout engine's are case.log_prob."""
    return correct_rollout(case.old, case.log_prob, case.mask, settings)


@pytest.mark.parametrize(
    "name", [name for name, settings in CORRECTIONS.items() if settings.rollout_is]
)
def test_weights_agree_with_the_naive_reference(name: str) -> None:
    check(COMPARISONS["Rollout correction"][name])


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, settings in CORRECTIONS.items()
        if settings.rollout_rs and not settings.rollout_is
    ],
)
def test_rejection_agrees_with_the_naive_reference(name: str) -> None:
    check(COMPARISONS["Rollout correction"][name])


def test_rules_combine_and_a_single_ratio_bound_is_symmetric() -> None:
    log_ratio = torch.tensor([[0.1, -0.1, 0.5], [0.0, 0.0, 0.0], [-0.5, 0.0, 0.0]])
    rollout = torch.full((3, 3), -5.0)
    settings = RolloutCorrection(
        rollout_rs="token_k1, seq_max_k2", rollout_rs_threshold="1.2, 0.1251"
    )
    _, mask, metrics = correct_rollout(rollout + log_ratio, rollout, torch.ones(3, 3), settings)
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    both = RolloutCorrection(rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="1.2,0.12")
    _, mask, metrics = correct_rollout(rollout + log_ratio, rollout, torch.ones(3, 3), both)
    assert mask.tolist() == [[0, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == pytest.approx(2 / 9)
    assert metrics["rollout_corr/rollout_rs_seq_max_k2_masked_fraction"] == pytest.approx(6 / 9)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/rollout_rs_seq_fully_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/rollout_rs_token_k1_seq_masked_fraction"] == pytest.approx(2 / 3)


def test_metrics_equal_verl_values() -> None:
    # Two rows of two tokens. w is 1 and 3 in the first row, 0.25 and 1 in the second.
    rollout = torch.full((2, 2), -5.0)
    old = rollout + torch.tensor([[1.0, 3.0], [0.25, 1.0]]).log()
    mask = torch.ones(2, 2)

    tis = correct_rollout(old, rollout, mask, RolloutCorrection("token", 2.0))[2]
    # The applied weights are 1, 2, 0.25 and 1. Their row means are 1.5 and 0.625.
    assert tis["rollout_corr/rollout_is_mean"] == pytest.approx(1.0625)
    assert tis["rollout_corr/rollout_is_max"] == pytest.approx(2)
    assert tis["rollout_corr/rollout_is_min"] == pytest.approx(0.25)
    assert tis["rollout_corr/rollout_is_raw_max"] == pytest.approx(3)
    assert tis["rollout_corr/rollout_is_ratio_fraction_high"] == 0.25
    assert tis["rollout_corr/rollout_is_ratio_fraction_low"] == 0.25
    assert tis["rollout_corr/rollout_is_seq_mean"] == pytest.approx(1.0625)
    assert tis["rollout_corr/rollout_is_seq_std"] == pytest.approx(0.875 / 2**0.5)
    assert tis["rollout_corr/rollout_is_seq_max_deviation"] == pytest.approx(0.5)
    assert "rollout_corr/rollout_is_oob_ratio" not in tis

    icepop = correct_rollout(old, rollout, mask, RolloutCorrection("token", "0.5_2.0"))[2]
    assert icepop["rollout_corr/rollout_is_oob_ratio"] == 0.5
    assert icepop["rollout_corr/rollout_is_min"] == 0
    assert icepop["rollout_corr/rollout_is_mean"] == pytest.approx(0.5)

    sequence = correct_rollout(old, rollout, mask, RolloutCorrection("sequence", 2.0))[2]
    # The products are 3 and 0.25. 3 is truncated to 2 in the mean, but not in the maximum.
    assert sequence["rollout_corr/rollout_is_max"] == pytest.approx(3)
    assert sequence["rollout_corr/rollout_is_mean"] == pytest.approx(1.125)
    assert sequence["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5
    assert sequence["rollout_corr/rollout_is_seq_fraction_low"] == 0.5

    rule = RolloutCorrection(rollout_rs="token_k1", rollout_rs_threshold=2.0)
    rejection = correct_rollout(old, rollout, mask, rule)[2]
    # k1 = -log w is 0, -log 3, log 4 and 0.
    prefix = "rollout_corr/rollout_rs_token_k1"
    assert rejection[f"{prefix}_max"] == pytest.approx(math.log(4))
    assert rejection[f"{prefix}_min"] == pytest.approx(-math.log(3))
    assert rejection[f"{prefix}_fraction_high"] == rejection[f"{prefix}_fraction_low"] == 0.25
    assert rejection[f"{prefix}_seq_max"] == pytest.approx(math.log(4) / 2)
    assert rejection[f"{prefix}_masked_fraction"] == 0.5
    assert rejection["rollout_corr/rollout_rs_seq_masked_fraction"] == 1
    assert rejection["rollout_corr/rollout_rs_seq_fully_masked_fraction"] == 0


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, settings in CORRECTIONS.items()
        if not settings.rollout_rs and not settings.rollout_is
    ],
)
def test_metrics_agree_with_the_naive_reference(name: str) -> None:
    check(COMPARISONS["Rollout correction"][name])


def test_empty_mask_gives_zero_metrics() -> None:
    case = random_case(3)
    case.mask[:] = 0
    for settings in PRESETS.values():
        weights, mask, metrics = correct(case, settings)
        assert not mask.any() and (weights is None or not weights.any())
        assert set(metrics.values()) == {0.0}, metrics


def test_equal_log_probs_need_no_correction() -> None:
    case = random_case(3)
    case.log_prob = case.old.clone()
    for settings in PRESETS.values():
        weights, mask, metrics = correct(case, settings)
        assert torch.equal(mask, case.mask)
        assert weights is None or torch.equal(weights, case.mask.float())
        assert metrics["rollout_corr/kl"] == metrics["rollout_corr/chi2_seq"] == 0


@pytest.mark.parametrize(
    "settings,message",
    [
        (dict(rollout_is="tokens"), "rollout_is=tokens: choose token"),
        (dict(rollout_is_threshold=-1), "rollout_is_threshold=-1: write one positive number"),
        (dict(rollout_is_threshold="2_0.5"), "low below high"),
        (dict(rollout_rs="token_k1"), "needs rollout_rs_threshold"),
        (
            dict(rollout_rs="token_k4", rollout_rs_threshold=1),
            "rollout_rs=token_k4: choose from token_k1",
        ),
        (dict(rollout_rs="token_k3", rollout_rs_threshold="0.1_1"), "upper bound only"),
        (dict(rollout_rs="token_k1,token_k2", rollout_rs_threshold="1,2,3"), "3 for the 2 entries"),
        (
            dict(rollout_rs="token_k1", rollout_rs_threshold="0_2"),
            "lower bound of a ratio must be above 0",
        ),
        (dict(rollout_rs="token_k1", rollout_rs_threshold="much"), "rollout_rs_threshold=much"),
        (dict(bypass_mode=True, loss_type="dpo"), "loss_type=dpo: choose ppo_clip or reinforce"),
        (dict(bypass_mode=True, rollout_is_batch_normalize=True), "turn one of them off"),
    ],
)
def test_invalid_settings_raise(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutCorrection(**settings)
