"""verl.utils.reward_score.gsm8k."""

from decimal import Decimal, InvalidOperation

from verlite.rewards.gsm8k import extract_answer


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Return the number after the last "####" (strict) or the last number (flexible), or None.

    It has no thousands separators and does not end in a period.
    """
    return extract_answer(solution_str, method)


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` if the answer is right, `format_score` if it is wrong, 0 if there is none."""
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if _same(answer, str(ground_truth)) else format_score


def _same(answer: str, truth: str) -> bool:
    try:
        return Decimal(answer) == Decimal(truth.replace(",", ""))
    except InvalidOperation:  # such as 1.2.3, or a ground truth that is not a number
        return answer == truth
