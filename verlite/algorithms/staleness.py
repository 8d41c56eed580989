"""How stale training data are, and whether they are a fair sample: metrics of asynchronous
training.

Lengths of trained against lengths of sampled responses: Mistral AI 2025, "Magistral",
arXiv:2506.10910.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from verlite.protocol.metrics import Metrics


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
