"""Validation metrics by data source, under verl's names.

`val-core/<data_source>/<variable>/<metric>` and `val-aux/...`: the variable is `reward` or a numeric part that the reward
function returned (`acc`, ...); the metric is `mean@N`, `std@N`, `best@k/mean`, `worst@k/mean` over the N samples of a prompt.
"""

from collections import defaultdict
from typing import Any

import numpy as np

_DRAWS, _SEED = 1000, 42  # as verl: bootstrap of best@k and worst@k


def validation_metrics(
    sources: list[str],
    uids: list[str],
    variables: dict[str, list[float | None]],
    predictions: list[Any] | None = None,
) -> dict[str, float]:
    """Metrics of validation samples.

    Args:
        sources: data source of each of the B samples.
        uids: which prompt each sample answers.
        variables: "reward" and other numeric parts, B values each; None where the sample has no such value (a failed reward).
        predictions: the answers themselves (the reward part `pred`), None where there is none: gives `maj@k`.

    Returns:
        `val-core/` keys for the core variable (`acc` where a source has it, else `reward`) at the mean, and best at the largest k;
        everything else under `val-aux/`.
    """
    groups: dict[str, dict[str, dict[str, list[tuple[float, Any]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    answers = predictions or [None] * len(uids)
    for i, (source, uid) in enumerate(zip(sources, uids, strict=True)):
        for name, values in variables.items():
            if (value := values[i]) is not None:
                groups[source][name][uid].append((value, answers[i]))
    metrics = {}
    for source, by_name in groups.items():
        core = "acc" if "acc" in by_name else "reward"
        for name, by_uid in by_name.items():
            for metric, value in _of_groups(list(by_uid.values())).items():
                at = metric.partition("/")[0].partition("@")[2]
                largest = metric.startswith(("mean@", "best@", "maj@")) and int(at) == max(
                    map(len, by_uid.values())
                )
                section = "val-core" if name == core and largest else "val-aux"
                metrics[f"{section}/{source}/{name}/{metric}"] = value
    return metrics


def _of_groups(answered: list[list[tuple[float, Any]]]) -> dict[str, float]:
    """Mean over prompts of each statistic of a prompt's samples, (value, answer) each."""
    groups = [[value for value, _ in group] for group in answered]
    n = max(map(len, groups))
    metrics = {f"mean@{n}": float(np.mean([np.mean(g) for g in groups]))}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(np.mean([np.std(g) for g in groups]))
    sizes = [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n]
    for k in sizes:
        rng = np.random.default_rng(_SEED)
        best, worst, majority = [], [], []
        for group, pairs in zip(groups, answered, strict=True):
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
    """Mean over draws [D, k] of the value of the answer drawn most often; of equally frequent ones the first drawn."""
    numbers: dict[str, int] = {}
    kind = np.array([numbers.setdefault(str(answer), len(numbers)) for answer in answers])[drawn]
    counts = (kind[:, :, None] == kind[:, None, :]).sum(-1)
    return float(values[drawn[np.arange(len(drawn)), counts.argmax(1)]].mean())
