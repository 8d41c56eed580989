r"""verl.utils.reward_score.math and math_reward: the last box, compared as LaTeX."""

import re

from verlite.rewards.math import equivalent, last_boxed, normalize

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


def compute_score(solution_str: str, ground_truth: str) -> float:
    """Return 1.0 if the last box is equivalent to the ground truth, else 0.0."""
    answer = last_boxed(solution_str)
    return float(answer is not None and equivalent(answer, ground_truth))
