"""Mutants of verlite.control: decisions that are wrong once in a while, which simulation finds."""

from dataclasses import replace

from tests.mutants import Mutant
from tests.mutants.patches import (
    argument,
    attribute,
    calls,
    constant,
    does_nothing,
    result,
    returns,
)

MACHINE = "verlite.control.machine:Machine."
LIMITS = "verlite.control.limits:"
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


def _without_restart(original):
    return frozenset(phase for phase in original if phase.name != "RESTART")


def _observes_the_last(original, self, now, *values):
    self._step_s = self._save_s = 0.0
    return original(self, now, *values)


def _restarts_forgotten(original, self, now, *values):
    self.restarts = 0
    return original(self, now, *values)


def _wait_begins_again(original, self, now, *values):
    return original(self, self._outage_began, *values)


def _skips(original, self, now, *values):
    self.step += self.step == self.resumed_step + 1
    return original(self, now, *values)


def _last_code(original, self, now, *values):
    self.code = None
    return original(self, now, *values)


def _without_limit(original, self, now, *values):
    commands = original(self, now, *values)
    self.patience.leave(float("inf"), now)
    return commands


def _never_when_resumed(original, self, now, *values):
    return [] if self.resumed_step else original(self, now, *values)


def _exports(original, self, now, *values):
    self.policy = replace(self.policy, val_only=False) if self.step else self.policy
    return original(self, now, *values)


def _forgets_the_loss(original, self, attempt):
    self.lost = False
    return original(self, attempt)


def _waits_for_anything(original, self, attempt):
    self.lost = True
    return original(self, attempt)


def _believes_old_beats(original, self, beat, clock):
    original(self, replace(beat, number=self.beat.number + 1), clock)


def _always_moves(original, self, beat, clock):
    original(self, beat, clock)
    self.moved = self.heard


def _last_first(original, causes, roles):
    dead = original(causes, roles)
    causes.sort(key=lambda cause: cause.when)
    return dead


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


def _uncounted(original, self, state, ready=()):
    original(self, state, ready)
    loaded, places = len(self.groups), self._places
    self._places = lambda: places() + loaded if self.version else 0


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


def _only_what_is_due_now(original, self):
    return [need for need in original(self) if need[0] + self.bound <= self.step + 1]


def _forgets_the_second(original, self, engine):
    if set(self._queued) - set(range(self._next - len(self._queued), self._next)):  # put back
        self._running.pop(engine, None)
        return []
    return original(self, engine)


def _not_put_back(original, self, engine):
    self._running.pop(engine, None)
    return []


def _twice(original, self, number, oldest=None):
    return original(self, number, oldest) or number not in self.groups


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


class _NeverEmpty(set):
    def __bool__(self):
        return True


def _still_runs_what_died(original, self, engine):
    self._running.setdefault(engine, _NeverEmpty())


def _counts_publications(original, self):
    version = self.version
    original(self)
    self.version = version + 1


def _without_depth(original, self):
    self.depth = self.bound
    return original(self)


def _without_end(original, self):
    self.total_steps = None
    return original(self)


def _filtered_count(original, self):
    return max(0, original(self) - self.gone["filtered"])


def _newest_first(original, self):
    found = original(self)
    newest = sorted(self._ready)[-self.groups_per_step :]
    return found and (newest if self.bound else found)


def _starts_before_a_publication(original, self):
    swaps, self.swaps = self.swaps, True
    found = original(self)
    self.swaps = swaps
    return found


def _on_one_engine(original, self):
    found = original(self)
    numbers = [number for share in found.values() for number in share]
    for number in numbers:
        self._running[self.groups[number].engine].discard(number)
    if numbers:
        engine = min(self._running)
        for number in numbers:
            self.groups[number].engine = engine
        self._running[engine].update(numbers)
        return {engine: numbers}
    return {}


MUTANTS = [
    Mutant("a stop gives up an update", PATIENCE + "GIVEN_UP", _with_phase("UPDATE"), SIMULATION),
    Mutant(
        "a stop gives up the weight sync of restarted engines",
        PATIENCE + "GIVEN_UP",
        _with_phase("RESYNC"),
        SIMULATION,
    ),
    Mutant("a stop throws a finished step away", MACHINE + "must_save", returns(False), SIMULATION),
    Mutant(
        "a stop waits for the generation in progress", MACHINE + "polled", returns([]), SIMULATION
    ),
    Mutant(
        "engines are started again without end",
        MACHINE + "engines_died",
        calls(_restarts_forgotten),
        SIMULATION,
    ),
    Mutant(
        "a service is waited for without end",
        MACHINE + "health",
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
        "samples are drawn again without end", LIMITS + "MAX_RESAMPLES", constant(10**9), SIMULATION
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
        "a stop waits for the restart of an engine that nothing needs",
        PATIENCE + "GIVEN_UP",
        _without_restart,
        SIMULATION,
    ),
    Mutant(
        "nothing limits the time after the exit code is decided",
        MACHINE + "ended",
        calls(_without_limit),
        SIMULATION,
    ),
    Mutant(
        "a step that another rank's stop prevents counts as taken (SFT, DPO)",
        MACHINE + "stopped_elsewhere",
        returns([]),
        SIMULATION,
    ),
    Mutant(
        "samples that kill every engine are tried by each restart of the command",
        MACHINE + "_no_restart",
        result(lambda fail: replace(fail, may_pass=True)),
        SIMULATION,
    ),
    Mutant(
        "an engine that cannot be started is used",
        MACHINE + "restart_failed",
        returns([]),
        SIMULATION,
    ),
    Mutant(
        "val_only does not validate a run that resumes",
        MACHINE + "started",
        calls(_never_when_resumed),
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
        "a later step without a checkpoint renews the budget",
        RESTARTS + "ended",
        argument("attempt", lambda attempt: replace(attempt, saved=attempt.step)),
        SIMULATION,
    ),
    Mutant(
        "attempts that do not find their cluster are a crash loop",
        RESTARTS + "_count",
        argument("attempt", attribute("error_type", lambda kind: "")),
        SIMULATION,
    ),
    Mutant(
        "a lost node that stays away ends the restarts",
        RESTARTS + "_may_succeed",
        calls(_forgets_the_loss),
        SIMULATION,
    ),
    Mutant(
        "what is away is awaited although nothing was lost",
        RESTARTS + "_may_succeed",
        calls(_waits_for_anything),
        SIMULATION,
    ),
    Mutant(
        "the command is started again although its wall time is over",
        RESTARTS + "ended",
        argument("attempt", lambda attempt: replace(attempt, no_restart="")),
        SIMULATION,
    ),
    Mutant(
        "the command is started again after a signal to the supervisor",
        RESTARTS + "ended",
        argument("asked", lambda asked: ""),
        SIMULATION,
    ),
    Mutant(
        "a command that resumes after a signal to the supervisor is called failed",
        RESTARTS + "code_when_asked",
        calls(lambda original, self, attempt, asked: attempt.code),
        SIMULATION,
    ),
    Mutant(
        "the pause before a restart does not grow", RESTARTS + "_pause_s", returns(5.0), SIMULATION
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
        MACHINE + "step_ends",
        returns([]),
        MACHINES,
    ),
    Mutant(
        "the last step and save count, not the longest",
        MACHINE + "step_ends",
        calls(_observes_the_last),
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
    Mutant(
        "the run's limit does not hold",
        WATCH + "end_limit",
        argument("run_limit_s", lambda limit: 1e9),
        WATCHED,
    ),
    Mutant(
        "a rank that waits for tools or rewards is stuck",
        WATCH + "is_judged",
        returns(True),
        WATCHED,
    ),
    Mutant("a frozen process is not noticed", WATCH + "Watch.silent", returns({}), WATCHED),
    Mutant(
        "a datagram that comes late or twice shows that a frozen process lives",
        WATCH + "Heard.hear",
        calls(_believes_old_beats),
        WATCHED,
    ),
    Mutant("each heartbeat is progress", WATCH + "Heard.hear", calls(_always_moves), WATCHED),
    Mutant(
        "what followed from a failure is reported in its place",
        CAUSES + "Failures.wait_s",
        returns(None),
        WATCHED,
    ),
    Mutant(
        "the first failure that is known counts, not the cause of the others",
        CAUSES + "dead_workers",
        calls(_last_first),
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
        "an engine that hangs in its first call ends the run",
        WATCH + "Watch.look_now",
        does_nothing,
        WATCHED,
    ),
    Mutant(
        "ranks in a collective are named as those that others wait for",
        WATCH + "not_entered",
        calls(lambda original, ranks, method: [r.rank for r in ranks if r.in_collective]),
        WATCHES,
    ),
    Mutant(
        "a rank that waits for a slow one is as slow",
        WATCH + "own_work",
        argument("heard", lambda heard: None),
        WATCHES,
    ),
    Mutant("a straggler is named at every call", LIMITS + "SLOW_CALLS", constant(1), WATCHES),
    Mutant(
        "every look at a silent worker writes stacks",
        WATCH + "Watch.have_signed",
        returns(False),
        WATCHES,
    ),
    Mutant(
        "a new engine is judged by the pauses of the old one",
        WATCH + "Watch.restarted",
        does_nothing,
        WATCHES,
    ),
    Mutant(
        "prompts that were running are lost on resume (NeMo-RL 3599)",
        FLOW + "state_dict",
        _without("running"),
        FLOWS,
    ),
    Mutant(
        "finished prompts are lost on resume, as if they had been trained (SkyRL)",
        FLOW + "state_dict",
        _without("ready"),
        FLOWS,
    ),
    Mutant(
        "prompts are drawn twice after a resume",
        FLOW + "load_state_dict",
        calls(_drawn_again),
        FLOWS,
    ),
    Mutant(
        "what is alive is not counted after a resume (AReaL 1388)",
        FLOW + "load_state_dict",
        calls(_uncounted),
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
        "a step looks at what is due now, and not at what will be",
        FLOW + "_needs",
        calls(_only_what_is_due_now),
        FLOWS,
    ),
    Mutant(
        "what is too old is dropped (verl, prime-rl, TRL)",
        FLOW + "choose",
        calls(_drops_what_is_late),
        FLOWS,
    ),
    Mutant("nothing bounds the age (slime 1781)", FLOW + "_places", returns(10**6), FLOWS),
    Mutant(
        "groups of a dead engine are waited for without end (verl 5815)",
        FLOW + "engine_lost",
        calls(_not_put_back),
        FLOWS,
    ),
    Mutant(
        "the second of two engines that die at once is forgotten",
        FLOW + "engine_lost",
        calls(_forgets_the_second),
        FLOWS,
    ),
    Mutant(
        "a publication waits for ever for an engine that was replaced (AReaL 1160)",
        FLOW + "engine_back",
        calls(_still_runs_what_died),
        FLOWS,
    ),
    Mutant(
        "weights are replaced while groups run (NeMo-RL 2180)",
        FLOW + "may_publish",
        returns(True),
        FLOWS,
    ),
    Mutant(
        "groups start while a publication waits for those that run",
        FLOW + "assign",
        calls(_starts_before_a_publication),
        FLOWS,
    ),
    Mutant("a group is trained twice", FLOW + "trained", calls(_stays_ready), FLOWS),
    Mutant("an answer that comes twice counts twice", FLOW + "finished", calls(_twice), FLOWS),
    Mutant(
        "the newest version of a group counts, not the oldest",
        FLOW + "finished",
        calls(_newest_counts),
        FLOWS,
    ),
    Mutant(
        "versions count publications, not steps",
        FLOW + "published",
        calls(_counts_publications),
        FLOWS,
    ),
    Mutant("depth is ignored", FLOW + "wanted", calls(_without_depth), FLOWS),
    Mutant(
        "prompts are drawn that no step is left for", FLOW + "_places", calls(_without_end), FLOWS
    ),
    Mutant("filtered groups are not replaced", FLOW + "wanted", calls(_filtered_count), FLOWS),
    Mutant("the newest groups are trained first", FLOW + "choose", calls(_newest_first), FLOWS),
    Mutant("one engine gets all groups", FLOW + "assign", calls(_on_one_engine), FLOWS),
]
