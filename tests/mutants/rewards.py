"""Mutants of verlite.rewards: scores that are wrong or silently 0."""

from tests.mutants import Mutant
from tests.mutants.patches import argument, calls, result, returns

GSM8K = "verlite.rewards.gsm8k:"
MATH = "verlite.rewards.math:"
QA = "verlite.rewards.qa:"
RESULT = "verlite.rewards.result:"
ROUTING = "verlite.rewards.routing:"
POOL = "verlite.rewards.pool:"
REMOTE = "verlite.rewards.remote:"
HOSTILE = "tests/rewards/test_hostile.py"
TURNS = "tests/rollout/test_trajectory.py::test_rewards_of_turns"


def _first_of(original, text):
    parts = text.split("</answer>")
    return original(parts[0] + "</answer>") if len(parts) > 1 else original(text)


def _failure_is_zero(original, error):
    from verlite.rewards.result import result_of

    return result_of(0.0)


def _nan_is_a_score(original, value, where):
    return float(value)


def _zero_where_null(original, answer, count):
    filled = [0.0 if reward is None else reward for reward in answer.get("rewards") or []]
    return original({**answer, "rewards": filled}, count)


def _last_turn_only(original, data_source, solution_str, ground_truth, extra_info):
    if "trajectory" in extra_info:
        scores = extra_info["trajectory"]["turn_scores"][-1:]
        extra_info = {"trajectory": {"turn_scores": scores}}
    return original(data_source, solution_str, ground_truth, extra_info)


def _unchecked(original, event):
    from verlite.rewards.result import RewardResult

    number = event.pop("done")
    return number, RewardResult(**event)


MUTANTS = [
    Mutant(
        "a reward that the service could not give is 0",
        REMOTE + "results_of",
        calls(_zero_where_null),
        ("tests/rewards/test_remote.py",),
    ),
    Mutant(
        "reward functions see all secrets of the environment",
        "verlite.masking:is_secret",
        returns(False),
        (HOSTILE,),
    ),
    Mutant(
        "a killed reward process costs its sample",
        POOL + "_Job.fail",
        argument("is_at_fault", lambda at_fault: True),
        (HOSTILE,),
    ),
    Mutant(
        "processes that reward functions left behind are never killed",
        POOL + "descendants",
        returns([]),
        (HOSTILE,),
    ),
    Mutant(
        "anything that a reward process writes is a result",
        POOL + "_read_result",
        calls(_unchecked),
        (HOSTILE,),
    ),
    Mutant(
        "the rewards of a request are mixed up",
        REMOTE + "results_of",
        result(lambda results: list(reversed(results))),
        ("tests/rewards/test_remote.py",),
    ),
    Mutant(
        "GSM8K: any number counts as the final answer",
        GSM8K + "extract_answer",
        argument("method", lambda method: "flexible"),
        ("tests/rewards/test_gsm8k.py",),
    ),
    Mutant(
        "math: a box decides although the prompt asks for an answer line",
        MATH + "last_answer_line",
        calls(lambda original, text: None),
        ("tests/rewards/test_math.py",),
    ),
    Mutant(
        "math: answers are compared as text",
        MATH + "equivalent",
        calls(lambda original, answer, truth: answer == truth),
        ("tests/rewards/test_math.py",),
    ),
    Mutant(
        "DAPO's score is 0 for a wrong answer",
        ROUTING + "rescaled",
        calls(lambda original, result, scale: result),
        ("tests/rewards",),
    ),
    Mutant(
        "QA: the first answer counts",
        QA + "last_answer",
        calls(_first_of),
        ("tests/rewards/test_qa.py",),
    ),
    Mutant(
        "QA: a contained answer counts as an exact match",
        QA + "matches",
        argument("method", lambda method: "sub_em"),
        ("tests/rewards/test_qa.py",),
    ),
    Mutant(
        "a failed reward is a silent 0",
        RESULT + "failure",
        calls(_failure_is_zero),
        ("tests/rewards/test_scorer.py",),
    ),
    Mutant(
        "NaN is a score",
        RESULT + "_score",
        calls(_nan_is_a_score),
        ("tests/rewards/test_scorer.py",),
    ),
    Mutant(
        "the step's time limit for rewards is ignored",
        POOL + "Pool.run",
        argument("limit_s", lambda limit: 60.0),
        ("tests/rewards/test_scorer.py",),
    ),
    Mutant(
        "results of several scorers come back in the wrong order",
        "verlite.rewards.scorer:Scorer.score",
        result(lambda results: list(reversed(results))),
        ("tests/rewards/test_scorer.py",),
    ),
    Mutant(
        "OpenRLHF's reward functions get verl's arguments",
        "verlite.rewards.process:takes_lists",
        returns(False),
        ("tests/rewards/test_scorer.py::test_arguments_of_openrlhf",),
    ),
    Mutant(
        "only the last turn's reward counts",
        "verlite.rewards.environment:compute_score",
        calls(_last_turn_only),
        (TURNS,),
    ),
]
