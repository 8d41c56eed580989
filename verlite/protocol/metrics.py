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
