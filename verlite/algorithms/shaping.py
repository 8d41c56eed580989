"""Reward shaping before advantages: normalization, clipping, length penalty, group filtering."""

import numpy as np
import torch
from torch import Tensor

from verlite.algorithms.advantages import Groups


def shape_scores(
    scores: Tensor, mean: float = 0.0, std: float = 1.0, clip: tuple[float, float] | None = None
) -> Tensor:
    """Return (scores - mean) / std, then clipped to `clip`; any shape.

    mean and std are constants from the config, not statistics of the batch.

    Raises:
        ValueError: std is not positive, or the clip range is empty.
    """
    if std <= 0:
        raise ValueError(f"std={std} must be above 0: scores are divided by it")
    shaped = (scores - mean) / std
    if clip is None:
        return shaped
    if clip[0] >= clip[1]:
        raise ValueError(
            f"clip range {list(clip)} is empty: the lower bound must be below the upper bound"
        )
    return shaped.clamp(*clip)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Return DAPO's overlong penalty, added to scores (arXiv:2503.14476, eq. 13): [B] float32.

    The penalty is 0 up to max_length - buffer tokens. From there it decreases linearly to -factor
    at max_length.

    Args:
        lengths: [B], response tokens.
        max_length: maximum response length.
        buffer: tokens over which the penalty grows.
        factor: size of the full penalty.

    Raises:
        ValueError: the buffer is not between 1 and max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"overlong buffer {buffer} must be between 1 and max_response_length={max_length}"
        )
    excess = lengths.to(torch.float32) - (max_length - buffer)
    return -factor * (excess / buffer).clamp(0, 1)


def rows_with_signal(metric: Tensor, uid: np.ndarray, valid: Tensor | None = None) -> Tensor:
    """Return the rows whose group has different metric values, [B] bool (DAPO's dynamic sampling).

    Groups with fewer than two valid rows are not selected. Invalid rows follow their group.
    (arXiv:2503.14476, section 3.2.)

    Args:
        metric: [B], compared within groups.
        uid: [B] object array, the group of each row.
        valid: [B] bool. None: all rows are valid.
    """
    if valid is None:
        valid = torch.ones_like(metric, dtype=torch.bool)
    groups = Groups.by_uid(uid, valid.bool())
    metric = metric.double()
    smallest = -groups.max(-metric)
    return groups.max(metric) > smallest
