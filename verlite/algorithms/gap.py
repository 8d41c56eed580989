"""How far the trainer's log-probs are from the rollout engine's, for the same sampled tokens.

First sums over a row's tokens, which add up over rows, micro-batches and ranks, then the metrics that are made of them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

SUMS = ("tokens", "log", "diff", "diff2", "p", "q", "p2", "q2", "pq")
MAXIMA = ("log_max", "diff_max")


def gap_rows(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """[b, G] float64: for each row SUMS over the tokens of the mask, then MAXIMA; inputs [b, R].

    With p and q the trainer's and the engine's probability of a token: their log-ratio, their difference, and what their
    correlation needs.
    """
    chosen = mask.bool()
    a, b = (torch.where(chosen, x.detach().double(), 0) for x in (log_prob, rollout_log_prob))
    p, q = a.exp() * chosen, b.exp() * chosen
    gap, diff = (a - b).abs(), (p - q).abs()
    sums = (chosen, gap, diff, diff**2, p, q, p**2, q**2, p * q)
    return torch.stack([*(x.double().sum(1) for x in sums), gap.amax(1), diff.amax(1)], dim=1)


def gap_totals(rows: Tensor) -> dict[str, Tensor]:
    """Of `gap_rows` [B, G] over the rows: sums, and maxima for the entries whose name ends in _max, which add up (or not) again."""
    totals = {name: rows[:, i].sum() for i, name in enumerate(SUMS)}
    if len(rows):
        totals |= {name: rows[:, len(SUMS) + i].amax() for i, name in enumerate(MAXIMA)}
    return {f"gap/{name}": value for name, value in totals.items()}


def gap_sums(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """`gap_totals` of [b, R] log-probs."""
    return gap_totals(gap_rows(log_prob, rollout_log_prob, mask))


def gap_metrics(sums: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Metrics from `gap_sums`, in whose place they are named; nothing where there were no tokens.

    training/log_prob_gap: mean |log p - log q|, and its largest. training/rollout_probs_diff_*: |p - q| (verl's names; the
    standard deviation is unbiased). training/rollout_actor_probs_pearson_corr: correlation of p and q; 0 where one is constant.
    """
    n, log, log_max, diff, diff2, diff_max, p, q, p2, q2, pq = (
        float(sums.get(f"gap/{name}", 0))
        for name in (
            "tokens",
            "log",
            "log_max",
            "diff",
            "diff2",
            "diff_max",
            "p",
            "q",
            "p2",
            "q2",
            "pq",
        )
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
        "training/rollout_probs_diff_std": (max(0.0, diff2 - diff * diff / n) / max(1.0, n - 1))
        ** 0.5,
        "training/rollout_actor_probs_pearson_corr": (pq - p * q / n) / spread**0.5
        if spread > 0
        else 0.0,
    }
