"""A contract test for a user's own reward function: call it as training does, on answers good and strange."""

import copy
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
    "an answer that was cut off": "The answer is \\boxed{4",
    "text that is no language": "}{\\frac{[(<|#### \u0000\ufffd 𝟜２ ٤٢",
    "a very long response": "so 1 + 1 = 2, " * 20_000,
}
TIME_LIMIT_S = 10.0


def check_reward(function: str, kwargs: dict[str, Any] | None = None) -> list[str]:
    """What is wrong with a reward function: "FILE.py", "FILE.py:name" or "package.module:name". Sentences; none: nothing.

    It runs in a process of its own, as in training, on made-up answers to a question whose ground truth is "42": that it can be loaded
    and takes the arguments; a finite number or a dict with one for each; the same for the same answer, whatever was scored before it; one
    without extra_info too; the names of its parts the same for each; an answer within seconds; and that the ground truth, in
    one of the ways of writing it, scores above a wrong answer.

    Raises:
        ValueError: a name that is none of these.
    """
    place, _, name = (
        function.rpartition(":")
        if not function.endswith(".py")
        else (function, ":", "compute_score")
    )
    if not place:
        raise ValueError(
            f"reward function {function!r}: write FILE.py, FILE.py:function or package.module:function"
        )
    if not place.endswith(".py") and module_file(place) is None:
        raise ValueError(f"there is no module {place} on the Python path")
    scorer = Scorer(
        CustomRewardConfig(path=place, name=name, reward_kwargs=kwargs or {}),
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
    changed = "another result when scored again: the order of calls or chance decides"
    pairs = zip(names, first, again, strict=True)
    problems += _on(
        {
            name: changed
            for name, one, two in pairs
            if (one.score, one.parts) != (two.score, two.parts)
        }
    )
    missing = "without extra_info {}: give what you look up there a default"
    problems += _on(
        {
            name: missing.format(result.error)
            for name, result in zip(names, bare, strict=True)
            if result.score is None
        }
    )
    parts = {tuple(sorted(result.parts)) for result in first}
    if len(parts) > 1:
        problems.append(
            f"returns other parts for other answers, {' and '.join(map(str, sorted(parts)))}: a metric would be a mean over some"
        )
    scores = {name: result.score or 0.0 for name, result in zip(names, first, strict=True)}
    wrong, best = (
        scores["a wrong answer"],
        max(score for name, score in scores.items() if name.startswith("the ground truth")),
    )
    if best <= wrong:
        problems.append(
            f"the ground truth, however it is written, scores no higher than a wrong answer ({wrong:g}): there is nothing to learn from, "
            "unless it needs a form of its own"
        )
    return problems


def _on(messages: dict[str, str]) -> list[str]:
    """One sentence for each message, with the answers that it is about."""
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
