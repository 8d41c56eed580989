r"""verl.utils.reward_score.geo3k: the last box, plus a share for <think>...</think> before it."""

import re

from verlite.rewards.math import equivalent, last_boxed

_FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(predict_str: str) -> float:
    """Return 1.0 if the whole response is <think>...</think> and then a box, else 0.0."""
    return float(_FORM.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """Return 1.0 if the last box, or the whole text, is right, else 0.0."""
    answer = last_boxed(predict_str) if use_boxed else predict_str
    return float(answer is not None and equivalent(answer, ground_truth))


def compute_score(
    predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """Return (1 - format_score) * accuracy + format_score * format."""
    accuracy = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * accuracy + format_score * format_reward(predict_str)
