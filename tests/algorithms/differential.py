"""Compare estimators, losses, KL and rollout correction with their naive references.

The tests assert the differences. docs/evidence.md lists them.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests import metrics_page
from tests.algorithms import reference
from tests.algorithms.reference import Case
from verlite.algorithms.advantages import AdvantageInputs, compute_advantages
from verlite.algorithms.aggregation import AGGREGATION_MODES, token_weights
from verlite.algorithms.kl import KL_KINDS, apply_kl_penalty, kl_estimate, kl_loss
from verlite.algorithms.losses import PolicyLossInputs, entropy_sum, policy_loss, value_loss
from verlite.algorithms.rollout_correction import correct_rollout
from verlite.spec.catalog import ESTIMATORS, LOSSES
from verlite.spec.correction import PRESETS, REJECTIONS, RolloutCorrection

random_case = functools.cache(reference.random_case)  # each comparison has the same batches
BATCHES = 200
FEW = 40
"""Batches of a quick test. test_differential.py compares all of them."""
SMALL = 0.01
"""Smallest denominator of a relative difference. Below it float32's absolute error dominates."""

Pair = tuple[str, Any, Any, float]
"""Name of the result, actual numbers, expected numbers, smallest denominator of the difference."""


@dataclass(frozen=True)
class Comparison:
    """One function and its reference.

    `tolerance` is the bound of |actual - expected| / max(|expected|, size) over all entries of all
    batches.
    """

    name: str
    pairs: Callable[[int], Iterator[Pair]]
    tolerance: float


@dataclass(frozen=True)
class Largest:
    """Largest differences of one result over all batches."""

    absolute: float
    relative: float
    seed: int
    """Seed of the batch with the largest relative difference."""


def largest_differences(comparison: Comparison, batches: int = BATCHES) -> dict[str, Largest]:
    """Return the largest differences by the name of the result, over the first `batches`.

    The reference must be finite. A NaN or infinity in the actual numbers is an infinite difference.
    """
    found: dict[str, Largest] = {}
    for seed in range(batches):
        for what, actual, expected, size in comparison.pairs(seed):
            got, want = (np.asarray(x, dtype=np.float64) for x in (actual, expected))
            assert got.shape == want.shape, (
                f"{comparison.name}, {what}: shape {got.shape}, expected {want.shape}"
            )
            assert np.isfinite(want).all(), (
                f"{comparison.name}, {what}, batch {seed}: the reference is not finite"
            )
            gap = np.nan_to_num(np.abs(got - want), nan=math.inf)
            relative = float((gap / np.maximum(np.abs(want), size)).max(initial=0))
            before = found.get(what, Largest(0.0, -1.0, seed))
            worst = seed if relative > before.relative else before.seed
            found[what] = Largest(
                max(before.absolute, float(gap.max(initial=0))),
                max(before.relative, relative),
                worst,
            )
    return found


def check(comparison: Comparison, batches: int = FEW) -> None:
    """Assert that every difference is within the tolerance of the comparison."""
    found = largest_differences(comparison, batches)
    assert found
    for what, one in found.items():
        assert one.relative <= comparison.tolerance, f"{comparison.name}, {what}: {one}"


# Advantages


def inputs_of(case: Case, **settings: Any) -> AdvantageInputs:
    return AdvantageInputs(
        token_level_rewards=case.rewards,
        response_mask=case.mask,
        uid=case.uid,
        valid=case.valid,
        values=case.values,
        reward_baselines=case.baselines,
        old_log_probs=case.old,
        token_level_scores=case.scores,
        sum_pi_squared=case.pi_squared,
        gdpo_rewards=case.parts.double().masked_fill(
            ~(case.valid & case.mask.any(-1)).unsqueeze(-1), math.nan
        ),
        rollout_is_weights=case.is_weights if settings.pop("weighted", False) else None,
        **settings,
    )


GDPO_WEIGHTS = (1.0, -0.25, 3.0)


def expected_advantages(
    name: str, case: Case, gamma: float, lam: float, by_std: bool
) -> tuple[np.ndarray, np.ndarray]:
    match name:
        case "gae":
            return reference.gae(case, gamma, lam)
        case "reinforce_plus_plus":
            return reference.reinforce_plus_plus(case, gamma)
        case "remax":
            return reference.remax(case, gamma)
        case "grpo":
            advantages = reference.grpo(case, by_std)
        case "rloo":
            advantages = reference.rloo(case)
        case "rloo_token_kl":
            advantages = reference.rloo_token_kl(case, -0.5, 0.8)
        case "gdpo":
            advantages = reference.gdpo(case, GDPO_WEIGHTS if by_std else (1.0,) * 3)
        case "grpo_passk":
            advantages = reference.grpo_passk(case, by_std)
        case "opo":
            advantages = reference.opo(case)
        case "gpg":
            advantages = reference.gpg(case)
        case "optimal_token_baseline":
            return reference.optimal_token_baseline(case, gamma, weighted=by_std)
        case "reinforce_plus_plus_baseline":
            advantages = reference.reinforce_plus_plus_baseline(case)
        case _:
            raise AssertionError(f"no reference for {name}")
    return advantages, advantages


def advantage_pairs(name: str, seed: int) -> Iterator[Pair]:
    case = random_case(seed)
    gamma, lam, by_std = [(1.0, 1.0, True), (0.9, 0.8, False), (1.0, 0.95, True)][seed % 3]
    inputs = inputs_of(
        case,
        gamma=gamma,
        lam=lam,
        norm_adv_by_std_in_grpo=by_std,
        weighted=by_std,
        gdpo_reward_weights=GDPO_WEIGHTS if by_std else None,
        reward_clip_range=(-0.5, 0.8),
    )
    actual, expected = (
        compute_advantages(name, inputs),
        expected_advantages(name, case, gamma, lam, by_std),
    )
    for what, got, want in zip(("advantages", "returns"), actual, expected, strict=True):
        assert got.dtype == torch.float32
        yield what, got, want, SMALL


# Policy losses

SETTINGS = [
    dict(clip_low=0.2, clip_high=0.2, clip_c=3.0),
    dict(clip_low=0.1, clip_high=0.3, clip_c=1.5),
]
REJECT = RolloutCorrection(
    "token",
    1.5,
    rollout_rs="seq_mean_k1,token_k3",
    rollout_rs_threshold="0.5_2.0,3",
    bypass_mode=True,
)
EXTRA: dict[str, dict[str, Any]] = {
    "bypass_mode": {"rollout_correction": REJECT},
    "clip_cov": {"selected": lambda case: case.values.nan_to_num() > 0.8},
    "kl_cov": {"selected": lambda case: case.values.nan_to_num() > 0.8, "ppo_kl_coef": 0.7},
}


def run(
    name: str,
    case: Case,
    mode: str = "token-mean",
    rows: slice = slice(None),
    is_weights=None,
    extra=None,
    **settings: Any,
):
    """Return loss, gradient with respect to log_prob, and metrics. `rows` selects a micro-batch."""
    log_prob = case.log_prob[rows].clone().requires_grad_()
    counts = {"tokens": int(case.mask.sum()), "sequences": int(case.mask.any(-1).sum())}
    extra = {
        k: v(case)[rows] if callable(v) else v
        for k, v in (EXTRA.get(name, {}) if extra is None else extra).items()
    }
    loss, metrics = policy_loss(
        name,
        PolicyLossInputs(
            log_prob=log_prob,
            old_log_prob=case.old[rows],
            advantages=case.advantages[rows],
            response_mask=case.mask[rows],
            weights=token_weights(case.mask[rows], mode, scale=7.0, **counts),
            tokens=counts["tokens"],
            loss_agg_mode=mode,
            rollout_is_weights=None if is_weights is None else is_weights[rows],
            extra=extra,
            **settings,
        ),
    )
    loss.backward()
    return loss.detach(), log_prob.grad, metrics


def reference_row(
    name: str, case: Case, i: int, weights: dict[int, float], s: dict
) -> tuple[float, dict[int, float]]:
    """Return the loss of a row and its derivative for each token.

    `weights` maps the columns of the tokens to their weights.
    """
    if name == "gspo":
        return reference.gspo_row(case, i, weights, s)
    if name == "geo_mean":
        return reference.geo_mean_row(case, i, weights, s)
    if name == "bypass_mode":
        gone = rejected_by_rules(case, i)
        weights = {t: 0.0 if gone[t] else w for t, w in weights.items()}
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
                value, slope = reference.dppo_token(
                    new, old, advantage, s, name.removeprefix("dppo_")
                )
            case "clip_cov":
                value, slope = (
                    (0.0, 0.0) if selected[i, t] else reference.ppo_token(new, old, advantage, s)
                )
            case "kl_cov":
                value, slope = reference.kl_cov_token(
                    new, old, advantage, s | {"ppo_kl_coef": 0.7}, bool(selected[i, t])
                )
            case "bypass_mode" if s.get("loss_type") == "reinforce":
                value, slope = reference.weighted_gradient_token(
                    min(ratios[t], 1.5), new, advantage
                )
            case "bypass_mode":
                value, slope = reference.ppo_token(new, old, advantage, s, worst=s["clip_c"])
            case _:
                raise AssertionError(f"no reference for {name}")
        loss, slopes[t] = loss + w * value, w * slope
    return loss, slopes


def policy_pairs(name: str, seed: int, loss_type: str = "ppo_clip") -> Iterator[Pair]:
    case, settings, mode = random_case(seed), SETTINGS[seed % 2], AGGREGATION_MODES[seed % 5]
    is_weights = (
        torch.rand(case.shape, generator=torch.Generator().manual_seed(seed))
        if seed % 3 == 0
        else None
    )
    extra = (
        {"rollout_correction": replace(REJECT, loss_type=loss_type)}
        if name == "bypass_mode"
        else None
    )
    loss, gradient, metrics = run(name, case, mode, is_weights=is_weights, extra=extra, **settings)
    want, size, slopes = 0.0, SMALL, np.zeros(case.shape)
    for i, row_weight in enumerate(reference.row_weights(case.mask, mode, 7.0)):
        weights = {
            t: row_weight * (1 if is_weights is None else float(is_weights[i, t]))
            for t in case.mask[i].nonzero().flatten().tolist()
        }
        if weights:
            row, row_slopes = reference_row(
                name, case, i, weights, settings | {"loss_type": loss_type}
            )
            want, size = want + row, size + abs(row)
            slopes[i, list(row_slopes)] = list(row_slopes.values())
    yield "loss", loss, want, size
    yield "gradient", gradient, slopes, SMALL
    expected = reference_metrics(name, case, settings, loss_type)
    if case.mask.any():
        assert metrics_page.documented(metrics).keys() == expected.keys()
        yield "metrics", list(metrics.values()), [expected[key] for key in metrics], 1
    else:
        assert all(value == 0 for value in metrics.values())


def reference_metrics(name: str, case: Case, s: dict, loss_type: str) -> dict[str, float]:
    """Return the means of all metrics over trainable tokens, by full metric name."""
    formula = name
    if name == "bypass_mode":
        formula = "vanilla" if loss_type == "ppo_clip" else "reinforce"
    selected = case.values.nan_to_num() > 0.8
    tokens = case.mask.nonzero().tolist()
    sums: dict[str, float] = {}
    for i, t in tokens:
        one = reference.token_metrics(formula, case, i, t, s, bool(selected[i, t]))
        for key, value in one.items():
            sums[f"actor/{key}"] = sums.get(f"actor/{key}", 0.0) + value
    if name == "bypass_mode":
        gone = [rejected_by_rules(case, i) for i in range(len(case.mask))]
        sums["rollout_corr/rollout_rs_masked_fraction"] = sum(gone[i][t] for i, t in tokens)
    return {key: total / max(len(tokens), 1) for key, total in sums.items()}


def rejected_by_rules(case: Case, i: int) -> dict[int, bool]:
    """Return which tokens of a row REJECT removes.

    The trainer's log-probs are case.log_prob, the rollout engine's are case.old.
    """
    rules = (("seq_mean_k1", 0.5, 2.0), ("token_k3", 0, 3))
    gone = [
        reference.rejected(case, i, rule, low, high, case.log_prob, case.old)
        for rule, low, high in rules
    ]
    return {t: any(g[t] for g in gone) for t in gone[0]}


# Value loss, entropy, aggregation


def value_pairs(seed: int) -> Iterator[Pair]:
    case = random_case(seed)
    tokens = int(case.mask.sum())
    weights = token_weights(case.mask, "token-mean", tokens=tokens, sequences=1)
    values = case.values.clone().requires_grad_()
    loss, metrics = value_loss(
        values, case.ref, case.old, case.mask, weights, cliprange=0.5, tokens=tokens
    )
    loss.backward()
    want, slopes, clipped, total = 0.0, np.zeros(case.shape), 0, 0.0
    for i, t in case.mask.nonzero().tolist():
        v, old, target = (float(x[i, t]) for x in (case.values, case.ref, case.old))
        error, slope = reference.value_token(v, old, target, 0.5)
        want, slopes[i, t] = want + error / tokens, slope / tokens
        clipped, total = clipped + (error > 0.5 * (v - target) ** 2), total + v
    yield "loss", loss.detach(), want, SMALL
    yield "gradient", values.grad, slopes, SMALL
    yield (
        "metrics",
        [metrics[f"critic/{name}"] for name in ("vf_clipfrac", "vpred_mean")],
        [clipped / max(tokens, 1), total / max(tokens, 1)],
        1,
    )


def entropy_pairs(seed: int) -> Iterator[Pair]:
    case, mode = random_case(seed), AGGREGATION_MODES[seed % 5]
    entropy = case.is_weights.clone().requires_grad_()  # non-negative, NaN where the mask is 0
    counts = {"tokens": int(case.mask.sum()), "sequences": int(case.mask.any(-1).sum())}
    total = entropy_sum(entropy, case.mask, token_weights(case.mask, mode, scale=7.0, **counts))
    total.backward()
    slopes = _weights(case, mode)
    yield (
        "value",
        total.detach(),
        sum(slopes[i, t] * float(case.is_weights[i, t]) for i, t in case.mask.nonzero().tolist()),
        SMALL,
    )
    yield "gradient", entropy.grad, slopes, SMALL


def aggregation_pairs(mode: str, seed: int) -> Iterator[Pair]:
    case = random_case(seed)
    counts = {
        "tokens": int(case.mask.sum()),
        "sequences": int(case.mask.any(-1).sum()),
        "scale": 7.0,
    }
    for micro in (1, 2, 3, len(case.mask)):
        yield (
            "weights",
            torch.cat([token_weights(part, mode, **counts) for part in case.mask.split(micro)]),
            _weights(case, mode),
            SMALL,
        )


def _weights(case: Case, mode: str) -> np.ndarray:
    weights = reference.row_weights(case.mask, mode, 7.0)
    return np.array(
        [[w * m for m in row] for w, row in zip(weights, case.mask.tolist(), strict=True)]
    )


# KL


def reference_of(case: Case) -> Tensor:
    """Return log-probs of the reference policy. Some sampled tokens have probability 0."""
    return torch.where(case.values > 2, -math.inf, case.ref)


def kl_pairs(kind: str, seed: int) -> Iterator[Pair]:
    case, mode = random_case(seed), AGGREGATION_MODES[seed % 5]
    ref, weights = reference_of(case), _weights(case, mode)
    log_prob = case.log_prob.clone().requires_grad_()
    loss = kl_loss(log_prob, ref, case.mask, torch.from_numpy(weights).float(), kind)
    loss.backward()
    values, slopes, size = np.zeros(case.shape), np.zeros(case.shape), SMALL
    for i, t in case.mask.nonzero().tolist():
        values[i, t], slope = reference.kl_token(kind, float(case.log_prob[i, t]), float(ref[i, t]))
        slopes[i, t] = weights[i, t] * slope
        size += weights[i, t] * abs(values[i, t])
    yield (
        "value",
        torch.where(case.mask.bool(), kl_estimate(case.log_prob, ref, kind), 0),
        values,
        SMALL,
    )
    yield "loss", loss.detach(), (values * weights).sum(), size
    yield "gradient", log_prob.grad, slopes, SMALL


def penalty_pairs(kind: str, seed: int) -> Iterator[Pair]:
    case = random_case(seed)
    ref = reference_of(case)
    rewards, current = apply_kl_penalty(
        case.rewards.nan_to_num(), case.old, ref, case.mask, 0.3, kind
    )
    assert rewards.dtype == torch.float32
    want, mean = reference.apply_kl(case, ref, 0.3, kind)
    yield "rewards", rewards, want, SMALL
    yield "current KL", current, mean, SMALL


# Rollout correction

BOUNDS = {"k1": "0.6_1.4", "k2": 0.3, "k3": 0.2}
CORRECTIONS: dict[str, RolloutCorrection] = {
    **PRESETS,
    **{
        f"{name} alone": RolloutCorrection(rollout_rs=name, rollout_rs_threshold=BOUNDS[name[-2:]])
        for name in REJECTIONS
    },
    **{
        f"{level} weights, {threshold}{', normalized' * normalize}": RolloutCorrection(
            level, threshold, normalize
        )
        for level in ("token", "sequence")
        for threshold in (2.0, "0.5_1.5")
        for normalize in (False, True)
    },
    "two rules, one bound each": RolloutCorrection(
        "token", 1.5, rollout_rs="seq_mean_k1,token_k3", rollout_rs_threshold="0.5_2.0,3"
    ),
    "two rules, one bound": RolloutCorrection(
        rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold=1.5
    ),
}


def correction_pairs(settings: RolloutCorrection, seed: int) -> Iterator[Pair]:
    """The trainer's log-probs are case.old, the rollout engine's are case.log_prob."""
    case = random_case(seed)
    before = case.mask.clone()
    weights, mask, metrics = correct_rollout(case.old, case.log_prob, case.mask, settings)
    assert torch.equal(case.mask, before) and mask.dtype == before.dtype
    want_weights, want_mask, want = reference.corrected(
        case,
        settings.rollout_is,
        settings.rollout_is_threshold,
        settings.rollout_is_batch_normalize,
        settings.rollout_rs,
        settings.rollout_rs_threshold,
    )
    yield "mask", mask, want_mask, SMALL
    assert (weights is None) == (want_weights is None)
    if weights is not None:
        yield "weights", weights, want_weights, SMALL
    if case.mask.any():
        assert metrics_page.documented(metrics).keys() == want.keys()
        yield "metrics", list(metrics.values()), [want[key] for key in metrics], 1
    else:
        assert all(math.isfinite(value) for value in metrics.values())


# float32 rounds to 6e-8. Sums of terms that cancel, division by a small standard deviation, and exp
# of a log-ratio up to 20 multiply this error by up to 1000. Each tolerance is a few times the
# measured difference. With any of these tolerances, masks must be equal.
COMPARISONS: dict[str, dict[str, Comparison]] = {
    "Advantage estimators": {
        name: Comparison(name, partial(advantage_pairs, name), 2e-4) for name in ESTIMATORS
    },
    "Policy losses": {
        **{name: Comparison(name, partial(policy_pairs, name), 2e-4) for name in LOSSES},
        "bypass_mode, reinforce": Comparison(
            "bypass_mode, reinforce",
            partial(policy_pairs, "bypass_mode", loss_type="reinforce"),
            2e-4,
        ),
    },
    "Value loss and entropy": {
        "value_loss": Comparison("value_loss", value_pairs, 1e-5),
        "entropy_sum": Comparison("entropy_sum", entropy_pairs, 1e-5),
    },
    "Aggregation": {
        mode: Comparison(mode, partial(aggregation_pairs, mode), 1e-6) for mode in AGGREGATION_MODES
    },
    "KL in the loss": {kind: Comparison(kind, partial(kl_pairs, kind), 5e-5) for kind in KL_KINDS},
    "KL in the reward": {
        kind: Comparison(kind, partial(penalty_pairs, kind), 1e-5)
        for kind in KL_KINDS
        if not kind.endswith("+")
    },
    "Rollout correction": {
        name: Comparison(name, partial(correction_pairs, settings), 1e-5)
        for name, settings in CORRECTIONS.items()
    },
}
