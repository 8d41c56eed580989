"""What must hold in every schedule: a second bookkeeping, which does not look into the machine.

The names of the rules, as a broken one prints them:

save       a finished step is never thrown away, a save that is due never forgotten
update     no update and no finished step is given up half-way
step       no step is skipped or repeated; validations and saves come exactly when they are due
stop       a stop ends within its time, gives up what it may, and waits for nothing else
wall time  a run ends before its wall time, and not earlier than it must
engines    restarts are bounded, and happen when they may
outage     waits and repetitions are bounded, and as long as they may be
code       the exit code is that of the first cause
progress   without faults all steps are taken and nothing waits
restart    the command is started again if that may help, at most as often as allowed
end        nothing waits or repeats without end
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

from verlite.control import commands as c
from verlite.control.commands import Do
from verlite.control.exit_codes import DONE, FAILED, INTERRUPTED, LOST, REFUSED, STOPPED
from verlite.control.machine import Outage
from verlite.control.policy import Policy
from verlite.control.restarts import Again, Attempt, Leave

if TYPE_CHECKING:
    from tests.control.world import World

# The times of docs/failures.md, on purpose not those of verlite.control.limits.
END_S, LEAVE_S, REPEAT_S, CLEAN_S = 8.0, 20.0, 1.0, 30.0
UNKNOWN_SAVE_S, SLOWER, FAILED_SAVES_S = 60.0, 1.5, 120.0
RESAMPLES, SHORTEST_S, HEALTH_S = 3, 0.001, 2.0
SLACK_S = 2.5
"""Of a simulated clock: ticks of the watching thread."""
CAN_GIVE_UP = ("sample", "validate", "restart")


Values = tuple[Any, ...]
Kinds = set[Any]


class Broken(Exception):
    """A rule was broken."""


class Rules:
    """The rules of one attempt."""

    def __init__(self, world: "World", policy: Policy) -> None:
        self.world, self.policy = world, policy
        self.where = "open"
        self.begun = False
        """Whether the loop has begun."""
        self.start = self.finished = world.start
        self.asked: str | None = None
        """What the main thread was asked to stop by."""
        self.first_signal: str | None = None
        self.asked_at = self.last_signal = self.second_at = 0.0
        self.counted = 0
        self.idle_since = 0.0
        self.code: int | None = None
        self.leaves_at = inf
        self.loop_ended = False
        self.restarts = self.resamples = self.failed = 0
        self.samples_fail: bool | None = None
        """Whether the first engine that died in this step failed itself."""
        self.first_failed = 0.0
        self.outage: tuple[Outage, float] | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self.where = self.where, name
        try:
            yield
        finally:
            self.where = before

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            raise Broken(f"{text} (at {self.world.now:.3f} s, {self.where}, step {self.finished})")

    @property
    def unsaved(self) -> bool:
        """Whether a stop has to wait."""
        if not self.policy.gives_up:
            return self.begun
        return self.finished > max(self.world.saved, self.start)

    @property
    def stops(self) -> bool:
        return self.policy.gives_up and self.asked is not None

    def due(self, frequency: int) -> bool:
        step = self.finished
        return frequency > 0 and (step == self.policy.total_steps or step % frequency == 0)

    def signal(self, name: str) -> None:
        """A signal reaches the process."""
        now = self.world.now
        if self.first_signal is None and self.asked is None:
            self.first_signal, self.asked_at = name, now
            self.idle_since = now
        elif self.counted and now - self.last_signal <= REPEAT_S:
            return
        elif name == "SIGHUP" and not (self.counted == 0 and self.first_signal == name):
            return
        self.counted += 1
        self.last_signal = now
        if self.counted == 2:
            self.second_at = now

    def look(self, event: str, values: Values, commands: list[Any]) -> None:
        """Compare what the machine said with what it should say."""
        kinds = {one if isinstance(one, Do) else type(one) for one in commands}
        now = self.world.now
        if c.WallTimeOver in kinds:
            self.check(
                self.left() < self.needed(event), "wall time: stopped although there is time"
            )
            self.asked_at = now
            if self.asked is None:
                self.asked, self.idle_since = "time", now
        elif self.policy.deadline and self.asked is None and self.code is None:
            looks = event in ("polled", "update_begins") or c.BeginStep in kinds
            if looks and self.begun | (c.BeginStep in kinds) | (self.where != "open"):
                in_time = self.left() >= self.needed(event)
                self.check(in_time or not self.policy.gives_up and c.BeginStep not in kinds,
                           "wall time: it is ignored")  # fmt: skip
        if Do.GIVE_UP in kinds:
            self.check(self.asked is not None, "update: given up although nothing was asked")
            in_time = self.where in CAN_GIVE_UP or event == "engines_died"
            self.check(in_time and self.policy.gives_up, "update: something was given up half-way")
        by = getattr(self, f"_{event}", None)
        if by is not None:
            by(values, commands, kinds)
        if c.EndProcess in kinds:
            self._end_process(commands)

    # Wall time

    def left(self) -> float:
        assert self.policy.deadline is not None
        return self.policy.deadline - self.world.now

    def needed(self, event: str) -> float:
        step = SLOWER * self.world.step_s if event == "step_wanted" else 0.0
        return step + SLOWER * (self.world.save_s or UNKNOWN_SAVE_S) + CLEAN_S

    # Events of the loop

    def _started(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        wanted = self.policy.validates_first and (not self.start or self.policy.val_only)
        self.check((Do.VALIDATE in kinds) == wanted, "step: the first validation")

    def _step_wanted(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        self.begun = True
        self.restarts = self.resamples = 0
        self.samples_fail = None
        goes_on = self.finished < self.policy.total_steps and self.asked is None
        goes_on = goes_on and not self.policy.val_only
        self.check((c.BeginStep in kinds) == goes_on, "step: the loop goes on or ends wrongly")
        if goes_on:
            step = next(one.step for one in commands if isinstance(one, c.BeginStep))
            self.check(step == self.finished + 1, "step: one is skipped or repeated")

    def _update_begins(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        if self.where == "sample":
            asked = self.asked is not None
            self.check((Do.GIVE_UP in kinds) == asked, "stop: an update begins after the request")

    def _polled(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        if self.stops and self.unsaved and self.where in CAN_GIVE_UP:
            self.check(Do.GIVE_UP in kinds, "stop: it waits for what could be given up")

    def _step_finished(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        self.finished += 1

    def _step_measured(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        validates = self.due(self.policy.test_freq) and not self.stops
        self.check((Do.VALIDATE in kinds) == validates, "step: a validation is due, or is not")
        if not validates:
            self._validated(values, commands, kinds)

    def _validated(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        saves = self.due(self.policy.save_freq) or self.stops
        self.check((Do.SAVE in kinds) == saves, "save: a save is due, or is not")

    def _saved(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        self.failed = 0

    def _save_failed(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        if not self.failed:
            self.first_failed = self.world.now
        self.failed += 1
        limit, last = self.policy.max_failed_saves, self.finished == self.policy.total_steps
        late = self.world.now - self.first_failed >= FAILED_SAVES_S or limit == 1 or last
        ends = (self.failed >= limit and late) or self.loop_ended
        self.check(
            (c.Fail in kinds) == ends, "save: failed saves end the run too early or too late"
        )

    def _loop_ends(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        self.loop_ended = True
        policy = self.policy
        if (self.finished < policy.total_steps and not policy.val_only) or self.stops:
            expected: Any = Do.SAVE if self.finished > self.world.saved else c.Exit(STOPPED)
        else:
            exports = policy.exports and self.finished and not policy.val_only
            expected = Do.EXPORT if exports else c.Exit(DONE)
        self.check(commands[-1] == expected, f"save: {commands[-1]} at the end, not {expected}")

    # Engines and services

    def _engines_died(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        if self.samples_fail is None:
            self.samples_fail = values[3]
        if self.stops and self.unsaved:
            self.check(Do.GIVE_UP in kinds, "stop: it waits for an engine that nothing needs")
        elif Do.GIVE_UP not in kinds and Do.INTERRUPT not in kinds:
            may = self.restarts + values[0] <= self.policy.max_restarts
            self.check((Do.RESTART in kinds) == may, "engines: restarts are not bounded")
            if may:
                self.restarts += values[0]
            else:
                self._restart_failed(values, commands, kinds)

    def _restart_failed(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        self.check(c.Fail in kinds, "engines: one that cannot be started is waited for")
        may_pass = not (self.samples_fail and self.restarts)
        self.check(commands[-1].may_pass == may_pass, "code: whether the same samples fail again")

    def _answered(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        waits = values[0] is not None and self.resamples < RESAMPLES
        self.check((c.CheckHealth in kinds) == waits, "outage: it is waited for, or is not")
        if values[0] is None or not waits:
            self.resamples = 0
        else:
            self.outage = (values[0], self.world.now)

    def _health(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        assert self.outage is not None
        outage, began = self.outage
        left = outage.limit_s - (self.world.now - began)
        self.check((Do.RESAMPLE in kinds) == (not values[0]), "outage: it has ended")
        if values[0]:
            waits = left >= SHORTEST_S
            self.check((c.CheckHealth in kinds) == waits, "outage: it is waited for too long")
            after_s = commands[-1].after_s if waits else SHORTEST_S
            good = SHORTEST_S <= after_s <= min(HEALTH_S, max(left, SHORTEST_S)) + 1e-9
            self.check(good, f"outage: a wait of {after_s} s")
            if not waits:
                self.resamples = 0
        else:
            self.resamples += 1

    # Stops

    def _asked(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        if self.asked is not None or self.code is not None:
            self.check(not commands, "code: a later request changes something")
            return
        self.asked = values[0]
        interrupts = values[0] == "SIGINT" or not self.unsaved
        rule = (
            "save: a finished step is thrown away" if not interrupts else "stop: nothing is unsaved"
        )
        self.check((Do.INTERRUPT in kinds) == interrupts, rule)

    def _signal(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        self._watched(values, commands, kinds)

    def _watched(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        now = self.world.now
        if self.code is not None or c.EndProcess in kinds:
            return
        saves = self.unsaved and (self.first_signal != "SIGINT" or self.asked == "time")
        if saves:
            self.idle_since = now
            self.check(self.counted < 3, "stop: a third signal does not end the process")
            late = self.counted == 2 and now > self.second_at + self.policy.stop_grace_s + SLACK_S
            self.check(not late, "stop: a second signal does not end the save")
        else:
            self.check(now - self.idle_since <= LEAVE_S + SLACK_S, "stop: the process does not end")

    def _end_process(self, commands: list[Any]) -> None:
        end, now = commands[-1], self.world.now
        if self.code is None:
            self.code = self.stop_code
        self.check(end.code == self.code, "code: the process ends with another one")
        if self.asked == "time" or self.first_signal != "SIGINT":
            limited = self.counted > 2 or (
                self.counted == 2 and now >= self.second_at + self.policy.stop_grace_s
            )
            kept = not self.unsaved or end.was_decided or limited
            self.check(kept, "save: the process ends while it saves")
        early = now < self.leaves_at if end.was_decided else now - self.idle_since < END_S
        early = early and self.counted < 2
        self.check(not early, "stop: the process ends before it could clean up")

    # The end

    @property
    def stop_code(self) -> int:
        first = self.asked or self.first_signal
        return INTERRUPTED if first in ("SIGINT", None) else STOPPED

    def _ended(self, values: Values, commands: list[Any], kinds: Kinds) -> None:
        if self.code is None:
            self.code = self.stop_code if values[0] is None else values[0]
            self.leaves_at = self.world.now + (END_S if values[0] is None else LEAVE_S)

    def ended(self, code: int) -> None:
        """The process has ended."""
        self.check(code == self.code, f"code: {code}, not {self.code}")
        self.check(self.world.now <= self.leaves_at + SLACK_S, "end: cleaning up has no end")
        limited = self.counted > 1 or "SIGINT" in (self.asked, self.first_signal)
        if code == STOPPED and not limited:
            kept = self.finished <= max(self.world.saved, self.start)
            self.check(kept, "save: a finished step is thrown away")
        if code == DONE and not self.policy.val_only:
            self.check(self.finished == self.policy.total_steps, "progress: steps are missing")
            self.check(self.world.exported or not self.policy.exports, "save: nothing is exported")


class RestartRules:
    """The rules of one `verlite supervise`, from the whole list of attempts each time."""

    def __init__(self, max_restarts: int, same_step: int) -> None:
        self.max_restarts, self.same_step = max_restarts, same_step
        self.attempts: list[Attempt] = []

    def ended(self, attempt: Attempt, asked: str, following: Again | Leave) -> None:
        if not self.attempts or self.attempts[-1] is not attempt:
            self.attempts.append(attempt)
        expected = self._expected(attempt, asked)
        got = following.after_s if isinstance(following, Again) else following.code
        kind = "after" if isinstance(following, Again) else "exit code"
        if (kind, got) != expected:
            raise Broken(f"restart: {kind} {got}, not {expected}, after {self.attempts}")

    def _expected(self, attempt: Attempt, asked: str) -> tuple[str, float]:
        since = self._since()
        lost = any(one.code == LOST for one in since)
        resumes = attempt.code in (STOPPED, LOST) or attempt.signal == "SIGKILL"
        resumes = resumes or (attempt.code == FAILED and attempt.run_dir and not attempt.error)
        resumes = resumes or (attempt.error_type == "ResourcesMissing" and lost)
        resumes = bool(resumes) and not attempt.no_restart
        if asked == "SIGINT":
            ended = attempt.code in (DONE, FAILED, REFUSED)
            return "exit code", attempt.code if ended else INTERRUPTED
        if asked:
            return "exit code", STOPPED if resumes else attempt.code
        if not resumes:
            return "exit code", attempt.code
        failed = [one for one in since if one.code != STOPPED]
        steps = [one.step for one in failed if one.code != REFUSED]
        at_step = 0
        while at_step < len(steps) and steps[-1 - at_step] == steps[-1]:
            at_step += 1
        if len(since) > self.max_restarts or (self.same_step and at_step >= self.same_step):
            return "exit code", FAILED
        return "after", min(300.0, 5.0 * 2.0 ** (len(failed) - 1)) if failed else 1.0

    def _since(self) -> list[Attempt]:
        """The attempts from the last one that made progress on."""
        saved = step = -1
        begin = 0
        for number, one in enumerate(self.attempts):
            if one.saved is not None and one.saved > saved:
                begin = number
            elif one.saved is None and one.step is not None and one.step > step:
                begin = number
            saved = saved if one.saved is None else max(saved, one.saved)
            step = step if one.step is None else max(step, one.step)
        return self.attempts[begin:]
