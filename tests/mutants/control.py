"""Mutants of verlite.control: decisions that are wrong once in a while, which simulation finds."""

from dataclasses import replace

from tests.mutants import Mutant
from tests.mutants.patches import (
    argument,
    attribute,
    calls,
    result,
    returns,
)

MACHINE = "verlite.control.machine:Machine."
PATIENCE = "verlite.control.patience:"
MACHINES = ("tests/control/test_machine.py",)
SIMULATION = ("tests/control/test_simulation.py::test_no_rule_is_broken",)
RESTARTS = "verlite.control.restarts:Restarts."
WATCH = "verlite.control.watch:"
CAUSES = "verlite.control.causes:"
WATCHES = ("tests/control/test_watch.py",)
WATCHED = ("tests/control/test_watch_simulation.py::test_no_rule_is_broken",)
FLOW = "verlite.control.flow:Flow."
FLOWS = ("tests/control/test_flow_simulation.py::test_no_rule_is_broken",)


def _with_phase(name):
    def patch(original):
        phase = next(iter(original)).__class__[name]
        return original | {phase}

    return patch


def _restarts_forgotten(original, self, now, *values):
    self.restarts = 0
    return original(self, now, *values)


def _skips(original, self, now, *values):
    self.step += self.step == self.resumed_step + 1
    return original(self, now, *values)


def _last_code(original, self, now, *values):
    self.code = None
    return original(self, now, *values)


def _exports(original, self, now, *values):
    self.policy = replace(self.policy, val_only=False) if self.step else self.policy
    return original(self, now, *values)


def _believes_old_beats(original, self, beat, clock):
    original(self, replace(beat, number=self.beat.number + 1), clock)


def _forgets_others(original, self, causes, roles):
    before = list(self.dead)
    more = original(self, causes, roles)
    self.dead[:] = before
    return more and []


def _nobody(dead):
    return []


def _counts_twice(original, self, name, now):
    counts = original(self, name, now)
    self.signals += counts
    return counts


# The flow of prompts. Each is a bug that another framework had, or would be one here.


def _without(*states):
    def change(state):
        return state | {"groups": [group for group in state["groups"] if group[1] not in states]}

    return result(change)


def _drawn_again(original, self, state, ready=()):
    original(self, state | {"next": self.groups_per_step * state["step"]}, ready)


def _all_ready(original, self, state, ready=()):
    original(self, state, [group[0] for group in state["groups"]])


def _age_restarts(original, self, state, ready=()):
    groups = [
        [number, name, oldest and state["step"] + 1] for number, name, oldest in state["groups"]
    ]
    original(self, state | {"groups": groups}, ready)


def _drops_what_is_late(original, self):
    """Drop finished groups that later steps have no place for, in place of waiting for others."""
    found = original(self)
    if found is None and len(self._ready) >= self.groups_per_step:
        late = [n for n in self.groups if self.groups[n].oldest == min(self._started_with)]
        for number in late:
            self.filtered(number, "too old")
    return found


def _not_put_back(original, self, engine):
    self._running.pop(engine, None)
    return []


def _newest_counts(original, self, number, oldest=None):
    return original(self, number, self.version)


def _stays_ready(original, self, numbers):
    group = self.groups[numbers[0]]
    original(self, numbers)
    self.groups[group.number] = group
    self._ready.add(group.number)
    self._started_with[group.oldest] += 1
    self._ready_with[group.oldest] += 1
    self.gone["trained"] -= 1


def _without_depth(original, self):
    self.depth = self.bound
    return original(self)


def _filtered_count(original, self):
    return max(0, original(self) - self.gone["filtered"])


MUTANTS = [
    Mutant("a stop gives up an update", PATIENCE + "GIVEN_UP", _with_phase("UPDATE"), SIMULATION),
    Mutant("a stop throws a finished step away", MACHINE + "must_save", returns(False), SIMULATION),
    Mutant(
        "engines are started again without end",
        MACHINE + "engines_died",
        calls(_restarts_forgotten),
        SIMULATION,
    ),
    Mutant("a step is skipped", MACHINE + "step_wanted", calls(_skips), SIMULATION),
    Mutant(
        "the save after a validation is forgotten", MACHINE + "validated", returns([]), SIMULATION
    ),
    Mutant("the last exit code counts", MACHINE + "ended", calls(_last_code), SIMULATION),
    Mutant(
        "one signal ends a save", PATIENCE + "Patience.signal", calls(_counts_twice), SIMULATION
    ),
    Mutant("the wall time is ignored", MACHINE + "_look_at_time", returns([]), SIMULATION),
    Mutant(
        "a step that another rank's stop prevents counts as taken (SFT, DPO)",
        MACHINE + "stopped_elsewhere",
        returns([]),
        SIMULATION,
    ),
    Mutant(
        "an engine that cannot be started is used",
        MACHINE + "restart_failed",
        returns([]),
        SIMULATION,
    ),
    Mutant("val_only exports the model", MACHINE + "loop_ends", calls(_exports), SIMULATION),
    Mutant("a crash loop has no end", RESTARTS + "_refusal", returns(""), SIMULATION),
    Mutant(
        "progress does not renew the budget of restarts",
        RESTARTS + "_has_progress",
        returns(False),
        SIMULATION,
    ),
    Mutant(
        "attempts that do not find their cluster are a crash loop",
        RESTARTS + "_count",
        argument("attempt", attribute("error_type", lambda kind: "")),
        SIMULATION,
    ),
    Mutant(
        "the command is started again after a signal to the supervisor",
        RESTARTS + "ended",
        argument("asked", lambda asked: ""),
        SIMULATION,
    ),
    Mutant(
        "nothing is validated or saved between steps",
        "verlite.control.policy:is_due",
        returns(False),
        MACHINES,
    ),
    Mutant(
        "max_runtime does not learn how long steps and saves take",
        MACHINE + "step_ends",
        returns([]),
        MACHINES,
    ),
    Mutant("failed saves never end a run", MACHINE + "save_failed", returns([]), SIMULATION),
    Mutant(
        "a rank that waits for a working one is stuck",
        WATCH + "still_ranks",
        calls(lambda original, ranks, limit_s: [r for r in ranks if r.still_s > limit_s]),
        WATCHED,
    ),
    Mutant(
        "limits do not follow earlier calls",
        WATCH + "end_limit",
        argument("longest_pause_s", lambda pause: None),
        WATCHED,
    ),
    Mutant("a frozen process is not noticed", WATCH + "Watch.silent", returns({}), WATCHED),
    Mutant(
        "a datagram that comes late or twice shows that a frozen process lives",
        WATCH + "Heard.hear",
        calls(_believes_old_beats),
        WATCHED,
    ),
    Mutant(
        "what followed from a failure is reported in its place",
        CAUSES + "Failures.wait_s",
        returns(None),
        WATCHED,
    ),
    Mutant("a dead engine ends the run", CAUSES + "dead_workers", result(_nobody), WATCHED),
    Mutant(
        "the death of any worker is taken for that of an engine",
        CAUSES + "can_restart",
        calls(lambda original, cause, roles: cause.ended),
        WATCHED,
    ),
    Mutant(
        "an engine that dies while others are started again is forgotten",
        CAUSES + "Settling.more",
        calls(_forgets_others),
        WATCHED,
    ),
    Mutant(
        "ranks in a collective are named as those that others wait for",
        WATCH + "not_entered",
        calls(lambda original, ranks, method: [r.rank for r in ranks if r.in_collective]),
        WATCHES,
    ),
    Mutant(
        "prompts that were running are lost on resume (NeMo-RL 3599)",
        FLOW + "state_dict",
        _without("running"),
        FLOWS,
    ),
    Mutant(
        "prompts are drawn twice after a resume",
        FLOW + "load_state_dict",
        calls(_drawn_again),
        FLOWS,
    ),
    Mutant(
        "finished groups of a checkpoint are trained without their samples",
        FLOW + "load_state_dict",
        calls(_all_ready),
        FLOWS,
    ),
    Mutant(
        "age restarts at the resumed step (verl)",
        FLOW + "load_state_dict",
        calls(_age_restarts),
        FLOWS,
    ),
    Mutant(
        "groups that finish late are trained although they exceed the bound (SkyRL)",
        FLOW + "_needs",
        returns([]),
        FLOWS,
    ),
    Mutant(
        "what is too old is dropped (verl, prime-rl, TRL)",
        FLOW + "choose",
        calls(_drops_what_is_late),
        FLOWS,
    ),
    Mutant(
        "groups of a dead engine are waited for without end (verl 5815)",
        FLOW + "engine_lost",
        calls(_not_put_back),
        FLOWS,
    ),
    Mutant(
        "weights are replaced while groups run (NeMo-RL 2180)",
        FLOW + "may_publish",
        returns(True),
        FLOWS,
    ),
    Mutant("a group is trained twice", FLOW + "trained", calls(_stays_ready), FLOWS),
    Mutant(
        "the newest version of a group counts, not the oldest",
        FLOW + "finished",
        calls(_newest_counts),
        FLOWS,
    ),
    Mutant("depth is ignored", FLOW + "wanted", calls(_without_depth), FLOWS),
    Mutant("filtered groups are not replaced", FLOW + "wanted", calls(_filtered_count), FLOWS),
]
