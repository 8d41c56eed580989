"""Mutants of verlite.control: decisions that are wrong once in a while, which simulation finds."""

from tests.mutants import Mutant
from tests.mutants.patches import calls, constant, result, returns

MACHINE = "verlite.control.machine:Machine."
LIMITS = "verlite.control.limits:"
PATIENCE = "verlite.control.patience:"
MACHINES = ("tests/control/test_machine.py",)
SIMULATION = ("tests/control/test_simulation.py::test_no_rule_is_broken",)


def _with_phase(name):
    def patch(original):
        phase = next(iter(original)).__class__[name]
        return original | {phase}

    return patch


def _without_restart(original):
    return frozenset(phase for phase in original if phase.name != "RESTART")


def _observes_the_last(original, self, event, now):
    self._step_s = self._save_s = 0.0
    return original(self, event, now)


def _restarts_forgotten(original, self, event, now):
    self.restarts = 0
    return original(self, event, now)


def _wait_begins_again(original, self, event, now):
    return original(self, event, self._outage_began)


def _skips(original, self, event, now):
    self.step += self.step == self.resumed + 1
    return original(self, event, now)


def _last_code(original, self, event, now):
    self.code = None
    return original(self, event, now)


def _counts_twice(original, self, name, now):
    counts = original(self, name, now)
    self.signals += counts
    return counts


MUTANTS = [
    Mutant("a stop gives up an update", PATIENCE + "GIVEN_UP", _with_phase("UPDATE"), SIMULATION),
    Mutant(
        "a stop gives up the weight sync of restarted engines",
        PATIENCE + "GIVEN_UP",
        _with_phase("RESYNC"),
        SIMULATION,
    ),
    Mutant(
        "a stop throws a finished step away",
        MACHINE + "must_save",
        returns(False),
        SIMULATION,
    ),
    Mutant(
        "a stop waits for the generation in progress",
        MACHINE + "_polled",
        returns([]),
        SIMULATION,
    ),
    Mutant(
        "engines are started again without end",
        MACHINE + "_engines_died",
        calls(_restarts_forgotten),
        SIMULATION,
    ),
    Mutant(
        "a service is waited for without end",
        MACHINE + "_health",
        calls(_wait_begins_again),
        SIMULATION,
    ),
    Mutant(
        "a wait shorter than a millisecond is repeated",
        LIMITS + "SHORTEST_WAIT_S",
        constant(0.0),
        SIMULATION,
    ),
    Mutant(
        "samples are drawn again without end",
        LIMITS + "MAX_RESAMPLES",
        constant(10**9),
        SIMULATION,
    ),
    Mutant("a step is skipped", MACHINE + "_step_wanted", calls(_skips), SIMULATION),
    Mutant(
        "the save after a validation is forgotten", MACHINE + "_validated", returns([]), SIMULATION
    ),
    Mutant("the last exit code counts", MACHINE + "_ended", calls(_last_code), SIMULATION),
    Mutant(
        "one signal ends a save", PATIENCE + "Patience.signal", calls(_counts_twice), SIMULATION
    ),
    Mutant("the wall time is ignored", MACHINE + "_look_at_time", returns([]), SIMULATION),
    Mutant(
        "a stop waits for the restart of an engine that nothing needs",
        PATIENCE + "GIVEN_UP",
        _without_restart,
        SIMULATION,
    ),
    Mutant(
        "nothing limits the time after the exit code is decided",
        MACHINE + "_ended",
        result(lambda commands: []),
        SIMULATION,
    ),
    Mutant(
        "nothing is validated or saved between steps",
        "verlite.control.policy:is_due",
        returns(False),
        MACHINES,
    ),
    Mutant(
        "three failed saves within seconds end the run",
        LIMITS + "FAILED_SAVES_S",
        constant(0.0),
        ("tests/trainer/test_finish.py::test_saves_may_fail_a_few_times_in_a_row",),
    ),
    Mutant(
        "max_runtime does not learn how long steps and saves take",
        MACHINE + "_step_ends",
        returns([]),
        MACHINES,
    ),
    Mutant(
        "the last step and save count, not the longest",
        MACHINE + "_step_ends",
        calls(_observes_the_last),
        MACHINES,
    ),
    Mutant("failed saves never end a run", MACHINE + "_save_failed", returns([]), SIMULATION),
]
