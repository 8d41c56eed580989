"""How far the trainer's log-probs are from the rollout engine's, for the same sampled tokens.

First sums over tokens, which add up over micro-batches and ranks, then the metrics that are made of them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def gap_sums(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """float64 sums over the tokens of the mask; inputs [b, R]. Entries that end in _max are maxima in place of sums.

    With p and q the trainer's and the engine's probability of a token: their log-ratio, their difference, and what their
    correlation needs.
    """
    chosen = mask.bool()
    a, b = log_prob.detach()[chosen].double(), rollout_log_prob[chosen].double()
    p, q = a.exp(), b.exp()
    gap, diff = (a - b).abs(), (p - q).abs()
    sums = {"tokens": torch.ones_like(p), "log": gap, "diff": diff, "diff2": diff**2, "p": p, "q": q, "p2": p**2, "q2": q**2, "pq": p * q}
    maxima = {"log_max": gap, "diff_max": diff}
    return {f"gap/{name}": values.sum() for name, values in sums.items()} | {
        f"gap/{name}": values.max() if values.numel() else values.sum() for name, values in maxima.items()
    }


def gap_metrics(sums: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Metrics from `gap_sums`, in whose place they are named; nothing where there were no tokens.

    training/log_prob_gap: mean |log p - log q|, and its largest. training/rollout_probs_diff_*: |p - q| (verl's names; the
    standard deviation is unbiased). training/rollout_actor_probs_pearson_corr: correlation of p and q; 0 where one is constant.
    """
    n, log, log_max, diff, diff2, diff_max, p, q, p2, q2, pq = (
        float(sums.get(f"gap/{name}", 0)) for name in ("tokens", "log", "log_max", "diff", "diff2", "diff_max", "p", "q", "p2", "q2", "pq")
    )
    if not n:
        return {}
    spread = max(0.0, p2 - p * p / n) * max(0.0, q2 - q * q / n)
    return {
        "training/log_prob_gap": log / n,
        "training/log_prob_gap_max": log_max,
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_mean": diff / n,
        "training/rollout_probs_diff_max": diff_max,
        "training/rollout_probs_diff_std": (max(0.0, diff2 - diff * diff / n) / max(1.0, n - 1)) ** 0.5,
        "training/rollout_actor_probs_pearson_corr": (pq - p * q / n) / spread**0.5 if spread > 0 else 0.0,
    }
