"""verl.utils.reward_score.math_verify: the answers in a response, compared by math-verify."""

import re

from math_verify import LatexExtractionConfig, parse, verify

from verlite.rewards.math import equivalent, last_boxed

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def compute_score(
    model_output: str, ground_truth: str, timeout_score: float = 0, timeout: float = 30.0
) -> float:
    """Return 1.0 if the answer is equivalent to the ground truth, else 0.0.

    The answer is the last box, else the last LaTeX formula, else the last number or fraction.
    `timeout` has no effect: the time limit of reward functions is reward.item_timeout_s.
    """
    boxed = last_boxed(model_output)
    if boxed is not None:
        return float(equivalent(boxed, ground_truth))
    found = parse(model_output, [LatexExtractionConfig()], parsing_timeout=None)
    if found:
        truth = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
        return float(verify(truth, found, timeout_seconds=None))
    numbers = _NUMBER.findall(model_output)
    return float(bool(numbers) and equivalent(numbers[-1], ground_truth))
