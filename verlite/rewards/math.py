r"""Competition mathematics: 1 if the final answer is equivalent to the ground truth, else 0.

Which text is the final answer depends on what the prompts of a data source ask for:

- `math_dapo*`, `math` and `aime*` ask for a last line "Answer: X". That line decides. `\boxed{}`
  counts only if the response has no such line.
- All other sources ask for `\boxed{}`. Only the last box counts.

No script in `data_preprocess/` writes the source `math`. verl scores it with the rule of
`math_dapo`, so its prompts are expected to ask for the line. The MATH data set itself has the
source `DigitalLearningGmbH/MATH-lighteval`, whose prompts ask for a box.

math-verify compares the answers as LaTeX. Its reader for plain expressions is not used, because it
calls sympy.parse_expr, which evaluates Python. Symbolic comparison may never finish on answers such
as 9^{9^{9}}, and the time limit of math-verify needs signals in the main thread. This scorer must
therefore run in a process that can be killed (`verlite.rewards.pool`).
"""

import logging
import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

# math-verify warns that its own time limit is off. The pool of reward processes has one.
logging.getLogger("math_verify").setLevel(logging.ERROR)

ANSWER_LINE_SOURCES = ("aime", "math")
"""Beginnings of the names of data sources whose prompts ask for a last line "Answer: X"."""

_BOX = re.compile(
    r"\\(?:boxed|fbox)\s*\{"
    r"|\\boxed\s+(?P<bare>(?:(?!\\boxed|\\fbox)[^$\n])+)"
    r"|\\[{}]"
    r"|[{}]"
)
_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_FONT_NAMES = "(?:text|math)(?:bf|it|rm|sf|tt|normal)?|boldsymbol|bm|mbox"
_FONT = re.compile(rf"\\(?:{_FONT_NAMES})\s*\{{([^{{}}]*)\}}")
_FONT_NUMBER = re.compile(rf"\\(?:{_FONT_NAMES})\s*\{{\s*([-+]?[\d.,]+)\s*\}}")
_LEADING_ZEROS = re.compile(r"([-+]?)0+(\d[\d.,]*)")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`, or None.

    Braces are matched. `\boxed 5` counts too; it ends at a dollar sign or at the end of the line.
    """
    open_braces: list[tuple[int, bool]] = []  # position after the brace; whether it opens a box
    last_start = -1
    content = None
    for token in _BOX.finditer(text):
        if token["bare"]:
            last_start = token.start()
            content = token["bare"].strip()
        elif token.group() == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and start > last_start:
                last_start = start
                content = text[start : token.start()]
        elif token.group().endswith("{") and token.group() != r"\{":
            open_braces.append((token.end(), len(token.group()) > 1))
    return content


def last_answer_line(text: str) -> str | None:
    r"""Return what follows the last "Answer:" up to the end of the line, or None.

    As in verl, the answer may also be on the next line. Dollar signs, `\(` and `\)`, asterisks and
    the final period are removed. If the line contains a box, the content of the box is the answer.
    """
    lines = list(_ANSWER_LINE.finditer(text))
    if not lines:
        return None
    last = lines[-1]
    if r"\boxed" in last[1]:
        boxed = last_boxed(text[last.start(1) :])  # a box with a matrix has several lines
        if boxed is not None:
            return boxed
    line = re.sub(r"(?<!\\)\\[()\[\]]", "", last[1])
    return line.strip().strip("*$.").strip()


def normalize(answer: str) -> str:
    r"""Return the answer without percent signs, font commands and leading zeros.

    Percent signs are ignored because the MATH data set ignores them. Font commands such as
    `\text{}` and `\mathbf{}` are removed around numbers and around the whole answer. Leading zeros
    are removed from an answer that is a number.
    """
    answer = re.sub(r"\\?%", "", answer).strip()
    whole = _FONT.fullmatch(answer)
    if whole:
        answer = whole[1].strip()
    answer = _FONT_NUMBER.sub(r"{\1}", answer)
    number = _LEADING_ZEROS.fullmatch(answer)
    return number[1] + number[2] if number else answer


def equivalent(answer: str, truth: str) -> bool:
    """Return whether two LaTeX expressions without delimiters mean the same after `normalize`."""
    answer = normalize(answer)
    truth = normalize(truth)
    if answer == truth:
        return bool(truth)
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed_truth = parse(f"\\boxed{{{truth}}}", config, parsing_timeout=None)
    parsed_answer = parse(f"\\boxed{{{answer}}}", config, parsing_timeout=None)
    return bool(verify(parsed_truth, parsed_answer, timeout_seconds=None))


def final_answer(data_source: str, response: str) -> str | None:
    """Return the text to score: the answer line or the last box, by data source. None if neither.

    The module docstring has the rule.
    """
    if data_source.startswith(ANSWER_LINE_SOURCES):
        line = last_answer_line(response)
        if line:
            return line
    return last_boxed(response)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1.0 if the final answer is equivalent to the ground truth, else 0.0."""
    answer = final_answer(data_source, solution_str)
    return float(answer is not None and equivalent(answer, ground_truth))
