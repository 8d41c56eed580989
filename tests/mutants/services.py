"""Mutants of verlite.services: services that answer wrongly."""

import dataclasses

from tests.mutants import Mutant
from tests.mutants.patches import argument, calls, constant, result

INDEX = "verlite.services.index:"
CORPUS = "verlite.services.corpus:"
SERVER = "verlite.services.retriever:"
REWARD = "verlite.services.reward:"
TRUTHS = "verlite.services.truths:"
REWARD_TESTS = ("tests/services/test_reward.py",)


MUTANTS = [
    Mutant(
        "the worst passages are found",
        INDEX + "best",
        argument("scores", lambda scores: -scores),
        ("tests/services/test_index.py",),
    ),
    Mutant(
        "stop words count",
        INDEX + "STOP_WORDS",
        constant(frozenset()),
        ("tests/services/test_index.py",),
    ),
    Mutant(
        "plurals are other words",
        INDEX + "singular",
        calls(lambda original, word: word),
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
        "any number of passages may be asked for",
        SERVER + "MAX_TOPK",
        constant(10**9),
        ("tests/services/test_retriever.py",),
    ),
    Mutant(
        "queries of one batch get each other's passages",
        SERVER + "Desk._search",
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
        "a label does not take precedence over the data set",
        REWARD + "ground_truth",
        calls(
            lambda original, item, truths, template: (
                original(dataclasses.replace(item, label=""), truths, template)
                or original(item, truths, template)
            )
        ),
        REWARD_TESTS,
    ),
    Mutant(
        "the prompt is part of what is graded",
        TRUTHS + "response",
        calls(lambda original, query, prompt, template: query),
        REWARD_TESTS,
    ),
]
