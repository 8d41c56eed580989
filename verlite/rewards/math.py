"""Competition mathematics: the final answer is equivalent to the ground truth, decided by math-verify.

The answer is parsed by a LaTeX grammar. math-verify's other reader, for plain expressions, is not used: it ends in
sympy.parse_expr, which is Python's eval. Symbolic comparison can run for ever on an answer such as 9^{9^{9}}, and math-verify's
own time limit needs signals in the main thread, so this scorer belongs into a process that can be killed (`rewards.pool`).
"""

import logging
import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(
    logging.ERROR
)  # it warns that our process must bring its own time limit; it does

ANSWER_LINE_SOURCES = ("aime", "math")
"""Data whose prompts ask for a last line "Answer: ..."; a box is accepted too. All other data asks for a box."""


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} or \fbox{...}, braces matched; also "\boxed 5" up to $ or line end. Else None."""
    opened: list[
        tuple[int, bool]
    ] = []  # position after each open brace, and whether it opens a box
    last_start, content = -1, None
    for token in re.finditer(
        r"\\(?:boxed|fbox)\s*\{|\\boxed\s+(?P<bare>(?:(?!\\boxed|\\fbox)[^$\n])+)|\\[{}]|[{}]", text
    ):
        if token["bare"]:
            last_start, content = token.start(), token["bare"].strip()
        elif token.group() == "}" and opened:
            start, is_box = opened.pop()
            if is_box and start > last_start:
                last_start, content = start, text[start : token.start()]
        elif token.group().endswith("{") and token.group() != r"\{":
            opened.append((token.end(), len(token.group()) > 1))
    return content


def last_answer_line(text: str) -> str | None:
    """What follows the last "Answer:" on its line, without dollar signs and final full stop, or None."""
    lines = re.findall(r"(?i)answer\s*:[ \t]*([^\n]+)", text)
    return lines[-1].strip().strip("*$.").strip() if lines else None


def equivalent(answer: str, truth: str) -> bool:
    r"""Whether two LaTeX expressions without delimiters mean the same; percent signs are ignored, as in the MATH data set's own rule."""
    answer, truth = (re.sub(r"\\?%", "", text).strip() for text in (answer, truth))
    if answer == truth:
        return bool(truth)
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    sides = [parse(f"\\boxed{{{text}}}", config, parsing_timeout=None) for text in (truth, answer)]
    return verify(*sides, timeout_seconds=None)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    r"""1.0 when the response's last \boxed{...} is equivalent to the ground truth, else 0.0."""
    answer = last_boxed(solution_str)
    if answer is None and data_source.startswith(ANSWER_LINE_SOURCES):
        answer = last_answer_line(solution_str)
    return float(answer is not None and equivalent(answer, ground_truth))
