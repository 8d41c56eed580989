"""Mutants of verlite.data: prompts that are lost, repeated, or written wrongly."""

from tests.mutants import Mutant
from tests.mutants.patches import argument, calls, does_nothing, result

PROMPTS = "verlite.data.prompts:"
SAMPLER = "verlite.data.sampler:PromptSampler."
DATASET = "verlite.data.dataset:"
QA = "verlite.data.qa:"
PREPROCESS = "verlite.data.preprocess:"


MUTANTS = [
    Mutant(
        "truncation is one token too long",
        PROMPTS + "truncate",
        argument("max_length", lambda length: length + 1),
        ("tests/data/test_prompts.py",),
    ),
    Mutant(
        "every epoch has the same order",
        SAMPLER + "_permutation",
        result(sorted),
        ("tests/data/test_sampler.py",),
    ),
    Mutant(
        "a resumed run starts its epoch over",
        SAMPLER + "load_state_dict",
        does_nothing,
        ("tests/data/test_sampler.py",),
    ),
    Mutant(
        "columns that a message lacks reach the chat template as null",
        DATASET + "_without_nulls",
        calls(lambda original, messages: messages),
        ("tests/data/test_dataset.py",),
    ),
    Mutant(
        "a failed write damages the old file",
        PREPROCESS + "replacing",
        calls(lambda original, path: path.open("wb")),
        ("tests/data_preprocess/test_scripts.py",),
    ),
    Mutant(
        "the test split uses the training questions first",
        QA + "TAKEN",
        lambda original: {**original, "test": ("train", "dev", "test")},
        ("tests/data_preprocess/test_qa.py",),
    ),
]
