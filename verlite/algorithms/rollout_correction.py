"""Correcting for the difference between the engine that sampled and the trainer that learns.

w = pi_train / pi_rollout on sampled tokens. Importance weights multiply the loss; rejection takes tokens or whole sequences out
of it. Keys, metric names and presets are verl's; the settings are in config.correction. Log-ratios are limited to +-20 before they
are exponentiated.
(Background: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; IcePop, Ling Team 2025.)
"""

import torch
from torch import Tensor

from verlite.algorithms.kl import LOG_PROB_FLOOR, MAX_LOG_RATIO
from verlite.algorithms.masked import masked_mean, masked_sum
from verlite.config.correction import RolloutCorrection


def correct_rollout(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    settings: RolloutCorrection,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Importance weights, the mask of what is left, and metrics, for a whole training batch.

    Inputs [B, R]. Returns weights [B, R] float32 (0 where the mask is 0; None without rollout_is), response_mask [B, R] with the
    rejected tokens taken out (in the dtype of the input, never edited in place), and metrics named rollout_corr/*: off_policy_
    metrics, statistics of the weights before truncation, and shares of rejected tokens and rows (a row counts when none of
    its tokens is left). Weights and their mean are
    computed over the mask before rejection, as in verl.
    """
    mask = response_mask.bool()
    log_ratio = log_ratios(old_log_probs, rollout_log_probs, mask)
    metrics = off_policy_metrics(old_log_probs, rollout_log_probs, mask)
    weights = None
    if settings.rollout_is:
        raw = importance_ratios(log_ratio, mask, settings.rollout_is)
        weights = bounded_weights(raw, settings)
        metrics |= _weight_metrics(raw, weights, mask, settings)
        if settings.rollout_is_batch_normalize:
            per_row = settings.rollout_is == "sequence"  # one vote per row, else one per token
            mean = (
                masked_mean(masked_mean(weights, mask, -1), mask.any(-1))
                if per_row
                else masked_mean(weights, mask)
            )
            weights = weights / torch.where(mean > 1e-8, mean, 1.0)
            metrics["rollout_is_batch_norm_factor"] = float(mean)
    kept, passed = rejection_mask(log_ratio, mask, settings)
    if passed:
        tokens, rows = max(int(mask.count_nonzero()), 1), max(int(mask.any(-1).count_nonzero()), 1)
        for name, one in passed.items():
            metrics[f"rollout_rs_{name}_masked_fraction"] = (
                float((mask & ~one).count_nonzero()) / tokens
            )
        metrics["rollout_rs_masked_fraction"] = float((mask & ~kept).count_nonzero()) / tokens
        metrics["rollout_rs_seq_masked_fraction"] = (
            float((mask.any(-1) & ~kept.any(-1)).count_nonzero()) / rows
        )
    return (
        weights,
        response_mask * kept,
        {f"rollout_corr/{key}": value for key, value in metrics.items()},
    )


def log_ratios(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """[b, R] log w on the mask, 0 elsewhere; finite even where a log-prob is -inf."""
    return torch.where(
        mask, log_prob.clamp(min=LOG_PROB_FLOOR) - rollout_log_prob.clamp(min=LOG_PROB_FLOOR), 0
    )


def importance_ratios(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """[b, R] w of each token, or the product over its row, at level "token" or "sequence"; 0 outside the mask."""
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    return torch.where(mask, log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0)


def bounded_weights(ratios: Tensor, settings: RolloutCorrection) -> Tensor:
    """Ratios truncated to the threshold (TIS), or set to 0 outside the band (IcePop)."""
    low, high = settings.is_band
    return (
        ratios.clamp(max=high)
        if settings.is_truncated
        else torch.where((ratios >= low) & (ratios <= high), ratios, 0)
    )


def rejection_mask(
    log_ratio: Tensor, mask: Tensor, settings: RolloutCorrection
) -> tuple[Tensor, dict[str, Tensor]]:
    """[b, R] bool: trainable tokens that every rejection rule keeps; and by rule's name, those that it alone keeps."""
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    passed = {}
    for name, low, high in settings.rejections:
        level, kind = name.rsplit("_", 1)
        # k1 is compared as log w itself, so that its bounds are those of the ratio.
        statistic = {
            "k1": log_ratio,
            "k2": log_ratio.square() / 2,
            "k3": torch.expm1(clamped) - clamped,
        }[kind]
        if level == "seq_sum":
            statistic = masked_sum(statistic, mask, -1).unsqueeze(-1)
        elif level == "seq_mean":
            statistic = masked_mean(statistic, mask, -1).unsqueeze(-1)
        elif level == "seq_max":
            statistic = torch.where(mask, statistic, -torch.inf).amax(-1, keepdim=True)
        passed[name] = mask & (statistic >= low) & (statistic <= high)
    kept = mask
    for one in passed.values():
        kept = kept & one
    return kept, passed


def off_policy_metrics(
    log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor
) -> dict[str, float]:
    """How far the trainer is from the rollout engine, on [b, R] log-probs; rows without trainable tokens do not count.

    kl: mean of -log w; k3_kl: mean of w - 1 - log w; *_ppl: mean over rows of exp(-mean log-prob), and its log; log_ppl_diff:
    rollout's minus trainer's mean log-prob per row (mean, mean of absolute values, extremes); ppl_ratio: mean of its exp;
    chi2_token, chi2_seq: mean w^2 - 1 over tokens, and of the rows' products.
    """
    mask = mask.bool()
    rows = mask.any(-1)
    log_ratio = log_ratios(log_prob, rollout_log_prob, mask)
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    trained = -masked_mean(log_prob.clamp(min=LOG_PROB_FLOOR), mask, -1)
    sampled = -masked_mean(rollout_log_prob.clamp(min=LOG_PROB_FLOOR), mask, -1)
    difference = trained - sampled
    limited = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    row_ratio = log_ratio.sum(-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    any_row = bool(rows.any())
    values = {
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(torch.expm1(clamped) - clamped, mask),
        "training_ppl": masked_mean(trained.clamp(max=MAX_LOG_RATIO).exp(), rows),
        "training_log_ppl": masked_mean(trained, rows),
        "rollout_ppl": masked_mean(sampled.clamp(max=MAX_LOG_RATIO).exp(), rows),
        "rollout_log_ppl": masked_mean(sampled, rows),
        "log_ppl_diff": masked_mean(difference, rows),
        "log_ppl_abs_diff": masked_mean(difference.abs(), rows),
        "log_ppl_diff_max": difference[rows].max() if any_row else 0.0,
        "log_ppl_diff_min": difference[rows].min() if any_row else 0.0,
        "ppl_ratio": masked_mean(limited.exp(), rows),
        "chi2_token": masked_mean((2 * clamped).expm1(), mask),
        "chi2_seq": masked_mean((2 * row_ratio.double()).expm1(), rows),
    }
    return {key: float(value) for key, value in values.items()}


def _weight_metrics(
    raw: Tensor, weights: Tensor, mask: Tensor, settings: RolloutCorrection
) -> dict[str, float]:
    """Statistics of the ratios before truncation, and of how much of the batch the weights leave (effective sample size)."""
    low, high = settings.is_band
    low = low or 1 / high
    if not mask.any():
        return {}
    kept, row_means = raw[mask], masked_mean(raw, mask, -1)[mask.any(-1)]
    applied = weights[mask].double()
    return {
        "rollout_is_mean": float(kept.mean()),
        "rollout_is_max": float(kept.max()),
        "rollout_is_min": float(kept.min()),
        "rollout_is_std": float(kept.double().std(correction=0)),
        "rollout_is_ratio_fraction_high": float((kept > high).double().mean()),
        "rollout_is_ratio_fraction_low": float((kept < low).double().mean()),
        "rollout_is_eff_sample_size": float(
            applied.mean().square() / applied.square().mean().clamp(min=1e-12)
        ),
        "rollout_is_seq_mean": float(row_means.mean()),
        "rollout_is_seq_std": float(row_means.double().std(correction=0)),
        "rollout_is_seq_max": float(row_means.max()),
        "rollout_is_seq_min": float(row_means.min()),
        "rollout_is_seq_max_deviation": float((row_means - 1).abs().max()),
    }
