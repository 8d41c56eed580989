"""Correcting for the difference between the engine that sampled and the trainer that learns.

w = pi_train / pi_rollout on sampled tokens. Importance weights multiply the loss; rejection takes tokens or whole sequences out
of it. Keys, metric names and presets are verl's. Log-ratios are limited to +-20 before they are exponentiated.
(Background: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; IcePop, Ling Team 2025.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from verlite.algorithms.kl import LOG_PROB_FLOOR, MAX_LOG_RATIO
from verlite.algorithms.masked import masked_mean, masked_sum

REJECTIONS = ("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
              "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3")  # fmt: skip


@dataclass(frozen=True)
class RolloutCorrection:
    """Settings, by verl's names. ValueError on construction names the key that is wrong.

    rollout_is: weigh the loss by w: None, "token" (each token's w) or "sequence" (the product over the row, on each token).
    rollout_is_threshold: C truncates weights to at most C (TIS); "low_high" sets weights outside the band to 0 (IcePop).
    rollout_is_batch_normalize: divide the weights by their mean.
    rollout_rs: comma-separated rejections from REJECTIONS: <token | seq_sum | seq_mean | seq_max>_<k1 | k2 | k3>, with
        k1 = -log w, k2 = (log w)^2 / 2, k3 = w - 1 - log w. A row or token is kept when it passes all.
    rollout_rs_threshold: one threshold per rejection, or one for all. For k1 a band "low_high" of the ratio (exp of the summed
        or mean log w); a single u means 1/u to u. For k2 and k3 an upper bound.
    bypass_mode: take the rollout's log-probs as old log-probs: no forward pass, and the policy loss bypass_mode.
    loss_type: in bypass mode, ppo_clip (the ratio itself corrects) or reinforce (-A log pi, weighted).
    """

    rollout_is: str | None = None
    rollout_is_threshold: float | str = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"

    def __post_init__(self) -> None:
        if self.rollout_is not in (None, "token", "sequence"):
            raise ValueError(f"rollout_is={self.rollout_is}: choose token, sequence or null")
        if self.loss_type not in ("ppo_clip", "reinforce"):
            raise ValueError(f"loss_type={self.loss_type}: choose ppo_clip or reinforce")
        if self.bypass_mode and self.rollout_is_batch_normalize:
            raise ValueError("rollout_is_batch_normalize needs all weights at once, which bypass_mode never has: turn one of them off")
        _ = self.is_band, self.rejections

    @cached_property
    def is_band(self) -> tuple[float, float]:
        """Weights below the first number or above the second are out of the band; 0 and C for truncation."""
        return _band("rollout_is_threshold", self.rollout_is_threshold, lambda high: 0.0)

    @property
    def is_truncated(self) -> bool:
        """True: weights above the band become its upper bound (TIS). False: weights outside it become 0 (IcePop)."""
        return "_" not in str(self.rollout_is_threshold)

    @cached_property
    def rejections(self) -> list[tuple[str, float, float]]:
        """(name, low, high): keep while low <= statistic <= high; for k1 the statistic is the log of the ratio."""
        if not self.rollout_rs:
            return []
        names = [name.strip() for name in self.rollout_rs.split(",")]
        if self.rollout_rs_threshold is None:
            raise ValueError(f"rollout_rs={self.rollout_rs} needs rollout_rs_threshold")
        thresholds = [part.strip() for part in str(self.rollout_rs_threshold).split(",")]
        if len(thresholds) == 1:
            thresholds *= len(names)
        if len(thresholds) != len(names):
            raise ValueError(
                f"rollout_rs has {len(names)} entries, but rollout_rs_threshold has {len(thresholds)}: give one each, or one for all"
            )
        rules = []
        for name, threshold in zip(names, thresholds, strict=True):
            if name not in REJECTIONS:
                raise ValueError(f"rollout_rs={name}: choose from {', '.join(REJECTIONS)}")
            if name.endswith("k1"):
                low, high = _band("rollout_rs_threshold", threshold, lambda high: 1 / high)
                if low <= 0:
                    raise ValueError(f"rollout_rs_threshold={threshold}: the lower bound of a ratio must be above 0")
                rules.append((name, math.log(low), math.log(high)))
            elif "_" in threshold:
                raise ValueError(f"rollout_rs_threshold={threshold}: {name} has an upper bound only")
            else:
                rules.append((name, -math.inf, _band("rollout_rs_threshold", threshold, lambda high: 0.0)[1]))
        return rules


def correct_rollout(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, settings: RolloutCorrection
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
            mean = masked_mean(masked_mean(weights, mask, -1), mask.any(-1)) if per_row else masked_mean(weights, mask)
            weights = weights / torch.where(mean > 1e-8, mean, 1.0)
            metrics["rollout_is_batch_norm_factor"] = float(mean)
    kept, passed = rejection_mask(log_ratio, mask, settings)
    if passed:
        tokens, rows = max(int(mask.count_nonzero()), 1), max(int(mask.any(-1).count_nonzero()), 1)
        for name, one in passed.items():
            metrics[f"rollout_rs_{name}_masked_fraction"] = float((mask & ~one).count_nonzero()) / tokens
        metrics["rollout_rs_masked_fraction"] = float((mask & ~kept).count_nonzero()) / tokens
        metrics["rollout_rs_seq_masked_fraction"] = float((mask.any(-1) & ~kept.any(-1)).count_nonzero()) / rows
    return weights, response_mask * kept, {f"rollout_corr/{key}": value for key, value in metrics.items()}


def log_ratios(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """[b, R] log w on the mask, 0 elsewhere; finite even where a log-prob is -inf."""
    return torch.where(mask, log_prob.clamp(min=LOG_PROB_FLOOR) - rollout_log_prob.clamp(min=LOG_PROB_FLOOR), 0)


def importance_ratios(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """[b, R] w of each token, or the product over its row, at level "token" or "sequence"; 0 outside the mask."""
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    return torch.where(mask, log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0)


def bounded_weights(ratios: Tensor, settings: RolloutCorrection) -> Tensor:
    """Ratios truncated to the threshold (TIS), or set to 0 outside the band (IcePop)."""
    low, high = settings.is_band
    return ratios.clamp(max=high) if settings.is_truncated else torch.where((ratios >= low) & (ratios <= high), ratios, 0)


def rejection_mask(log_ratio: Tensor, mask: Tensor, settings: RolloutCorrection) -> tuple[Tensor, dict[str, Tensor]]:
    """[b, R] bool: trainable tokens that every rejection rule keeps; and by rule's name, those that it alone keeps."""
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    passed = {}
    for name, low, high in settings.rejections:
        level, kind = name.rsplit("_", 1)
        # k1 is compared as log w itself, so that its bounds are those of the ratio.
        statistic = {"k1": log_ratio, "k2": log_ratio.square() / 2, "k3": torch.expm1(clamped) - clamped}[kind]
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


def off_policy_metrics(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> dict[str, float]:
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


def _weight_metrics(raw: Tensor, weights: Tensor, mask: Tensor, settings: RolloutCorrection) -> dict[str, float]:
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
        "rollout_is_eff_sample_size": float(applied.mean().square() / applied.square().mean().clamp(min=1e-12)),
        "rollout_is_seq_mean": float(row_means.mean()),
        "rollout_is_seq_std": float(row_means.double().std(correction=0)),
        "rollout_is_seq_max": float(row_means.max()),
        "rollout_is_seq_min": float(row_means.min()),
        "rollout_is_seq_max_deviation": float((row_means - 1).abs().max()),
    }


def _band(key: str, value: float | str, default_low: Callable[[float], float]) -> tuple[float, float]:
    """ "low_high" or a single upper bound as numbers, checked."""
    try:
        numbers = [float(part) for part in str(value).split("_")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] > 0:
        numbers = [default_low(numbers[0]), numbers[0]]
    if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1]:
        raise ValueError(f"{key}={value}: write one positive number, or two as low_high with low below high (0.5_2.0)")
    return numbers[0], numbers[1]


PRESETS: dict[str, RolloutCorrection] = {
    "disabled": RolloutCorrection(),
    "decoupled_token_is": RolloutCorrection("token", 2.0),
    "decoupled_seq_is": RolloutCorrection("sequence", 2.0),
    "decoupled_seq_is_rs": RolloutCorrection("sequence", 2.0, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"),
    "decoupled_geo_rs": RolloutCorrection(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001"),
    "decoupled_geo_rs_token_tis": RolloutCorrection("token", 2.0, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001"),
    "decoupled_k3_rs": RolloutCorrection(rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01),
    "decoupled_k3_rs_token_tis": RolloutCorrection("token", 2.0, rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01),
    "icepop": RolloutCorrection("token", "0.5_5.0"),
    "bypass_ppo_clip": RolloutCorrection(bypass_mode=True),
    "bypass_ppo_clip_geo_rs": RolloutCorrection(bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001"),
    "bypass_ppo_clip_k3_rs": RolloutCorrection(bypass_mode=True, rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01),
    "bypass_pg_is": RolloutCorrection("sequence", 2.0, bypass_mode=True, loss_type="reinforce"),
    "bypass_pg_geo_rs": RolloutCorrection(
        bypass_mode=True, loss_type="reinforce", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001"
    ),
    "bypass_pg_geo_rs_token_tis": RolloutCorrection(
        "token", 2.0, bypass_mode=True, loss_type="reinforce", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001"
    ),
}
