"""Exact match of the whole response, for tasks whose prompts ask for the answer alone."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1.0 if the stripped response equals the ground truth, else 0.0."""
    return float(solution_str.strip() == ground_truth)
