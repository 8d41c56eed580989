"""Validation metrics by data source, under verl's names.

`val-core/<data_source>/<variable>/<metric>` and `val-aux/...`: the variable is `reward` or a numeric part that the reward
function returned (`acc`, ...); the metric is `mean@N`, `std@N`, `best@k/mean`, `worst@k/mean` over the N samples of a prompt.
"""

from collections import defaultdict

import numpy as np

_DRAWS, _SEED = 1000, 42  # as verl: bootstrap of best@k and worst@k


def validation_metrics(sources: list[str], uids: list[str], variables: dict[str, list[float | None]]) -> dict[str, float]:
    """Metrics of validation samples.

    Args:
        sources: data source of each of the B samples.
        uids: which prompt each sample answers.
        variables: "reward" and other numeric parts, B values each; None where the sample has no such value (a failed reward).

    Returns:
        `val-core/` keys for the core variable (`acc` where a source has it, else `reward`) at the mean, and best at the largest k;
        everything else under `val-aux/`.
    """
    groups: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for i, (source, uid) in enumerate(zip(sources, uids, strict=True)):
        for name, values in variables.items():
            if (value := values[i]) is not None:
                groups[source][name][uid].append(value)
    metrics = {}
    for source, by_name in groups.items():
        core = "acc" if "acc" in by_name else "reward"
        for name, by_uid in by_name.items():
            for metric, value in _of_groups(list(by_uid.values())).items():
                largest = metric.startswith("mean@") or (metric.startswith("best@") and f"best@{max(map(len, by_uid.values()))}/" in metric)
                section = "val-core" if name == core and largest else "val-aux"
                metrics[f"{section}/{source}/{name}/{metric}"] = value
    return metrics


def _of_groups(groups: list[list[float]]) -> dict[str, float]:
    """Mean over prompts of each statistic of a prompt's samples."""
    n = max(map(len, groups))
    metrics = {f"mean@{n}": float(np.mean([np.mean(g) for g in groups]))}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(np.mean([np.std(g) for g in groups]))
    sizes = [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n]
    for k in sizes:
        rng = np.random.default_rng(_SEED)
        best, worst = [], []
        for group in groups:
            draws = np.asarray(group)[rng.integers(0, len(group), (_DRAWS, k))]
            best.append(draws.max(1).mean())
            worst.append(draws.min(1).mean())
        metrics[f"best@{k}/mean"] = float(np.mean(best))
        metrics[f"worst@{k}/mean"] = float(np.mean(worst))
    return metrics
