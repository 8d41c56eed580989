"""Validation metrics by data source, under verl's names.

They are `val-core/<data_source>/<variable>/<metric>` and `val-aux/...`. The variable is `reward`
or a numeric part that the reward function returned, such as `acc`. The metric is `mean@N`, `std@N`,
`best@k/mean`, `worst@k/mean` or `maj@k/mean` over the N samples of a prompt.
"""

from collections import defaultdict
from typing import Any

import numpy as np

_DRAWS = 1000
_SEED = 42
"""Bootstrap of best@k and worst@k, with verl's values."""


def validation_metrics(
    sources: list[str],
    uids: list[str],
    variables: dict[str, list[float | None]],
    predictions: list[Any] | None = None,
) -> dict[str, float]:
    """Compute the metrics of B validation samples.

    Args:
        sources: Data source of each sample.
        uids: Prompt id of each sample.
        variables: "reward" and other numeric parts, B values each; None where a sample has no
            value, such as a failed reward.
        predictions: The extracted answer of each sample (the reward part `pred`) or None. They give
            `maj@k`.

    Returns:
        Under `val-core/` the mean, and best and maj at the largest k, of the core variable: `acc`
        if the source has it, otherwise `reward`. Everything else is under `val-aux/`.
    """
    groups: dict[str, dict[str, dict[str, list[tuple[float, Any]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    answers = predictions or [None] * len(uids)
    for i, (source, uid) in enumerate(zip(sources, uids, strict=True)):
        for name, values in variables.items():
            value = values[i]
            if value is not None:
                groups[source][name][uid].append((value, answers[i]))
    metrics = {}
    for source, by_name in groups.items():
        core = "acc" if "acc" in by_name else "reward"
        for name, by_uid in by_name.items():
            n = max(map(len, by_uid.values()))
            core_metrics = (f"mean@{n}", f"best@{n}/mean", f"maj@{n}/mean")
            for metric, value in _metrics_of_groups(list(by_uid.values())).items():
                is_core = name == core and metric in core_metrics
                section = "val-core" if is_core else "val-aux"
                metrics[f"{section}/{source}/{name}/{metric}"] = value
    return metrics


def _metrics_of_groups(groups_of_pairs: list[list[tuple[float, Any]]]) -> dict[str, float]:
    """Return the mean over prompts of each statistic of a prompt's samples (value, answer)."""
    groups = [[value for value, _ in group] for group in groups_of_pairs]
    n = max(map(len, groups))
    metrics = {f"mean@{n}": float(np.mean([np.mean(g) for g in groups]))}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(np.mean([np.std(g) for g in groups]))
    sizes = [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n]
    for k in sizes:
        rng = np.random.default_rng(_SEED)
        best, worst, majority = [], [], []
        for group, pairs in zip(groups, groups_of_pairs, strict=True):
            drawn = rng.integers(0, len(group), (_DRAWS, k))
            draws = np.asarray(group)[drawn]
            best.append(draws.max(1).mean())
            worst.append(draws.min(1).mean())
            if all(answer is not None for _, answer in pairs):
                majority.append(
                    _majority([answer for _, answer in pairs], np.asarray(group), drawn)
                )
        metrics[f"best@{k}/mean"] = float(np.mean(best))
        metrics[f"worst@{k}/mean"] = float(np.mean(worst))
        if len(majority) == len(groups):
            metrics[f"maj@{k}/mean"] = float(np.mean(majority))
    return metrics


def _majority(answers: list[Any], values: np.ndarray, drawn: np.ndarray) -> float:
    """Return the mean over draws [D, k] of the value of the most frequent answer.

    Of equally frequent answers the first one counts.
    """
    numbers: dict[str, int] = {}
    kind = np.array([numbers.setdefault(str(answer), len(numbers)) for answer in answers])[drawn]
    counts = (kind[:, :, None] == kind[:, None, :]).sum(-1)
    return float(values[drawn[np.arange(len(drawn)), counts.argmax(1)]].mean())
