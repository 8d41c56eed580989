"""Mutants of verlite.sft: tokens that should not be trained, and runs that resume to others."""

import dataclasses

from tests.mutants import Mutant
from tests.mutants.patches import argument, calls, result, returns

SFT = "verlite.sft."
MASKS = ("tests/sft/test_conversation.py",)
FILES = ("tests/sft/test_data.py",)
PLAIN = ("tests/sft/test_train.py::test_twenty_steps_equal_a_plain_loop",)
PAIRS = ("tests/sft/test_dpo.py::test_loss_of_two_pairs",)
STEPS = ("tests/sft/test_dpo.py::test_steps_equal_a_plain_loop",)
RESUMED = ("tests/sft/test_train.py::test_stopped_run_resumes_to_the_same_numbers[full]",)


def _without_last_turn(found):
    ids, mask = found
    start = len(mask) - mask[::-1].index(1) - 1
    return ids, [*mask[:start], *[0] * (len(mask) - start)]


def _own_tokens(original, rows, outputs, counts):
    own = int(rows["response_mask"].sum())
    return original(rows, outputs, dataclasses.replace(counts, tokens=own))


def _from_the_first_row(state):
    return state | {"sampler": state["sampler"] | {"position": 0}}


MUTANTS = [
    Mutant(
        "the token that ends a conversation is not trained",
        SFT + "conversation:_by_prefixes",
        result(_without_last_turn),
        MASKS,
    ),
    Mutant(
        "what stands between two turns is trained",
        SFT + "data:fit",
        result(lambda example: dataclasses.replace(example, mask=[1] * len(example.mask))),
        FILES,
    ),
    Mutant("the loss is a mean over each pass", SFT + "train:sft_loss", calls(_own_tokens), PLAIN),
    Mutant(
        "a resumed run begins its epoch again",
        SFT + "run:Run.state",
        result(_from_the_first_row),
        RESUMED,
    ),
    Mutant("a stopped run does not save", "verlite.trainer.saving:finalize", returns(75), RESUMED),
    Mutant(
        "the worse response is the one that is learned",
        SFT + "dpo:pair_metrics",
        argument("rewards", lambda rewards: -rewards),
        PAIRS,
    ),
    Mutant(
        "the reference of DPO is not subtracted",
        SFT + "train:build_batch",
        argument("references", lambda sums: [0.0] * len(sums)),
        STEPS,
    ),
    Mutant(
        "examples without an end are not noticed",
        SFT + "checks:endless_examples",
        argument("max_length", lambda length: 0),
        FILES,
    ),
]
