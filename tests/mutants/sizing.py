"""Mutants of verlite.sizing: a plan that promises what does not fit."""

from tests.mutants import Mutant
from tests.mutants.patches import calls, constant, result, returns

MEASURE = "tests/sizing/test_measure.py"
MEMORY = "tests/sizing/test_memory.py"
FACTS = "tests/sizing/test_facts.py"
SIMULATION = ("tests/sizing/test_simulation.py",)
RECORDED = ("tests/sizing/test_recorded.py",)
MODES = ("tests/sizing/test_modes.py::test_the_fastest_split_balances_engines_and_trainer",)


def _middle_is_flat(original, short, long, layers):
    return original(short, long, 4)


def _counts_moments_when_offloaded(original, role, memory):
    return memory.resident


def _as_if_alone(original, self, running):
    return original(self, 1)


def _without_pause(original, self, now, pause_s, version):
    return original(self, now, 0.0, version)


def _old_version(original, self, tokens, version):
    return original(self, tokens, version - 1)


def _all_alike(original, records, samples, line, count, is_whole):
    return [(sample, 1.0) for sample, _ in original(records, samples, line, count, is_whole)]


def _as_it_is(original, workload, costs, plan, settings):
    return settings


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
    Mutant("the margin is left out", "verlite.sizing.memory:FRAGMENTS", constant(0.0), (MEMORY,)),
    Mutant(
        "a kept measurement is found whatever the micro-batch",
        "verlite.sizing.measure:key_of",
        returns("same"),
        (MEMORY,),
    ),
    Mutant(
        "simulated samples do not slow each other",
        "verlite.sizing.simulation:_Engine._step_s",
        calls(_as_if_alone),
        SIMULATION,
    ),
    Mutant(
        "a simulated weight sync pauses no engine",
        "verlite.sizing.simulation:_Engine.swap",
        calls(_without_pause),
        SIMULATION,
    ),
    Mutant(
        "simulated tokens are a version older",
        "verlite.sizing.simulation:_Running.count",
        calls(_old_version),
        SIMULATION,
    ),
    Mutant(
        "the slowest sample of a run counts as much as those that stand for others",
        "verlite.sizing.recorded:_weighted",
        calls(_all_alike),
        RECORDED,
    ),
    Mutant(
        "the fastest split is the one that is",
        "verlite.sizing.modes:fastest_split",
        calls(_as_it_is),
        MODES,
    ),
]
