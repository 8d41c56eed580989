"""Mutants of verlite.sizing: a plan that promises what does not fit."""

from tests.mutants import Mutant
from tests.mutants.patches import calls, constant, result, returns

MEASURE = "tests/sizing/test_measure.py"
MEMORY = "tests/sizing/test_memory.py"
FACTS = "tests/sizing/test_facts.py"


def _middle_is_flat(original, short, long, layers):
    return original(short, long, 4)


def _counts_moments_when_offloaded(original, role, memory):
    return memory.resident


MUTANTS = [
    Mutant(
        "peaks are those of four layers",
        "verlite.sizing.measure:peak",
        calls(_middle_is_flat),
        (MEASURE,),
    ),
    Mutant(
        "the tied output head multiplies nothing",
        "verlite.sizing.facts:_multiplied",
        result(lambda count: count - 1000),
        (FACTS,),
    ),
    Mutant(
        "an offloaded optimizer still counts",
        "verlite.sizing.memory:idle",
        calls(_counts_moments_when_offloaded),
        (MEMORY,),
    ),
    Mutant(
        "the margin is left out",
        "verlite.sizing.memory:FRAGMENTS",
        constant(0.0),
        (MEMORY,),
    ),
    Mutant(
        "a kept measurement is found whatever the micro-batch",
        "verlite.sizing.measure:key_of",
        returns("same"),
        (MEMORY,),
    ),
]
