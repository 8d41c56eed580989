"""verl.utils.reward_score.math_batch."""

from collections.abc import Sequence
from typing import Any

from verlite.compat.reward_score.math_reward import compute_score


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Sequence[Any],
) -> list[float]:
    """Return the score of each response by its last box."""
    return [compute_score(*pair) for pair in zip(solution_strs, ground_truths, strict=True)]
