"""Mutants of verlite.sizing: a plan that promises what does not fit."""

from tests.mutants import Mutant
from tests.mutants.patches import calls, returns

MEASURE = "tests/sizing/test_measure.py"
MEMORY = "tests/sizing/test_memory.py"
SIMULATION = ("tests/sizing/test_simulation.py",)
MODES = ("tests/sizing/test_modes.py::test_the_fastest_split_balances_engines_and_trainer",)


def _middle_is_flat(original, short, long, layers):
    return original(short, long, 4)


def _counts_moments_when_offloaded(original):
    return property(lambda role: role.memory.resident)


def _as_if_alone(original, self, running):
    return original(self, 1)


def _old_version(original, self, tokens, version):
    return original(self, tokens, version - 1)


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
        "an offloaded optimizer still counts",
        "verlite.sizing.memory:MeasuredRole.idle",
        _counts_moments_when_offloaded,
        (MEMORY,),
    ),
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
        "simulated tokens are a version older",
        "verlite.sizing.simulation:_Running.count",
        calls(_old_version),
        SIMULATION,
    ),
    Mutant(
        "the fastest split is the one that is",
        "verlite.sizing.modes:fastest_split",
        calls(_as_it_is),
        MODES,
    ),
]
