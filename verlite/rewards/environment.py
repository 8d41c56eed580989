"""The score of a sample is the sum of the rewards that its environment gave to its turns."""

from collections.abc import Mapping
from typing import Any

NAME = "verlite.rewards.environment"


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """Return the sum of `Step.reward` over the turns, in the reward's own unit.

    A turn that was cut at the length limit reached no environment and adds nothing.

    Raises:
        ValueError: the run has no environment.
    """
    if "trajectory" not in extra_info:
        raise ValueError("there is no environment whose rewards could be added up: max_turns=0")
    return float(sum(extra_info["trajectory"]["turn_scores"]))
