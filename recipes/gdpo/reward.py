"""A reward of two parts for column addition: is the whole answer right, and how much of it?"""

from typing import Any

from verlite.rewards import exact


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """Return the score, 1.0 for a right answer, with its parts.

    accuracy: the same. right_digits: share of the answer's digits that are right, 0 to 1.
    """
    accuracy = exact.compute_score(data_source, solution_str, ground_truth, extra_info)
    pairs = zip(solution_str, ground_truth, strict=False)
    right = sum(written == expected for written, expected in pairs)
    return {"score": accuracy, "accuracy": accuracy, "right_digits": right / len(ground_truth)}
