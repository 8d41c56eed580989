"""A contract test for reward functions: call one as training does, on usual and unusual answers."""

import copy
import os
from dataclasses import replace
from typing import Any

from verlite.importing import module_file
from verlite.rewards.process import FunctionError
from verlite.rewards.result import ONE_TURN, RewardItem, RewardResult
from verlite.rewards.scorer import Scorer
from verlite.spec.roles import ScorerSpec

TRUTH = "42"
WRONG = ("41", "40")


def answers(truth: Any) -> dict[str, str]:
    """Return responses to a question with this ground truth, by what they are."""
    text = str(truth)
    return {
        "the ground truth": text,
        "the ground truth in \\boxed{}": f"It is \\boxed{{{text}}}.",
        'the ground truth after "####"': f"40 + 2 = 42\n#### {text}",
        "the ground truth in <answer> tags": f"<answer>{text}</answer>",
        "a wrong answer": next(wrong for wrong in WRONG if wrong != text),
        "an empty response": "",
        "white space": " \n\t ",
        "a truncated answer": f"The answer is \\boxed{{{text[:1]}",
        "random symbols": "}{\\frac{[(<|#### \u0000\ufffd 𝟜２ ٤٢",
        "a very long response": "so 1 + 1 = 2, " * 20_000,
    }


TIME_LIMIT_S = 10.0


def check_reward(
    function: str, kwargs: dict[str, Any] | None = None, row: RewardItem | None = None
) -> list[str]:
    """Return the problems of a reward function, one sentence each. An empty list means none.

    The function runs in a separate process, as in training, on made-up answers to a question. It
    must

    - load, and accept the arguments;
    - return a finite number, or a dict with one, for each answer, within seconds;
    - return the same for the same answer, in any order of calls;
    - work without extra_info, unless a row is given;
    - return the same parts for each answer;
    - score the ground truth, in at least one usual form, above a wrong answer.

    Args:
        function: "FILE.py", "FILE.py:name" or "package.module:name".
        kwargs: extra keyword arguments, as reward_kwargs.
        row: has the question's data source, ground truth and extra_info. None: the ground truth is
            "42".

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
        ScorerSpec(
            place, name, kwargs or {}, secret_env_vars=list(os.environ), item_timeout_s=TIME_LIMIT_S
        )
    )
    try:
        question = row or RewardItem("contract", "", TRUTH, {"index": 0, "split": "test"})
        question = replace(question, extra_info=question.extra_info | ONE_TURN)
        scorer.check_signature([question.data_source])
        texts = answers(question.ground_truth)
        items = [replace(question, solution_str=text) for text in texts.values()]
        first = scorer.score(items)
        again = scorer.score(copy.deepcopy(items[::-1]))[::-1]
        bare = first
        if row is None:
            bare = scorer.score([replace(item, extra_info=dict(ONE_TURN)) for item in items])
    except FunctionError as error:
        return [str(error).removeprefix("custom_reward_function: ")]
    finally:
        scorer.close()
    scored = isinstance(question.ground_truth, str | int | float)
    return _findings(list(texts), first, again, bare, scored)


def _findings(
    names: list[str],
    first: list[RewardResult],
    again: list[RewardResult],
    bare: list[RewardResult],
    truth_is_text: bool,
) -> list[str]:
    failed = {
        name: f"{result.error}: {result.cause}"
        for name, result in zip(names, first, strict=True)
        if result.score is None
    }
    if failed:
        return _on(failed)
    pairs = zip(names, first, again, strict=True)
    changed = [name for name, a, b in pairs if (a.score, a.parts) != (b.score, b.parts)]
    problems = _on(
        dict.fromkeys(
            changed,
            "the result changes when scored again: it depends on the order of calls or on chance",
        )
    )
    problems += _on(
        {
            name: f"without extra_info {result.error}: use a default for what you read there, or "
            "try it on your data with --data FILE"
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
    if truth_is_text and best <= wrong:
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
        f"on {'all answers' if len(names) == len(answers(TRUTH)) else ', '.join(names)}: {message}"
        for message, names in about.items()
    ]
