"""Mutants of verlite.services: services that answer wrongly."""

import dataclasses

from tests.mutants import Mutant
from tests.mutants.patches import argument, calls, result

INDEX = "verlite.services.index:"
CORPUS = "verlite.services.index:"
SERVER = "verlite.services.retriever:"
REWARD = "verlite.services.reward:"
TRUTHS = "verlite.services.truths:"
REWARD_TESTS = ("tests/services/test_reward.py",)
CLIENT = "verlite.engine.reference_client:"
REFERENCE_TESTS = "tests/services/test_reference.py"


class _Same(str):
    """A name that equals all others."""

    def __ne__(self, other):
        return False


def _scored(result):
    return dataclasses.replace(result, score=result.score or 0.0, error=None)


def _take_all(original):
    def broken(self):
        taken = list(self._waiting)
        self._waiting.clear()
        self._arrival.clear()
        return taken

    return broken


MUTANTS = [
    Mutant(
        "the worst passages are found",
        INDEX + "best",
        argument("scores", lambda scores: -scores),
        ("tests/services/test_index.py",),
    ),
    Mutant(
        "BM25's parameters are ignored",
        INDEX + "BM25.__init__",
        calls(lambda original, self, k1=0.9, b=0.4: original(self, 1.5, 0.75)),
        ("tests/services/test_index.py",),
    ),
    Mutant(
        "an index of another corpus is used",
        CORPUS + "fingerprint",
        result(lambda described: {key: 0 for key in described}),
        ("tests/services",),
    ),
    Mutant(
        "queries of one batch get each other's passages",
        SERVER + "_search",
        result(lambda answers: list(reversed(answers))),
        ("tests/services/test_retriever.py",),
    ),
    Mutant(
        "an answer without a ground truth is graded with another one",
        REWARD + "ground_truth",
        calls(lambda original, item, truths, template: original(item, truths, template) or "7"),
        REWARD_TESTS,
    ),
    Mutant(
        "the prompt is part of what is graded",
        TRUTHS + "response",
        calls(lambda original, query, prompt, template: query),
        REWARD_TESTS,
    ),
    Mutant(
        "an answer that could not be scored has the reward 0",
        REWARD + "answer_of",
        argument("results", lambda results: [_scored(result) for result in results]),
        ("tests/services/test_reward.py::test_answer_without_a_ground_truth_has_no_reward",),
    ),
    Mutant(
        "numbers of another reference model are used",
        CLIENT + "read_answer",
        result(lambda answer: (answer[0], _Same(answer[1]))),
        (REFERENCE_TESTS + "::test_other_weights_in_mid_run_end_it_at_once",),
    ),
    Mutant(
        "requests of different temperatures are computed together",
        "verlite.http.desk:Desk._take",
        _take_all,
        (REFERENCE_TESTS + "::test_waiting_requests_of_one_temperature_are_computed_together",),
    ),
]
