"""verl.utils.reward_score.search_r1_like_qa_em: exact match of the last <answer>."""

from typing import Any

from verlite.rewards.qa import gold_answers, last_answer, matches, normalize

MANY_TAGS = 10

normalize_answer = normalize
extract_solution = last_answer


def em_check(prediction: str, golden_answers: Any) -> int:
    """Return 1 if the normalized text equals an accepted answer, else 0."""
    return int(matches(prediction, gold_answers(golden_answers)))


def subem_check(prediction: str, golden_answers: Any) -> int:
    """Return 1 if the normalized text contains an accepted answer, else 0."""
    return int(matches(prediction, gold_answers(golden_answers), "sub_em"))


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for a right answer, `format_score` for a wrong one, 0 without one.

    A right answer in a response with more than 10 opening or closing tags gets a quarter.
    """
    answer = last_answer(solution_str)
    if answer is None:
        return 0.0
    if not em_check(answer, ground_truth):
        return format_score
    tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    return score / 4 if tags > MANY_TAGS else score


def compute_score_subem(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` if the answer contains an accepted one, else `format_score`; 0 without one."""
    answer = last_answer(solution_str)
    if answer is None:
        return 0.0
    return score if subem_check(answer, ground_truth) else format_score
