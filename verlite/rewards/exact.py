"""The response is the answer, and nothing else: for tasks whose prompts ask for just that."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 when the response without surrounding white space equals the ground truth, else 0.0."""
    return float(solution_str.strip() == ground_truth)
