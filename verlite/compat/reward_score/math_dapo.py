r"""verl.utils.reward_score.math_dapo: the last line "Answer: X", or the last box; +1 or -1."""

import re
from typing import Any

from verlite.compat.reward_score.math_reward import last_boxed_only_string, remove_boxed
from verlite.rewards.math import equivalent, last_answer_line, last_boxed, normalize

__all__ = [
    "compute_score",
    "is_correct_minerva",
    "is_correct_strict_box",
    "last_boxed_only_string",
    "normalize_final_answer",
    "remove_boxed",
    "verify",
]

NO_ANSWER = "[INVALID]"
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|overline)\{([^{}]*)\}")
_UNIT = re.compile(r"(-?[\d.,]+) +[A-Za-z]+")
_GROUPED = re.compile(r"\d{1,3}(,\d{3})+")


def normalize_final_answer(final_answer: str) -> str:
    """Return what follows the last "=", without dollar signs, font commands and spaces.

    A number has no thousands separators and no unit of one word.
    """
    text = _TEXT.sub(r"\1", final_answer.rpartition("=")[2].replace("$", "")).strip()
    unit = _UNIT.fullmatch(text)
    text = normalize(unit[1] if unit else "".join(text.split()))
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str | None = None
) -> tuple[bool, str]:
    """Return whether the last line "Answer: X" is right, and X; "[INVALID]" without one.

    With `answer_pattern` X is the last match of this expression's group.
    """
    if answer_pattern is None:
        answer = last_answer_line(solution_str)
    else:
        answer = next(iter(re.findall(answer_pattern, solution_str)[::-1]), None)
    if answer is None:
        return False, NO_ANSWER
    truth = remove_boxed(last_boxed_only_string(gt) or "") if gt_need_extract else gt
    return _same(answer, truth), normalize_final_answer(answer)


def is_correct_strict_box(
    pred: str, gt: str, pause_tokens_index: list[int] | None = None
) -> tuple[int, str | None]:
    """Return 1 if the last box of the last 100 characters is the ground truth's text, else -1."""
    start = -100 if pause_tokens_index is None else pause_tokens_index[-1] - 100
    answer = last_boxed(pred[start:])
    return (1 if answer == gt else -1), answer


def verify(
    solution_str: str,
    answer: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> tuple[bool, str | None]:
    """Return whether a response is right, and its answer. The answer line has precedence."""
    if strict_box_verify:
        correct, box = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return correct == 1, box
    right, line = is_correct_minerva(solution_str, answer)
    if line != NO_ANSWER:
        return right, line
    boxed = last_boxed(solution_str)
    return (False, NO_ANSWER) if boxed is None else (_same(boxed, answer), boxed)


def compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """Return score (1.0 or -1.0), acc and pred, from the last 300 characters of a response."""
    end = solution_str[-300:]
    correct, answer = verify(end, ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer}


def _same(answer: str, truth: str) -> bool:
    forms = normalize_final_answer(answer), normalize_final_answer(truth)
    return forms[0] == forms[1] != "" or equivalent(answer, truth)
