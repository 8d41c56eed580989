"""How far training data are from the policy that is trained on them.

The log-prob gap is the distance between the trainer's and the rollout engine's log-probs. Its
statistics are first summed per row. They add up over rows, micro-batches and ranks, and metrics are
computed from the totals. In asynchronous training tokens have an age, and the lengths of trained
against those of sampled responses tell whether the data are a fair sample (Mistral AI 2025,
"Magistral", arXiv:2506.10910).
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from verlite.algorithms.rollout_correction import importance_ratios, log_ratios
from verlite.protocol.metrics import Metrics

SUMS = (
    *("tokens", "log", "diff", "diff2", "p", "q", "p2", "q2", "pq"),
    *("w", "w2", "rows", "row_w", "row_w2"),
)
MAXIMA = ("log_max", "diff_max")
EFF_SAMPLE_SIZE = "training/rollout_eff_sample_size"
"""Metric, with _token or _seq."""


def gap_rows(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return each row's statistics over the mask, [b, G] float64: SUMS, then MAXIMA.

    With p and q the trainer's and the engine's probability of a token: tokens counts tokens, log is
    |log p - log q|, diff is |p - q|, and p to pq are the terms of their variance and correlation. w
    is the importance weight p / q and row_w its product over a row; rows is 1 unless the mask is 0.

    log_prob, rollout_log_prob, mask: [b, R].
    """
    selected = mask.bool()
    log_p = torch.where(selected, log_prob.detach().double(), 0)
    log_q = torch.where(selected, rollout_log_prob.detach().double(), 0)
    p = log_p.exp() * selected
    q = log_q.exp() * selected
    gap = (log_p - log_q).abs()
    diff = (p - q).abs()
    log_ratio = log_ratios(log_p, log_q, selected)
    w = importance_ratios(log_ratio, selected, "token")
    row_w = importance_ratios(log_ratio, selected, "sequence").amax(1)
    terms = (selected, gap, diff, diff**2, p, q, p**2, q**2, p * q, w, w**2)
    sums = [term.double().sum(1) for term in terms]
    sums += [selected.any(1).double(), row_w, row_w**2]
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
    training/rollout_eff_sample_size_{token,seq}: effective sample size (sum w)^2 / (n * sum w^2) of
        the unbounded importance weights of tokens, and of rows: 1 if all are equal, 1/n if one has
        all the weight. A predictor of collapse in VCPO, arXiv:2602.17616.
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
        f"{EFF_SAMPLE_SIZE}_token": total["w"] ** 2 / (n * total["w2"]),
        f"{EFF_SAMPLE_SIZE}_seq": total["row_w"] ** 2 / (total["rows"] * total["row_w2"]),
    }


def age_metrics(step: int, spans: Iterable[Iterable[tuple[int, int]]]) -> Metrics:
    """Summarize the ages of a step's sampled tokens; {} if there are none.

    A token that weight version v sampled has age `step` - v: the number of updates between.

    Args:
        step: the step that trains on them.
        spans: of each row, how many tokens each version sampled: (version, count).

    Returns:
        age/mean, age/max, age/min over tokens.
        age/share_K: share of tokens with age K, for each K from 0 to the highest.
        age/mixed_rows: share of rows with tokens of several versions, of those that have any.
    """
    tokens: Counter[int] = Counter()
    rows = mixed = 0
    for row in spans:
        versions = set()
        for version, count in row:
            if count:
                tokens[step - version] += count
                versions.add(version)
        rows += bool(versions)
        mixed += len(versions) > 1
    if not tokens:
        return {}
    total = tokens.total()
    return {
        "age/mean": sum(age * count for age, count in tokens.items()) / total,
        "age/max": float(max(tokens)),
        "age/min": float(min(tokens)),
        **{f"age/share_{age}": tokens[age] / total for age in range(max(tokens) + 1)},
        "age/mixed_rows": mixed / rows,
    }


def length_distance(trained: Tensor, sampled: Tensor) -> float | None:
    """Return the Kolmogorov-Smirnov distance between two sets of response lengths: the largest
    difference between their distribution functions, from 0 (equal) to 1. None if one is empty.

    A run that drops or avoids slow responses trains on shorter ones than it samples. For equal
    distributions, 1.36 * sqrt(1 / n + 1 / m) is exceeded in 5% of all cases.

    Args:
        trained: [n] lengths. sampled: [m] lengths.
    """
    if not len(trained) or not len(sampled):
        return None
    trained, sampled = trained.double().sort().values, sampled.double().sort().values
    at = torch.cat([trained, sampled])
    below = [
        torch.searchsorted(lengths, at, right=True).double() / len(lengths)
        for lengths in (trained, sampled)
    ]
    return float((below[0] - below[1]).abs().max())
