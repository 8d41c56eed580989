r"""Mathematics in the form <think>...</think><answer>...</answer>: accuracy plus a format reward.

The score is accuracy + 0.5 * format, as in the math_verifier of LMM-R1 and other descendants of
OpenRLHF. There a response scores 1 for accuracy if its ground truth cannot be parsed or if the
comparison fails. Here it scores 0 in the first case and has no score in the second.

Like `verlite.rewards.math` it must run in a process that can be killed.
"""

import json
import math
import re
from contextlib import suppress
from typing import Any

from verlite.rewards.math import equivalent, last_boxed

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_DOLLARS = re.compile(r"^(\${1,2}|\\\(|\\\[)([^$]*?)(\${1,2}|\\\)|\\\])$", re.DOTALL)


def is_formatted(response: str) -> bool:
    """Return whether a response is one <think> block followed by one <answer> block.

    Only white space may be around and between them. Each of the four tags occurs once.
    """
    text = response.strip()
    if not (text.startswith("<think>") and text.endswith("</answer>")):
        return False
    if any(text.count(tag) != 1 for tag in _TAGS):
        return False
    between = text.partition("</think>")[2].partition("<answer>")
    return between[1] == "<answer>" and not between[0].strip()


def final_answer(response: str) -> str | None:
    r"""Return the answer of a response, or None.

    It is the last box in the last <answer> block, or the whole block without dollar signs if it
    has no box. Without a block it is the last box of the response.
    """
    block = response.rpartition("<answer>")
    if not block[1]:
        return last_boxed(response)
    text = block[2].partition("</answer>")[0]
    return last_boxed(text) or _bare(text) or None


def plain_truth(truth: Any) -> str:
    r"""Return a ground truth as a bare expression.

    Data sets write it as 7, "7", "$7$", "\boxed{7}", or as a solution that ends in a box or in
    "#### 7".

    Raises:
        TypeError: it is neither text nor a finite number, or it is a list or object with texts as
            JSON text.
    """
    value = _parsed(truth) if isinstance(truth, str) else truth
    is_number = type(value) in (int, float) and math.isfinite(value)
    if not is_number and not isinstance(value, str):
        raise TypeError(
            f"the ground truth is {truth!s:.60} ({type(value).__name__}), expected text or a number"
        )
    text = str(truth)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    return _bare(text.rpartition("####")[2])


def _parsed(text: str) -> Any:
    """Return the list or object that a text is in JSON; the text itself if it may be LaTeX.

    LaTeX has no quotation marks, but lists of numbers: intervals, points and matrices.
    """
    with suppress(ValueError, RecursionError):
        if text.lstrip()[:1] in ("[", "{") and '"' in text:
            return json.loads(text)
    return text


def _bare(text: str) -> str:
    text = text.strip()
    inside = _DOLLARS.match(text)
    return inside[2].strip() if inside else text


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    format_weight: float = 0.5,
) -> dict[str, float]:
    """Return {"score", "acc", "format"}: score = acc + format_weight * format; both are 0 or 1.

    Raises:
        TypeError: the ground truth is neither text nor a finite number.
    """
    truth = plain_truth(ground_truth)
    answer = final_answer(solution_str)
    acc = float(answer is not None and equivalent(answer, truth))
    formatted = float(is_formatted(solution_str))
    return {"score": acc + format_weight * formatted, "acc": acc, "format": formatted}
