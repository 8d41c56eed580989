r"""verl.utils.reward_score for mathematics: the final answer in a response, compared as LaTeX.

- math, math_reward, math_batch: the last box.
- math_dapo: the last line "Answer: X", or the last box; +1 or -1.
- math_verify: the answers in a response, compared by math-verify.
- prime_math: the last box, else the stated answer.
- geo3k: the last box, plus a share for <think>...</think> before it.

Comparisons of mathematical answers may never end, so these functions are for processes that can be
killed, such as those of reward functions. A function that several of verl's modules have begins
with the name of its module, as in `scores`.
"""

import re
from collections.abc import Sequence
from typing import Any

import math_verify

from verlite.rewards.math import equivalent, last_answer_line, last_boxed, normalize

_SPACING = (" ", "\n", r"\!", r"\,", r"\;", r"\left", r"\right", r"\$")
_FRACTION = re.compile(r"\\frac([^{])(?:(?=\{)|(.))")


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last `\boxed{...}`, or None. `\boxed 5` and `\fbox{5}` become `\boxed{5}`."""
    content = last_boxed(string)
    return None if content is None else f"\\boxed{{{content}}}"


def remove_boxed(s: str) -> str:
    r"""Return the content of `\boxed{...}`. Raises ValueError if the text is something else."""
    content = last_boxed(s) if isinstance(s, str) and s.startswith("\\boxed") else None
    if content is None:
        raise ValueError(f"{s!r:.100} is not \\boxed{{...}}")
    return content


def fix_fracs(string: str) -> str:
    r"""Return the text with braces around each part of a fraction: `\frac12` is `\frac{1}{2}`."""
    return _FRACTION.sub(lambda m: rf"\frac{{{m[1]}}}" + (f"{{{m[2]}}}" if m[2] else ""), string)


def strip_string(string: str) -> str:
    """Return a short form of an answer, for comparisons as text. `is_equiv` does not need it."""
    for text in _SPACING:
        string = string.replace(text, "")
    return normalize(fix_fracs(string.replace("dfrac", "frac").replace("tfrac", "frac")))


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Return whether two answers mean the same. Two missing answers do."""
    if str1 is None or str2 is None:
        return str1 is str2
    return equivalent(str1, str2)


def math_reward_compute_score(solution_str: str, ground_truth: str) -> float:
    """Return 1.0 if the last box is equivalent to the ground truth, else 0.0."""
    answer = last_boxed(solution_str)
    return float(answer is not None and equivalent(answer, ground_truth))


math_batch_compute_score = math_reward_compute_score


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Sequence[Any],
) -> list[float]:
    """Return the score of each response by its last box."""
    return [
        math_reward_compute_score(*pair) for pair in zip(solution_strs, ground_truths, strict=True)
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
    return _same_answer(answer, truth), normalize_final_answer(answer)


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
    return (False, NO_ANSWER) if boxed is None else (_same_answer(boxed, answer), boxed)


def math_dapo_compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """Return score (1.0 or -1.0), acc and pred, from the last 300 characters of a response."""
    end = solution_str[-300:]
    correct, answer = verify(end, ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer}


def _same_answer(answer: str, truth: str) -> bool:
    forms = normalize_final_answer(answer), normalize_final_answer(truth)
    return forms[0] == forms[1] != "" or equivalent(answer, truth)


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def math_verify_compute_score(
    model_output: str, ground_truth: str, timeout_score: float = 0, timeout: float = 30.0
) -> float:
    """Return 1.0 if the answer is equivalent to the ground truth, else 0.0.

    The answer is the last box, else the last LaTeX formula, else the last number or fraction.
    `timeout` has no effect: the time limit of reward functions is reward.item_timeout_s.
    """
    boxed = last_boxed(model_output)
    if boxed is not None:
        return float(equivalent(boxed, ground_truth))
    found = math_verify.parse(
        model_output, [math_verify.LatexExtractionConfig()], parsing_timeout=None
    )
    if found:
        truth = math_verify.parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
        return float(math_verify.verify(truth, found, timeout_seconds=None))
    numbers = _NUMBER.findall(model_output)
    return float(bool(numbers) and equivalent(numbers[-1], ground_truth))


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


def prime_math_compute_score(model_output: str, ground_truth: str) -> tuple[bool, bool, str]:
    """Return whether the answer is right, whether it is marked as one, and the answer."""
    is_matched, answer = match_answer(str(model_output))
    return grade_answer(answer, ground_truth), is_matched, answer


_FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(predict_str: str) -> float:
    """Return 1.0 if the whole response is <think>...</think> and then a box, else 0.0."""
    return float(_FORM.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """Return 1.0 if the last box, or the whole text, is right, else 0.0."""
    answer = last_boxed(predict_str) if use_boxed else predict_str
    return float(answer is not None and equivalent(answer, ground_truth))


def geo3k_compute_score(
    predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """Return (1 - format_score) * accuracy + format_score * format."""
    accuracy = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * accuracy + format_score * format_reward(predict_str)
