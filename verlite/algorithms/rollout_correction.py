"""Rollout correction: importance weights and rejection of off-policy tokens.

The rollout engine and the trainer compute slightly different log-probs for the same tokens.

w = pi_train / pi_rollout for each sampled token. Importance weights multiply the token losses.
Rejection removes tokens or whole rows from the loss. Config keys, metric names and presets are
verl's; the settings class is in verlite/spec/correction.py. Log-ratios are clamped to [-20, 20]
before they are exponentiated.

References: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training" (truncated importance sampling, TIS); Ling Team 2025 (IcePop).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verlite.algorithms.kl import LOG_PROB_FLOOR, MAX_LOG_RATIO
from verlite.algorithms.masked import masked_mean, masked_sum
from verlite.spec.correction import RolloutCorrection

MIN_MEAN_WEIGHT = 1e-8
"""Batch normalization divides by the mean weight only if the mean is above this."""


@dataclass(frozen=True)
class RuleResult:
    """One rejection rule evaluated on a batch.

    kept: [b, R] bool, tokens that the rule keeps; False where the mask is 0.
    statistic: k1 = -log w, k2 = (log w)^2 / 2 or k3 = w - 1 - log w. [b, R] for token rules; [b, 1]
        for sequence rules, where it is the sum, mean or maximum over the row.
    low, high: a token or row is kept if low <= statistic <= high.
    """

    kept: Tensor
    statistic: Tensor
    low: float
    high: float


def correct_rollout(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    settings: RolloutCorrection,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Compute importance weights, the mask after rejection, and metrics for a whole training batch.

    Weights, their mean for batch normalization, and all metrics use the mask before rejection, as
    in verl.

    Args:
        old_log_probs: [B, R], the trainer's log-probs before the update.
        rollout_log_probs: [B, R], the rollout engine's log-probs.
        response_mask: [B, R], 1 on sampled tokens of rows that count. Not modified.
        settings: which weights and which rejection rules to apply.

    Returns:
        weights: [B, R] float32, 0 where the mask is 0. None without settings.rollout_is.
        mask: [B, R], response_mask without the rejected tokens, in the same dtype.
        metrics: `rollout_corr/*`, from `off_policy_metrics`, `weight_metrics` and
            `rejection_metrics`.
    """
    mask = response_mask.bool()
    log_ratio = log_ratios(old_log_probs, rollout_log_probs, mask)
    metrics = off_policy_metrics(old_log_probs, rollout_log_probs, mask)
    weights = None
    if settings.rollout_is:
        raw = importance_ratios(log_ratio, mask, settings.rollout_is)
        weights = bounded_weights(raw, settings)
        metrics |= weight_metrics(raw, weights, mask, settings)
        if settings.rollout_is_batch_normalize:
            factor = _mean_weight(weights, mask, settings.rollout_is)
            weights = weights / factor
            metrics["rollout_is_batch_norm_factor"] = float(factor)
    kept, results = rejection_mask(log_ratio, mask, settings)
    metrics |= rejection_metrics(kept, results, mask)
    named = {f"rollout_corr/{key}": value for key, value in metrics.items()}
    return weights, response_mask * kept, named


def log_ratios(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return log w [b, R]: log_prob - rollout_log_prob on the mask, 0 elsewhere.

    Log-probs are floored at -1e4, so the result is finite even where a log-prob is -inf.
    """
    difference = log_prob.clamp(min=LOG_PROB_FLOOR) - rollout_log_prob.clamp(min=LOG_PROB_FLOOR)
    return torch.where(mask, difference, 0)


def importance_ratios(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return unbounded importance weights [b, R], 0 outside the mask.

    level: "token" gives each token its own w; "sequence" gives each token the product of w over its
        row.
    """
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    return torch.where(mask, log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0)


def bounded_weights(ratios: Tensor, settings: RolloutCorrection) -> Tensor:
    """Truncate ratios to the upper threshold (TIS), or set them to 0 outside the band (IcePop)."""
    low, high = settings.is_band
    if settings.is_truncated:
        return ratios.clamp(max=high)
    return torch.where((ratios >= low) & (ratios <= high), ratios, 0)


def rejection_mask(
    log_ratio: Tensor, mask: Tensor, settings: RolloutCorrection
) -> tuple[Tensor, dict[str, RuleResult]]:
    """Apply every rule of settings.rollout_rs to log w [b, R].

    Returns the tokens that all rules keep ([b, R] bool, False where the mask is 0), and each rule's
    own result by name.
    """
    kept = mask
    results = {}
    for name, low, high in settings.rejections:
        result = _apply_rule(name, low, high, log_ratio, mask)
        kept = kept & result.kept
        results[name] = result
    return kept, results


def _apply_rule(name: str, low: float, high: float, log_ratio: Tensor, mask: Tensor) -> RuleResult:
    """Evaluate one rule. For k1, low and high are bounds of log w; otherwise of the statistic."""
    level, kind = name.rsplit("_", 1)
    if kind == "k1":
        # The bounds are those of the ratio w, and the statistic is -log w: negate and swap them.
        statistic = -log_ratio
        low, high = -high, -low
    elif kind == "k2":
        statistic = log_ratio.square() / 2
    else:
        clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        statistic = torch.expm1(clamped) - clamped
    if level == "seq_sum":
        statistic = masked_sum(statistic, mask, -1).unsqueeze(-1)
    elif level == "seq_mean":
        statistic = masked_mean(statistic, mask, -1).unsqueeze(-1)
    elif level == "seq_max":
        statistic = torch.where(mask, statistic, -torch.inf).amax(-1, keepdim=True)
    return RuleResult(mask & (statistic >= low) & (statistic <= high), statistic, low, high)


def _mean_weight(weights: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return the mean weight over rows (level "sequence") or tokens; 1 if it is nearly 0."""
    if level == "sequence":
        mean = masked_mean(masked_mean(weights, mask, -1), mask.any(-1))
    else:
        mean = masked_mean(weights, mask)
    return torch.where(mean > MIN_MEAN_WEIGHT, mean, 1.0)


# Metrics. All of them have verl's names and verl's meaning, except those that the docstrings call
# verlite's own.


def off_policy_metrics(
    log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor
) -> dict[str, float]:
    """Measure how far the trainer is from the rollout engine, on [b, R] log-probs.

    Rows without trainable tokens are left out. All values are 0 if no token is trainable.

    kl: mean over tokens of -log w. k3_kl: mean over tokens of w - 1 - log w.
    training_ppl, rollout_ppl: mean over rows of the perplexity exp(-mean log-prob). *_log_ppl: mean
        of its log.
    log_ppl_diff: mean over rows of the training log-perplexity minus the rollout's.
    log_ppl_abs_diff, log_ppl_diff_max, log_ppl_diff_min: mean absolute value and extremes of it.
    ppl_ratio: mean over rows of exp(difference).
    chi2_token: mean over tokens of w^2 - 1. chi2_seq: mean over rows of (product of w)^2 - 1.
    """
    mask = mask.bool()
    rows = mask.any(-1)
    log_ratio = log_ratios(log_prob, rollout_log_prob, mask)
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    training = -masked_mean(log_prob.clamp(min=LOG_PROB_FLOOR), mask, -1)
    rollout = -masked_mean(rollout_log_prob.clamp(min=LOG_PROB_FLOOR), mask, -1)
    difference = training - rollout
    row_ratio = log_ratio.sum(-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    largest = difference[rows].max() if rows.any() else 0.0
    smallest = difference[rows].min() if rows.any() else 0.0
    values = {
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(torch.expm1(clamped) - clamped, mask),
        "training_ppl": masked_mean(training.clamp(max=MAX_LOG_RATIO).exp(), rows),
        "training_log_ppl": masked_mean(training, rows),
        "rollout_ppl": masked_mean(rollout.clamp(max=MAX_LOG_RATIO).exp(), rows),
        "rollout_log_ppl": masked_mean(rollout, rows),
        "log_ppl_diff": masked_mean(difference, rows),
        "log_ppl_abs_diff": masked_mean(difference.abs(), rows),
        "log_ppl_diff_max": largest,
        "log_ppl_diff_min": smallest,
        "ppl_ratio": masked_mean(difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), rows),
        "chi2_token": masked_mean((2 * clamped).expm1(), mask),
        "chi2_seq": masked_mean((2 * row_ratio.double()).expm1(), rows),
    }
    return {key: float(value) for key, value in values.items()}


def weight_metrics(
    raw: Tensor, applied: Tensor, mask: Tensor, settings: RolloutCorrection
) -> dict[str, float]:
    """Summarize importance weights [b, R] before batch normalization; {} if no token is trainable.

    "Applied" weights are truncated (TIS) or set to 0 outside the band (IcePop); "raw" weights are
    not. The bounds are the band, or [1 / threshold, threshold] for TIS. A row's weight is the mean
    over its tokens.

    rollout_is_mean, rollout_is_std: applied weights over tokens (population standard deviation).
    rollout_is_max, rollout_is_min: token weights: applied. Sequence weights: raw.
    rollout_is_ratio_fraction_high, *_low: share of raw weights beyond the bounds: of tokens for
        token weights, of rows for sequence weights.
    rollout_is_eff_sample_size: (mean applied)^2 / mean(applied^2) over tokens, from 0 to 1.
    rollout_is_oob_ratio: IcePop only: share of tokens whose raw weight is outside the band.
    rollout_is_seq_{mean,std,max,min}: applied weights of rows (unbiased standard deviation).
    rollout_is_seq_max_deviation: largest distance of a row's applied weight from 1.
    rollout_is_seq_fraction_high, *_low: share of rows whose raw weight is beyond the bounds.
    rollout_is_raw_{mean,max,min,std}: raw weights over tokens (verlite's own).
    """
    if not mask.any():
        return {}
    low, high = settings.is_band
    low = low or 1 / high
    rows = mask.any(-1)
    token_raw = raw[mask].double()
    token_applied = applied[mask].double()
    row_raw = masked_mean(raw, mask, -1)[rows].double()
    row_applied = masked_mean(applied, mask, -1)[rows].double()
    is_per_row = settings.rollout_is == "sequence"
    extremes = row_raw if is_per_row else token_applied
    ratios = row_raw if is_per_row else token_raw
    squared_mean = token_applied.square().mean().clamp(min=1e-12)
    values = {
        "mean": token_applied.mean(),
        "max": extremes.max(),
        "min": extremes.min(),
        "std": token_applied.std(correction=0),
        "ratio_fraction_high": _fraction(ratios > high),
        "ratio_fraction_low": _fraction(ratios < low),
        "eff_sample_size": token_applied.mean().square() / squared_mean,
        "seq_mean": row_applied.mean(),
        "seq_std": _unbiased_std(row_applied),
        "seq_max": row_applied.max(),
        "seq_min": row_applied.min(),
        "seq_max_deviation": (row_applied - 1).abs().max(),
        "seq_fraction_high": _fraction(row_raw > high),
        "seq_fraction_low": _fraction(row_raw < low),
        "raw_mean": token_raw.mean(),
        "raw_max": token_raw.max(),
        "raw_min": token_raw.min(),
        "raw_std": token_raw.std(correction=0),
    }
    if not settings.is_truncated:
        values["oob_ratio"] = _fraction((token_raw < low) | (token_raw > high))
    return {f"rollout_is_{key}": float(value) for key, value in values.items()}


def rejection_metrics(
    kept: Tensor, results: dict[str, RuleResult], mask: Tensor
) -> dict[str, float]:
    """Summarize rejection over tokens and rows; {} without rules or if no token is trainable.

    kept, results: from `rejection_mask`. mask: [b, R] bool, before rejection.

    rollout_rs_masked_fraction: share of tokens that are rejected.
    rollout_rs_seq_masked_fraction: share of rows with at least one rejected token.
    rollout_rs_seq_fully_masked_fraction: share of rows with no token left (verlite's own).
    rollout_rs_<rule>_*: the same two shares for one rule, and its statistic; see `_rule_metrics`.
    """
    if not results or not mask.any():
        return {}
    metrics = {}
    for name, result in results.items():
        for key, value in _rule_metrics(name, result, mask).items():
            metrics[f"rollout_rs_{name}_{key}"] = float(value)
    rows = mask.any(-1)
    metrics["rollout_rs_masked_fraction"] = float(_fraction(~kept[mask]))
    metrics["rollout_rs_seq_masked_fraction"] = float(_fraction((mask & ~kept).any(-1)[rows]))
    metrics["rollout_rs_seq_fully_masked_fraction"] = float(_fraction(~kept.any(-1)[rows]))
    return metrics


def _rule_metrics(name: str, result: RuleResult, mask: Tensor) -> dict[str, Tensor]:
    """Summarize one rule's statistic and what it rejects. `mask` has at least one token.

    mean: over tokens. A sequence rule's statistic counts once per token of its row.
    std: the same, of the statistic clamped to the bounds (population standard deviation).
    max, min: over tokens for token rules, over rows for sequence rules.
    fraction_high, fraction_low: share above and below the bounds, over the same.
    seq_*: over rows. For token rules a row's value is the mean over its tokens.
    seq_max_deviation: largest absolute value of a row.
    masked_fraction, seq_masked_fraction: share of tokens rejected, and of rows with such a token.
    """
    rows = mask.any(-1)
    low, high = result.low, result.high
    per_token = result.statistic.expand_as(mask)[mask].double()
    if name.startswith("seq"):
        per_row = result.statistic.squeeze(-1)[rows].double()
        units = per_row
    else:
        per_row = masked_mean(result.statistic, mask, -1)[rows].double()
        units = per_token
    return {
        "mean": per_token.mean(),
        "max": units.max(),
        "min": units.min(),
        "std": per_token.clamp(low, high).std(correction=0),
        "fraction_high": _fraction(units > high),
        "fraction_low": _fraction(units < low),
        "seq_mean": per_row.mean(),
        "seq_std": _unbiased_std(per_row),
        "seq_max": per_row.max(),
        "seq_min": per_row.min(),
        "seq_max_deviation": per_row.abs().max(),
        "seq_fraction_high": _fraction(per_row > high),
        "seq_fraction_low": _fraction(per_row < low),
        "masked_fraction": _fraction(~result.kept[mask]),
        "seq_masked_fraction": _fraction((mask & ~result.kept).any(-1)[rows]),
    }


def _fraction(flags: Tensor) -> Tensor:
    """Share of True in a bool tensor that is not empty."""
    return flags.double().mean()


def _unbiased_std(x: Tensor) -> Tensor:
    """Unbiased standard deviation; 0 for a single entry."""
    if len(x) < 2:
        return x.new_zeros(())
    return x.std()
