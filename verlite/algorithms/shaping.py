"""What happens to scores and groups before advantages: clipping, length penalties, groups without signal."""

import numpy as np
import torch
from torch import Tensor

from verlite.algorithms.advantages import Groups


def shape_scores(
    scores: Tensor, mean: float = 0.0, std: float = 1.0, clip: tuple[float, float] | None = None
) -> Tensor:
    """(scores - mean) / std, then clipped; any shape. mean and std are constants of the reward model, never of the batch.

    ValueError: std is not positive, or the clip range is empty.
    """
    if std <= 0:
        raise ValueError(f"scores are divided by std, which must be above 0, not {std}")
    shaped = (scores - mean) / std
    if clip is None:
        return shaped
    if clip[0] >= clip[1]:
        raise ValueError(
            f"clip range {list(clip)} is empty: the first bound must be below the second"
        )
    return shaped.clamp(*clip)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """What to add to the scores of long responses: 0 down to -factor (DAPO, arXiv:2503.14476, eq. 13). [B] -> [B] float32.

    No penalty up to max_length - buffer tokens; from there it grows linearly and reaches factor at max_length.
    ValueError: the buffer is not within 1..max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"overlong buffer must be within 1..{max_length} (max_response_length), not {buffer}"
        )
    excess = lengths.to(torch.float32) - (max_length - buffer)
    return -factor * (excess / buffer).clamp(0, 1)


def rows_with_signal(metric: Tensor, uid: np.ndarray, valid: Tensor | None = None) -> Tensor:
    """[B] bool: rows of groups in which the metric [B] is not the same for all valid rows (DAPO's dynamic sampling).

    Groups of fewer than two valid rows carry no signal either. Rows that are not valid follow their group.
    """
    votes = torch.ones_like(metric, dtype=torch.bool) if valid is None else valid.bool()
    groups = Groups.by_uid(uid, votes)
    metric = metric.double()
    return groups.max(metric) > -groups.max(-metric)
