"""Policy and value losses against naive token loops: values, gradients, metrics, micro-batch splits, extremes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.algorithms import reference
from tests.algorithms.reference import Case, random_case
from verlite.algorithms.aggregation import AGGREGATION_MODES, token_weights
from verlite.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLossInputs,
    entropy_sum,
    policy_loss,
    select_clip_cov,
    select_kl_cov,
    value_loss,
)
from verlite.config.correction import RolloutCorrection

NAN = math.nan
SETTINGS = [dict(clip_low=0.2, clip_high=0.2, clip_c=3.0), dict(clip_low=0.1, clip_high=0.3, clip_c=1.5)]
REJECT = RolloutCorrection("token", 1.5, rollout_rs="seq_mean_k1,token_k3", rollout_rs_threshold="0.5_2.0,3", bypass_mode=True)
EXTRA = {
    "bypass_mode": {"rollout_correction": REJECT},
    "clip_cov": {"selected": lambda case: case.values.nan_to_num() > 0.8},
    "kl_cov": {"selected": lambda case: case.values.nan_to_num() > 0.8, "ppo_kl_coef": 0.7},
}


def run(name: str, case: Case, mode: str = "token-mean", rows: slice = slice(None), is_weights=None, extra=None, **settings):
    """Loss, gradient in log_prob, metrics; `rows` is a micro-batch of the case."""
    log_prob = case.log_prob[rows].clone().requires_grad_()
    counts = {"tokens": int(case.mask.sum()), "sequences": int(case.mask.any(-1).sum())}
    extra = {k: v(case)[rows] if callable(v) else v for k, v in (EXTRA.get(name, {}) if extra is None else extra).items()}
    loss, metrics = policy_loss(name, PolicyLossInputs(
        log_prob=log_prob, old_log_prob=case.old[rows], advantages=case.advantages[rows], response_mask=case.mask[rows],
        weights=token_weights(case.mask[rows], mode, scale=7.0, **counts), tokens=counts["tokens"], loss_agg_mode=mode,
        rollout_is_weights=None if is_weights is None else is_weights[rows], extra=extra, **settings,
    ))  # fmt: skip
    loss.backward()
    return loss.detach(), log_prob.grad, metrics


def reference_row(name: str, case: Case, i: int, weights: dict[int, float], s: dict) -> tuple[float, dict[int, float]]:
    """A row's part of the loss, and the derivative for each of its tokens; weights by column."""
    if name == "gspo":
        return reference.gspo_row(case, i, weights, s)
    if name == "geo_mean":
        return reference.geo_mean_row(case, i, weights, s)
    if name == "bypass_mode":
        rules = (("seq_mean_k1", 0.5, 2.0), ("token_k3", 0, 3))
        gone = [reference.rejected(case, i, rule, low, high, case.log_prob, case.old) for rule, low, high in rules]
        weights = {t: 0.0 if any(g[t] for g in gone) else w for t, w in weights.items()}
    selected = case.values.nan_to_num() > 0.8
    ratios = reference.importance(case, i, "token", case.log_prob, case.old)
    loss, slopes = 0.0, {}
    for t, w in weights.items():
        new, old, advantage = (float(x[i, t]) for x in (case.log_prob, case.old, case.advantages))
        match name:
            case "vanilla":
                value, slope = reference.ppo_token(new, old, advantage, s, worst=s["clip_c"])
            case "sapo":
                value, slope = reference.sapo_token(new, old, advantage, s)
            case "gpg":
                value, slope = reference.weighted_gradient_token(1.0, new, advantage)
            case "cispo":
                value, slope = reference.cispo_token(new, old, advantage, s)
            case "dppo_tv" | "dppo_kl":
                value, slope = reference.dppo_token(new, old, advantage, s, name.removeprefix("dppo_"))
            case "clip_cov":
                value, slope = (0.0, 0.0) if selected[i, t] else reference.ppo_token(new, old, advantage, s)
            case "kl_cov":
                value, slope = reference.kl_cov_token(new, old, advantage, s | {"ppo_kl_coef": 0.7}, bool(selected[i, t]))
            case "bypass_mode" if s.get("loss_type") == "reinforce":
                value, slope = reference.weighted_gradient_token(min(ratios[t], 1.5), new, advantage)
            case "bypass_mode":
                value, slope = reference.ppo_token(new, old, advantage, s, worst=s["clip_c"])
            case _:
                raise AssertionError(f"no reference for {name}")
        loss, slopes[t] = loss + w * value, w * slope
    return loss, slopes


def compare(name: str, seed: int, extra: dict | None = None, **reference_settings) -> None:
    case, settings, mode = random_case(seed), SETTINGS[seed % 2], AGGREGATION_MODES[seed % 5]
    is_weights = torch.rand(case.shape, generator=torch.Generator().manual_seed(seed)) if seed % 3 == 0 else None
    loss, gradient, _ = run(name, case, mode, is_weights=is_weights, extra=extra, **settings)
    want, size, slopes = 0.0, 0.0, np.zeros(case.shape)
    for i, row_weight in enumerate(reference.row_weights(case.mask, mode, 7.0)):
        weights = {
            t: row_weight * (1 if is_weights is None else float(is_weights[i, t])) for t in case.mask[i].nonzero().flatten().tolist()
        }
        if weights:
            row, row_slopes = reference_row(name, case, i, weights, settings | reference_settings)
            want, size = want + row, size + abs(row)
            slopes[i, list(row_slopes)] = list(row_slopes.values())
    np.testing.assert_allclose(loss, want, rtol=1e-4, atol=1e-5 * (1 + size), err_msg=f"loss, seed {seed}")
    np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=1e-5 * (1 + abs(slopes).max(initial=0)), err_msg=f"gradient, seed {seed}")


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_agrees_with_the_naive_reference(name: str) -> None:
    for seed in range(200):
        compare(name, seed)


def test_bypass_reinforce_agrees_with_the_naive_reference() -> None:
    for seed in range(200):
        compare("bypass_mode", seed, {"rollout_correction": replace(REJECT, loss_type="reinforce")}, loss_type="reinforce")


def test_vanilla_metrics_agree_with_the_naive_reference() -> None:
    for seed in range(200):
        case, settings = random_case(seed), SETTINGS[seed % 2]
        metrics = run("vanilla", case, **settings)[2]
        clipped = clipped_low = divergence = count = 0.0
        for i, t in case.mask.nonzero().tolist():
            new, old, advantage = (float(x[i, t]) for x in (case.log_prob, case.old, case.advantages))
            ratio = math.exp(reference.log_ratio(new, old))
            clipped += -advantage * min(max(ratio, 1 - settings["clip_low"]), 1 + settings["clip_high"]) > -advantage * ratio
            clipped_low += advantage < 0 and ratio > settings["clip_c"]
            divergence, count = divergence - reference.log_ratio(new, old), count + 1
        for key, total in (("pg_clipfrac", clipped), ("pg_clipfrac_lower", clipped_low), ("ppo_kl", divergence)):
            assert float(metrics[f"actor/{key}"]) == pytest.approx(total / max(count, 1), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_micro_batches_add_up(name: str, mode: str) -> None:
    case = random_case(5)
    loss, gradient, metrics = run(name, case, mode)
    for micro in (1, 2, 3):
        parts = [run(name, case, mode, slice(start, start + micro)) for start in range(0, case.shape[0], micro)]
        torch.testing.assert_close(sum(p[0] for p in parts), loss)
        torch.testing.assert_close(torch.cat([p[1] for p in parts]), gradient)
        for key, value in metrics.items():
            torch.testing.assert_close(sum(p[2][key] for p in parts), value)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("gap", [60.0, -60.0, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
def test_extremes_keep_value_and_gradient_finite(name: str, gap: float, advantage: float) -> None:
    case = random_case(1)
    case.mask[:, 0] = 1
    case.old[:, 0], case.log_prob[:, 0], case.advantages[:, 0] = -70, -70 + gap if gap < math.inf else 0, advantage
    if gap == math.inf:
        case.old[:, 0] = -math.inf
    loss, gradient, metrics = run(name, case)
    assert loss.isfinite() and gradient.isfinite().all() and all(m.isfinite() for m in metrics.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_nothing_to_train_gives_zero(name: str) -> None:
    case = random_case(2)
    case.mask[:] = 0
    loss, gradient, metrics = run(name, case)
    assert loss == 0 and (gradient == 0).all() and all(m == 0 for m in metrics.values())


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"clip_cov"}))
def test_on_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    case = random_case(4)
    case.log_prob = case.old.clone()
    advantage = case.advantages.nan_to_num().sum(-1, keepdim=True).expand(case.shape)  # one per row, as geo_mean wants
    case.advantages = advantage.contiguous()
    _, gradient, metrics = run(name, case, "seq-mean-token-mean", extra={"rollout_correction": REJECT})
    want = -advantage * token_weights(case.mask, "seq-mean-token-mean", tokens=1, sequences=int(case.mask.any(-1).sum()))
    torch.testing.assert_close(gradient, want)
    assert all(value == 0 for value in metrics.values())


def test_selection_by_covariance() -> None:
    log_prob = torch.tensor([[-1.0, -2.0, -3.0, -6.0, NAN]])
    advantages = torch.tensor([[4.0, 0.0, 2.0, -2.0, NAN]])
    mask = torch.tensor([[True, True, True, True, False]])
    # Means -3 and 1: covariances 6, -1, 0, 9.
    assert select_kl_cov(log_prob, advantages, mask, {"kl_cov_ratio": 0.5}).tolist() == [[True, False, False, True, False]]
    assert select_kl_cov(log_prob, advantages, mask, {}).tolist() == [[False, False, False, True, False]]
    band = {"clip_cov_lb": 1.0, "clip_cov_ub": 8.0}
    assert select_clip_cov(log_prob, advantages, mask, band).tolist() == [[True, False, False, False, False]]
    assert not select_clip_cov(log_prob, advantages, mask, band | {"clip_cov_ub": 2.0}).any()
    for ratio, count in ((0.0001, 1), (0.5, 2), (1.0, 2)):
        selected = select_clip_cov(log_prob, advantages, mask, {"clip_cov_ratio": ratio, "clip_cov_ub": 99.0})
        assert selected.sum() == count and not selected[0, [1, 2, 4]].any()
    nothing = torch.zeros_like(mask)
    assert not select_kl_cov(log_prob, advantages, nothing, {}).any() and not select_clip_cov(log_prob, advantages, nothing, {}).any()


def test_clip_cov_leaves_clipped_tokens_alone() -> None:
    log_prob, advantages = torch.tensor([[-1.0, -2.0, -3.0, -6.0]]), torch.tensor([[3.0, -1.0, 1.0, -3.0]])
    mask, clipped = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[True, False, False, False]])
    settings = {"clip_cov_ratio": 1.0, "clip_cov_ub": 99.0}
    assert select_clip_cov(log_prob, advantages, mask, settings, clipped).tolist() == [[False, False, False, True]]


@pytest.mark.parametrize("name,select", [("clip_cov", select_clip_cov), ("kl_cov", select_kl_cov)])
def test_without_a_given_selection_the_losses_choose_their_own(name: str, select) -> None:
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
    loss, metrics = policy_loss("vanilla", PolicyLossInputs(
        log_prob=log_prob, old_log_prob=torch.zeros(1, 7), advantages=advantages, response_mask=ones, weights=ones, tokens=7,
    ))  # fmt: skip
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 - 1.0 - 1.2 + 0.8 + 1.0 + 1.5 + 3.0)
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-0.5, -1.0, 0.0, 0.0, 1.0, 1.5, 0.0]]))
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 7)
    assert metrics["actor/pg_clipfrac_lower"].item() == pytest.approx(1 / 7)


def test_errors() -> None:
    one = torch.ones(1, 1)
    good = dict(log_prob=one, old_log_prob=one, advantages=one, response_mask=one, weights=one, tokens=1)
    with pytest.raises(ValueError, match="unknown policy loss 'vanila': did you mean vanilla"):
        policy_loss("vanila", PolicyLossInputs(**good))
    with pytest.raises(ValueError, match=r"advantages has shape \(1, 2\), but log_prob has \(1, 1\)"):
        policy_loss("vanilla", PolicyLossInputs(**good | {"advantages": torch.ones(1, 2)}))


def test_value_loss_agrees_with_the_naive_reference() -> None:
    for seed in range(200):
        case = random_case(seed)
        weights = token_weights(case.mask, "token-mean", tokens=int(case.mask.sum()), sequences=1)
        values = case.values.clone().requires_grad_()
        loss, metrics = value_loss(values, case.ref, case.old, case.mask, weights, cliprange=0.5, tokens=int(case.mask.sum()))
        loss.backward()
        want, slopes, clipped, total = 0.0, np.zeros(case.shape), 0, 0.0
        for i, t in case.mask.nonzero().tolist():
            v, v_old, g = (float(x[i, t]) for x in (case.values, case.ref, case.old))
            v_clipped = min(max(v, v_old - 0.5), v_old + 0.5)
            errors = (v - g) ** 2, (v_clipped - g) ** 2
            want += 0.5 * max(errors) * float(weights[i, t])
            slopes[i, t] = (v - g) * float(weights[i, t]) if errors[0] >= errors[1] else 0.0
            clipped, total = clipped + (errors[1] > errors[0]), total + v
        count = max(int(case.mask.sum()), 1)
        np.testing.assert_allclose(loss.detach(), want, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(values.grad, slopes, rtol=1e-4, atol=1e-6, err_msg=f"seed {seed}")
        assert float(metrics["critic/vf_clipfrac"]) == pytest.approx(clipped / count)
        assert float(metrics["critic/vpred_mean"]) == pytest.approx(total / count, rel=1e-4, abs=1e-6)


def test_entropy_counts_trainable_tokens_only() -> None:
    entropy = torch.tensor([[1.0, NAN], [3.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [0, 1]])
    total = entropy_sum(entropy, mask, token_weights(mask, "token-mean", tokens=2, sequences=2))
    total.backward()
    assert total.item() == 3.0 and entropy.grad.tolist() == [[0.5, 0], [0, 0.5]]
