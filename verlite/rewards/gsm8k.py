"""GSM8K: the number after the last "####", compared as a number."""

import re
from decimal import Decimal, InvalidOperation
from typing import Any

TAIL = 300
"""Characters at the end of the response that are searched, so that regexes stay fast."""

NUMBER = r"-?[0-9.,]+"
METHODS = ("strict", "flexible")


def extract_answer(solution: str, method: str = "strict") -> str | None:
    """Return the answer as written, without thousands separators, or None.

    Method `strict` takes the last "#### number"; `flexible` takes the last number of any kind. Both
    search the last 300 characters.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(METHODS)}")
    pattern = rf"#### ({NUMBER})" if method == "strict" else rf"({NUMBER})"
    numbers = [text.replace(",", "").rstrip(".") for text in re.findall(pattern, solution[-TAIL:])]
    numbers = [text for text in numbers if text not in ("", "-")]
    return numbers[-1] if numbers else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    method: str = "strict",
) -> float:
    """Return 1.0 if the extracted answer equals the ground truth as a number, else 0.0.

    verl compares text, so "72." and "72.00" are wrong there if the truth is 72. They are right
    here.
    """
    truth = Decimal(str(ground_truth).replace(",", ""))
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    try:
        return float(Decimal(answer) == truth)
    except InvalidOperation:  # such as 1.2.3
        return 0.0
