"""Metrics: numbers by name, under verl's names. docs/metrics.md describes each."""

import torch

Metrics = dict[str, float]


def summarize(name: str, values: torch.Tensor, counts: torch.Tensor | None = None) -> Metrics:
    """Return `name/mean`, `name/max` and `name/min` of a tensor, {} if it is empty.

    With `counts` each value is weighted by its count; values whose count is 0 are left out.
    """
    if counts is not None:
        values, counts = values[counts > 0], counts[counts > 0].double()
    if values.numel() == 0:
        return {}
    values = values.double()
    mean = values.mean() if counts is None else (values * counts).sum() / counts.sum()
    return {
        f"{name}/mean": mean.item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def quantiles(name: str, values: torch.Tensor) -> Metrics:
    """Return `name/p10`, `name/p50` and `name/p90` of a tensor, {} if it is empty.

    Each is one of the values: the smallest that at least this share of them does not exceed.
    """
    if values.numel() == 0:
        return {}
    ordered = values.flatten().double().sort().values
    ranks = {percent: -(-percent * len(ordered) // 100) - 1 for percent in (10, 50, 90)}
    return {f"{name}/p{percent}": ordered[rank].item() for percent, rank in ranks.items()}
