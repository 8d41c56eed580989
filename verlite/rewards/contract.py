"""A contract test for reward functions: call one as training does, on usual and unusual answers."""

import copy
import os
from typing import Any

from verlite.config.names import module_file
from verlite.config.schema import CustomRewardConfig, RewardConfig
from verlite.rewards.process import FunctionError
from verlite.rewards.result import RewardItem, RewardResult
from verlite.rewards.scorer import Scorer

ANSWERS = {
    "the ground truth": "42",
    "the ground truth in \\boxed{}": "It is \\boxed{42}.",
    'the ground truth after "####"': "40 + 2 = 42\n#### 42",
    "the ground truth in <answer> tags": "<answer>42</answer>",
    "a wrong answer": "41",
    "an empty response": "",
    "white space": " \n\t ",
    "a truncated answer": "The answer is \\boxed{4",
    "random symbols": "}{\\frac{[(<|#### \u0000\ufffd 𝟜２ ٤٢",
    "a very long response": "so 1 + 1 = 2, " * 20_000,
}
TIME_LIMIT_S = 10.0


def check_reward(function: str, kwargs: dict[str, Any] | None = None) -> list[str]:
    """Return the problems of a reward function, one sentence each. An empty list means none.

    The function runs in a separate process, as in training, on made-up answers to a question whose
    ground truth is "42". It must

    - load, and accept the arguments;
    - return a finite number, or a dict with one, for each answer, within seconds;
    - return the same for the same answer, in any order of calls;
    - work without extra_info;
    - return the same parts for each answer;
    - score the ground truth, in at least one usual form, above a wrong answer.

    Args:
        function: "FILE.py", "FILE.py:name" or "package.module:name".
        kwargs: extra keyword arguments, as reward_kwargs.

    Raises:
        ValueError: `function` has none of these forms, or the module does not exist.
    """
    if function.endswith(".py"):
        place = function
        name = "compute_score"
    else:
        place, _, name = function.rpartition(":")
    if not place:
        raise ValueError(
            f"reward function {function!r}: write FILE.py, FILE.py:function or "
            "package.module:function"
        )
    if not place.endswith(".py") and module_file(place) is None:
        raise ValueError(f"module {place} was not found on the Python path")
    scorer = Scorer(
        CustomRewardConfig(place, name, kwargs or {}, secret_env_vars=list(os.environ)),
        RewardConfig(item_timeout_s=TIME_LIMIT_S),
    )
    try:
        scorer.check_signature(["contract"])
        items = [
            RewardItem("contract", text, "42", {"index": 0, "split": "test"})
            for text in ANSWERS.values()
        ]
        first = scorer.score(items)
        again = scorer.score(copy.deepcopy(items[::-1]))[::-1]
        bare = scorer.score([RewardItem("contract", text, "42", {}) for text in ANSWERS.values()])
    except FunctionError as error:
        return [str(error).removeprefix("custom_reward_function: ")]
    finally:
        scorer.close()
    return _findings(first, again, bare)


def _findings(
    first: list[RewardResult], again: list[RewardResult], bare: list[RewardResult]
) -> list[str]:
    names = list(ANSWERS)
    problems = _on(
        {
            name: f"{result.error}: {_last_line(result)}"
            for name, result in zip(names, first, strict=True)
            if result.score is None
        }
    )
    if problems:
        return problems
    changed = "the result changes when scored again: it depends on the order of calls or on chance"
    pairs = zip(names, first, again, strict=True)
    problems += _on(
        {
            name: changed
            for name, one, two in pairs
            if (one.score, one.parts) != (two.score, two.parts)
        }
    )
    missing = "without extra_info {}: use a default for what you read there"
    problems += _on(
        {
            name: missing.format(result.error)
            for name, result in zip(names, bare, strict=True)
            if result.score is None
        }
    )
    parts = {tuple(sorted(result.parts)) for result in first}
    if len(parts) > 1:
        different = " and ".join(map(str, sorted(parts)))
        problems.append(
            f"returns different parts for different answers, {different}: "
            "a metric would be a mean over some answers only"
        )
    scores = {name: result.score or 0.0 for name, result in zip(names, first, strict=True)}
    wrong = scores["a wrong answer"]
    best = max(score for name, score in scores.items() if name.startswith("the ground truth"))
    if best <= wrong:
        problems.append(
            f"the ground truth, however it is written, scores no higher than a wrong answer "
            f"({wrong:g}): there is nothing to learn from, unless it needs a special form"
        )
    return problems


def _on(messages: dict[str, str]) -> list[str]:
    """Return one sentence per message, with the answers that it applies to."""
    about: dict[str, list[str]] = {}
    for name, message in messages.items():
        about.setdefault(message, []).append(name)
    return [
        f"on {'all answers' if len(names) == len(ANSWERS) else ', '.join(names)}: {message}"
        for message, names in about.items()
    ]


def _last_line(result: RewardResult) -> str:
    lines = (result.traceback or "").strip().splitlines()
    return lines[-1].removeprefix(f"{result.error}: ") if lines else ""
