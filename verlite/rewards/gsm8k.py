"""GSM8K: the number after the last "####", compared as a number."""

import re
from decimal import Decimal, InvalidOperation
from typing import Any

TAIL = 300  # characters of the response that are searched: the answer stands at its end, and regexes stay fast
NUMBER = r"-?[0-9.,]+"
METHODS = ("strict", "flexible")


def extract_answer(solution: str, method: str = "strict") -> str | None:
    """The answer as written, without thousands separators, or None.

    `strict` takes the last "#### number", `flexible` the last number of any kind; both look at the last 300 characters.
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
    """1.0 when the extracted answer equals the ground truth as a number, else 0.0.

    verl compares the two as text, which calls "72." and "72.00" wrong when the truth is 72; as numbers they are right.
    """
    truth = Decimal(str(ground_truth).replace(",", ""))
    answer = extract_answer(solution_str, method)
    try:
        return float(answer is not None and Decimal(answer) == truth)
    except InvalidOperation:  # such as 1.2.3
        return 0.0
