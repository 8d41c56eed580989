"""verl.utils.reward_score.prime_math: the last box, else the stated answer, compared as LaTeX."""

import re

from verlite.rewards.math import equivalent, last_answer_line, last_boxed

_SENTENCE = re.compile(r"(?i)answers? (?:is|are):?\s+([^\n]+?)\.?(?:\n|$)")


def match_answer(response: str) -> tuple[bool, str]:
    """Return whether a response has a box or states its answer, and the answer.

    Otherwise the answer is the last line.
    """
    sentences = _SENTENCE.findall(response)
    answer = last_boxed(response) or last_answer_line(response) or "".join(sentences[-1:])
    if answer:
        return True, answer.strip().strip("$")
    lines = response.strip().splitlines()
    return False, lines[-1].strip() if lines else ""


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Return whether an answer is right."""
    return given_answer is not None and equivalent(str(given_answer), str(ground_truth))


math_equal = grade_answer


def compute_score(model_output: str, ground_truth: str) -> tuple[bool, bool, str]:
    """Return whether the answer is right, whether it is marked as one, and the answer."""
    is_matched, answer = match_answer(str(model_output))
    return grade_answer(answer, ground_truth), is_matched, answer
