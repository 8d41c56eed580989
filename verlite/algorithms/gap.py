"""The log-prob gap: the distance between the trainer's and the rollout engine's log-probs.

Statistics are first summed per row. They add up over rows, micro-batches and ranks, and metrics are
computed from the totals.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

SUMS = ("tokens", "log", "diff", "diff2", "p", "q", "p2", "q2", "pq")
MAXIMA = ("log_max", "diff_max")


def gap_rows(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return each row's statistics over the mask, [b, G] float64: SUMS, then MAXIMA.

    With p and q the trainer's and the engine's probability of a token: tokens counts tokens, log is
    |log p - log q|, diff is |p - q|, and the rest are the terms of their variance and correlation.

    log_prob, rollout_log_prob, mask: [b, R].
    """
    selected = mask.bool()
    log_p = torch.where(selected, log_prob.detach().double(), 0)
    log_q = torch.where(selected, rollout_log_prob.detach().double(), 0)
    p = log_p.exp() * selected
    q = log_q.exp() * selected
    gap = (log_p - log_q).abs()
    diff = (p - q).abs()
    terms = (selected, gap, diff, diff**2, p, q, p**2, q**2, p * q)
    sums = [term.double().sum(1) for term in terms]
    return torch.stack([*sums, gap.amax(1), diff.amax(1)], dim=1)


def gap_totals(rows: Tensor) -> dict[str, Tensor]:
    """Reduce the result of `gap_rows` [B, G] over rows: sums, and maxima for names in `*_max`."""
    totals = {name: rows[:, i].sum() for i, name in enumerate(SUMS)}
    if len(rows):
        totals |= {name: rows[:, len(SUMS) + i].amax() for i, name in enumerate(MAXIMA)}
    return {f"gap/{name}": value for name, value in totals.items()}


def gap_sums(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return `gap_totals` of [b, R] log-probs."""
    return gap_totals(gap_rows(log_prob, rollout_log_prob, mask))


def gap_metrics(sums: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Compute logged metrics from the sums of `gap_totals`; {} if there were no tokens.

    training/log_prob_gap, training/log_prob_gap_max: mean and maximum of |log p - log q|.
    training/rollout_probs_diff_{mean,max,std}: statistics of |p - q| (verl's names; unbiased
        standard deviation). training/rollout_probs_diff_valid: 1.
    training/rollout_actor_probs_pearson_corr: correlation of p and q; 0 if p or q is constant.
    """
    total = {name: float(sums.get(f"gap/{name}", 0)) for name in (*SUMS, *MAXIMA)}
    n = total["tokens"]
    if not n:
        return {}
    diff_squares = max(0.0, total["diff2"] - total["diff"] * total["diff"] / n)
    p_squares = max(0.0, total["p2"] - total["p"] * total["p"] / n)
    q_squares = max(0.0, total["q2"] - total["q"] * total["q"] / n)
    covariance = total["pq"] - total["p"] * total["q"] / n
    scale = (p_squares * q_squares) ** 0.5
    return {
        "training/log_prob_gap": total["log"] / n,
        "training/log_prob_gap_max": total["log_max"],
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_mean": total["diff"] / n,
        "training/rollout_probs_diff_max": total["diff_max"],
        "training/rollout_probs_diff_std": (diff_squares / max(1.0, n - 1)) ** 0.5,
        "training/rollout_actor_probs_pearson_corr": covariance / scale if scale else 0.0,
    }
