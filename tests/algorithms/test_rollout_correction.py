"""Importance weights, rejection and metrics against naive loops; settings that make no sense are refused."""

import math

import pytest
import torch

from tests.algorithms import reference
from tests.algorithms.reference import Case, random_case
from verlite.algorithms.rollout_correction import correct_rollout, off_policy_metrics
from verlite.config.correction import PRESETS, REJECTIONS, RolloutCorrection

BOUNDS = {"k1": ("0.6_1.4", 0.6, 1.4), "k2": ("0.3", 0, 0.3), "k3": ("0.2", 0, 0.2)}


def correct(case: Case, settings: RolloutCorrection):
    """The trainer is case.old, the engine case.log_prob."""
    return correct_rollout(case.old, case.log_prob, case.mask, settings)


def tokens(case: Case) -> list[tuple[int, int]]:
    return [(i, t) for i, t in case.mask.nonzero().tolist()]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [2.0, "0.5_1.5"])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_agree_with_the_naive_reference(level: str, threshold: float | str, normalize: bool) -> None:
    for seed in range(200):
        case = random_case(seed)
        weights, mask, metrics = correct(case, RolloutCorrection(level, threshold, normalize))
        want = torch.zeros(case.shape, dtype=torch.float64)
        for i in range(case.shape[0]):
            for t, ratio in reference.importance(case, i, level, case.old, case.log_prob).items():
                want[i, t] = min(ratio, 2.0) if threshold == 2.0 else ratio * (0.5 <= ratio <= 1.5)
        raw = want.clone()
        if normalize and tokens(case):
            if level == "token":
                mean = sum(float(want[i, t]) for i, t in tokens(case)) / len(tokens(case))
            else:
                rows = sorted({i for i, _ in tokens(case)})
                mean = sum(float(want[i].max()) for i in rows) / len(rows)
            want = want / (mean if mean > 1e-8 else 1.0)
        torch.testing.assert_close(weights.double(), want, rtol=1e-4, atol=1e-6, msg=f"seed {seed}")
        assert torch.equal(mask, case.mask)
        if tokens(case):
            kept = [float(raw[i, t]) for i, t in tokens(case)]
            squares = sum(x * x for x in kept) / len(kept)
            size = (sum(kept) / len(kept)) ** 2 / max(squares, 1e-12)
            assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(size, rel=1e-3, abs=1e-6)
            ratios = [r for i in range(case.shape[0]) for r in reference.importance(case, i, level, case.old, case.log_prob).values()]
            low, high = (0.5, 2.0) if threshold == 2.0 else (0.5, 1.5)
            assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-3)
            assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(max(ratios), rel=1e-3)
            assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(min(ratios), rel=1e-3)
            assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(sum(r > high for r in ratios) / len(ratios))
            assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(sum(r < low for r in ratios) / len(ratios))


@pytest.mark.parametrize("rule", REJECTIONS)
def test_rejection_agrees_with_the_naive_reference(rule: str) -> None:
    threshold, low, high = BOUNDS[rule[-2:]]
    for seed in range(200):
        case = random_case(seed)
        weights, mask, metrics = correct(case, RolloutCorrection(rollout_rs=rule, rollout_rs_threshold=threshold))
        want = case.mask.clone()
        for i in range(case.shape[0]):
            for t, gone in reference.rejected(case, i, rule, low, high, case.old, case.log_prob).items():
                want[i, t] = int(not gone)
        assert weights is None and torch.equal(mask, want), f"seed {seed}"
        total, rows = int(case.mask.sum()), int(case.mask.any(-1).sum())
        share = 1 - int(want.sum()) / total if total else 0
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share)
        assert metrics[f"rollout_corr/rollout_rs_{rule}_masked_fraction"] == pytest.approx(share)
        row_share = 1 - int(want.any(-1).sum()) / rows if rows else 0
        assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(row_share)


def test_rules_combine_and_a_single_ratio_bound_is_symmetric() -> None:
    log_ratio = torch.tensor([[0.1, -0.1, 0.5], [0.0, 0.0, 0.0], [-0.5, 0.0, 0.0]])
    rollout = torch.full((3, 3), -5.0)
    settings = RolloutCorrection(rollout_rs="token_k1, seq_max_k2", rollout_rs_threshold="1.2, 0.1251")
    _, mask, metrics = correct_rollout(rollout + log_ratio, rollout, torch.ones(3, 3), settings)
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    both = RolloutCorrection(rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="1.2,0.12")
    _, mask, metrics = correct_rollout(rollout + log_ratio, rollout, torch.ones(3, 3), both)
    assert mask.tolist() == [[0, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == pytest.approx(2 / 9)
    assert metrics["rollout_corr/rollout_rs_seq_max_k2_masked_fraction"] == pytest.approx(6 / 9)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)


def test_metrics_agree_with_the_naive_reference() -> None:
    for seed in range(200):
        case = random_case(seed)
        got = off_policy_metrics(case.old, case.log_prob, case.mask)
        d = {(i, t): float(case.old[i, t]) - max(float(case.log_prob[i, t]), -1e4) for i, t in tokens(case)}
        if not d:
            assert all(math.isfinite(v) for v in got.values())
            continue
        rows: dict[int, list[tuple[float, float]]] = {}
        for i, t in d:
            rows.setdefault(i, []).append((float(case.old[i, t]), max(float(case.log_prob[i, t]), -1e4)))
        trained = [-sum(a for a, _ in row) / len(row) for row in rows.values()]
        sampled = [-sum(b for _, b in row) / len(row) for row in rows.values()]
        gap = [a - b for a, b in zip(trained, sampled, strict=True)]

        def limit(x: float) -> float:
            return min(max(x, -20), 20)

        def mean(x: list[float]) -> float:
            return sum(x) / len(x)

        want = {
            "kl": mean([-x for x in d.values()]),
            "k3_kl": mean([math.exp(limit(x)) - 1 - limit(x) for x in d.values()]),
            "training_ppl": mean([math.exp(min(x, 20)) for x in trained]),
            "training_log_ppl": mean(trained),
            "rollout_ppl": mean([math.exp(min(x, 20)) for x in sampled]),
            "rollout_log_ppl": mean(sampled),
            "log_ppl_diff": mean(gap),
            "log_ppl_abs_diff": mean([abs(x) for x in gap]),
            "log_ppl_diff_max": max(gap),
            "log_ppl_diff_min": min(gap),
            "ppl_ratio": mean([math.exp(limit(x)) for x in gap]),
            "chi2_token": mean([math.exp(2 * limit(x)) for x in d.values()]) - 1,
            "chi2_seq": mean([math.exp(2 * limit(sum(a - b for a, b in row))) for row in rows.values()]) - 1,
        }
        assert got == pytest.approx(want, rel=2e-3, abs=1e-4), f"seed {seed}"


def test_equal_engines_need_no_correction() -> None:
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
        (dict(rollout_rs="token_k4", rollout_rs_threshold=1), "rollout_rs=token_k4: choose from token_k1"),
        (dict(rollout_rs="token_k3", rollout_rs_threshold="0.1_1"), "upper bound only"),
        (dict(rollout_rs="token_k1,token_k2", rollout_rs_threshold="1,2,3"), "3 for the 2 entries"),
        (dict(rollout_rs="token_k1", rollout_rs_threshold="0_2"), "lower bound of a ratio must be above 0"),
        (dict(rollout_rs="token_k1", rollout_rs_threshold="much"), "rollout_rs_threshold=much"),
        (dict(bypass_mode=True, loss_type="dpo"), "loss_type=dpo: choose ppo_clip or reinforce"),
        (dict(bypass_mode=True, rollout_is_batch_normalize=True), "turn one of them off"),
    ],
)
def test_settings_that_make_no_sense(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutCorrection(**settings)
