"""The control on a virtual clock, with simulated stages, engines, services, a disk and a command
that is started again, as `verlite supervise` does.

`Process` does what `trainer.run`, `trainer.finish`, `sft.run` and `trainer.stop` do with a
command. What it knows itself (`tests.control.rules`) is written down without a look into the
machine, and compared after every event.
"""

import random
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from typing import Any

from tests.control.rules import Broken, RestartRules, Rules
from tests.control.schedule import Fault, Schedule
from verlite.control import commands as c
from verlite.control import exit_codes, limits
from verlite.control.commands import Do
from verlite.control.machine import Machine, Outage
from verlite.control.policy import Policy
from verlite.control.restarts import Attempt, Leave, Restarts

TICK_S = 1.0
"""How often the watching thread looks. The real one does so every limits.WATCH_S."""
JOBS = 8
"""How often the user starts `verlite supervise`, and once more for each fault and crash."""
LASTS = ("full", "outage", "broken", "missing")
"""Faults that last."""
MAX_EVENTS = 20_000


class StepAborted(Exception):
    pass


class Interrupted(Exception):
    pass


class Failed(Exception):
    """A stage failed; the process is to end with `code`."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(text)
        self.code = code


class ProcessEnded(Exception):
    """The process is gone. killed: the control did not end it. signal: the one that did."""

    def __init__(self, code: int, signal: str = "", killed: bool = False) -> None:
        self.code, self.signal, self.killed = code, signal, killed


class World:
    """What outlives a process: the clock, the disk, and what is still to go wrong."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.draw = random.Random(schedule.seed + 1)
        self.now = 0.0
        self.saved = 0
        """The newest checkpoint in the run directory."""
        self.exported = False
        self.step_s = self.save_s = 0.0
        self.pending = [f for f in schedule.faults if f.kind not in LASTS]
        self.crashes = schedule.crashes
        self.asked = ""
        """The last signal to `verlite supervise`."""
        self.gave_up = False
        """Whether it gave up a command that may succeed, as a user may start it once more."""
        self.events = 0

    @property
    def start(self) -> int:
        """The step from which an attempt starts."""
        return self.saved or self.schedule.resumed

    def is_in(self, kind: str, but: str = "no name") -> bool:
        """Whether the disk is full, or a service down that has not this name."""
        faults = (f for f in self.schedule.faults if f.kind == kind and f.name != but)
        return any(f.at <= self.now < f.until for f in faults)

    def run(self) -> list[int]:
        """Start `verlite supervise` until the command is done or has failed; return its exit codes.

        Raises Broken if a rule was broken.
        """
        codes: list[int] = []
        stuck = 0
        while len(codes) < JOBS + len(self.schedule.faults) + self.schedule.crashes:
            before = self.saved
            codes.append(self.supervise())
            if codes[-1] in (exit_codes.DONE, exit_codes.FAILED) and not self.gave_up:
                self.check_codes(codes)
                return codes
            stuck = stuck + 1 if self.saved == before else 0
            if stuck == 3 and self.schedule.runtime_s is not None:
                return codes  # the wall time is too short for a step
            away = [f.until for f in self.schedule.faults if f.kind == "missing"]
            self.now = max([self.now + 1.0, *(until for until in away if self.is_in("missing"))])
        raise Broken("progress: it is neither done nor has it failed")

    def supervise(self) -> int:
        """As launch.supervise, with the real decisions. Returns its exit code."""
        s = self.schedule
        restarts = Restarts(s.command_restarts, s.same_step)
        rules = RestartRules(s.command_restarts, s.same_step)
        first, self.asked = self.saved, ""
        while True:
            attempt = Process(self).attempt(first)
            following = restarts.ended(attempt, self.asked)
            rules.ended(attempt, self.asked, following)
            if isinstance(following, Leave):
                self.gave_up = following.code == exit_codes.FAILED != attempt.code
                return following.code
            end = self.now + following.after_s
            while self.pending and self.pending[0].at < end:  # no process can be disturbed
                fault = self.pending.pop(0)
                if fault.kind == "supervisor" and fault.at >= self.now:
                    self.now, self.asked = fault.at, fault.name
                    code = restarts.code_when_asked(attempt, self.asked)
                    rules.ended(attempt, self.asked, Leave(code))
                    return code
            self.now = end

    def check_codes(self, codes: list[int]) -> None:
        s = self.schedule
        undisturbed = not s.faults and s.runtime_s is None and not s.crashes
        if undisturbed and codes != [0]:
            raise Broken(f"progress: exit codes {codes} without a fault")


class Process:
    """One attempt: the main thread, its workers, and the thread that watches signals."""

    def __init__(self, world: World) -> None:
        self.world, self.schedule = world, world.schedule
        self.machine = Machine()
        deadline = None
        if self.schedule.runtime_s is not None:
            deadline = world.now + self.schedule.runtime_s
        s = self.schedule
        self.policy = Policy(
            total_steps=s.total_steps,
            test_freq=s.test_freq,
            save_freq=s.save_freq,
            validates_first=s.validates_first,
            gives_up=s.gives_up,
            exports=s.exports,
            val_only=s.val_only,
            max_restarts=s.max_restarts,
            max_failed_saves=s.max_failed_saves,
            stop_grace_s=s.grace_s,
            max_runtime="1h" if deadline else None,
            deadline=deadline,
        )
        self.rules = Rules(world, self.policy)
        self.step = world.start
        self.late: list[str] = []  # signals that the main thread does not know of yet
        self.ticks = inf
        self.deaths = 0
        self.samples_fail = False  # whether one of the dead engines failed itself
        self.elsewhere = False  # whether another rank was asked to stop
        self.logged: int | None = None  # the last step in metrics.jsonl
        self.has_folder = self.wall_time_over = False
        self.error = self.error_type = ""

    # The shell

    def tell(self, event: str, *values: Any) -> Any:
        """As `Stop.tell` and `Run.obey`. event: name of a method of the machine."""
        self.world.events += 1
        if self.world.events > MAX_EVENTS:
            raise Broken("end: a wait, restart or repetition has no end")
        commands = getattr(self.machine, event)(self.world.now, *values)
        self.rules.look(event, values, commands)
        if self.machine.patience.waits and self.ticks == inf:
            self.ticks = self.world.now + TICK_S
        following = None
        for command in commands:
            match command:
                case Do.INTERRUPT:
                    raise Interrupted
                case Do.GIVE_UP:
                    raise StepAborted
                case c.EndProcess(code):
                    raise ProcessEnded(code)
                case c.WallTimeOver():
                    self.wall_time_over = True
                case c.Say() | c.Warn() | c.SayNow() | Do.END_ENGINES | Do.DECIDED:
                    pass
                case _:
                    following = command
        return following

    def take(self, seconds: float, polls: bool = False, engines: bool = False) -> None:
        """Let time pass in the main thread. polls: it waits for workers. engines: it stops to wait
        if an engine dies."""
        world = self.world
        end = world.now + seconds
        stride = max(1.0, seconds / 3)
        poll = world.now if polls else inf
        while True:
            fault = world.pending[0].at if world.pending else inf
            world.now = max(world.now, min(end, fault, self.ticks, poll))
            if world.now >= fault:
                self.happens(world.pending.pop(0))
                poll = min(poll, world.now) if polls else inf
                continue
            if world.now >= self.ticks:
                self.ticks = world.now + TICK_S
                self.tell("watched")
            if world.now >= poll:
                poll = world.now + stride
                self.tell("polled")
            if world.now >= end or (engines and self.deaths):
                break
        while self.late:
            self.tell("asked", self.late.pop(0))

    def happens(self, fault: Fault) -> None:
        name = fault.name
        if fault.kind == "kill":
            self.dies(name == "silent")
        if fault.kind == "error" and self.rules.where not in ("cleanup", "open"):
            raise Failed(exit_codes.LOST, "a worker was lost")
        if fault.kind == "engine":
            self.deaths += 1  # the next call of the engines notices it
            self.samples_fail = self.samples_fail or name == "samples"
        self.elsewhere = self.elsewhere or fault.kind == "elsewhere"
        if fault.kind == "supervisor":
            if name == "SIGHUP" and self.world.asked:
                return
            self.world.asked = name
            name = "SIGTERM" if name == "SIGHUP" else name
        elif fault.kind != "signal":
            return
        self.rules.signal(name)
        order = ["signal", "asked"]
        if fault.in_c:
            self.late.append(name)
            order.pop()
        elif self.world.draw.random() < 0.5:
            order.reverse()
        for event in order:
            self.tell(event, name)

    def dies(self, silently: bool = False) -> None:
        if silently and self.has_folder:
            raise ProcessEnded(exit_codes.FAILED, killed=True)
        raise ProcessEnded(137, "SIGKILL", killed=True)

    # The run

    def varied(self, seconds: float) -> float:
        return seconds * self.world.draw.uniform(1.0, self.schedule.varies)

    def call(self, seconds: float) -> None:
        """A call of all rollout engines. Raises EnginesGone after it if one died meanwhile."""
        self.take(self.varied(seconds), polls=True, engines=True)
        if self.deaths:
            count, self.deaths = self.deaths, 0
            raise EnginesGone(count)

    def restart(self, died: "EnginesGone") -> None:
        """As trainer.stages.weights."""
        while True:
            fails, self.samples_fail = self.samples_fail, False
            following = self.tell("engines_died", died.count, "engine", "killed", fails)
            self.raise_if_fails(following)
            try:
                with self.rules.phase("restart"):
                    self.call(self.schedule.sync_s)
                if self.world.is_in("broken"):
                    self.raise_if_fails(self.tell("restart_failed", "no device"))
                    raise Broken("engines: an engine that could not be started is used")
                break
            except EnginesGone as again:
                died = again
        self.tell("engines_restarted")

    def raise_if_fails(self, following: Any) -> None:
        if isinstance(following, c.Fail):
            code = exit_codes.LOST if following.may_pass else exit_codes.FAILED
            raise Failed(code, following.reason)

    def give_weights(self) -> None:
        while True:
            try:
                return self.call(self.schedule.sync_s)
            except EnginesGone as died:
                self.restart(died)

    def call_engines(self, seconds: float) -> None:
        while True:
            try:
                return self.call(seconds)
            except EnginesGone as died:
                self.restart(died)
                with self.rules.phase("resync"):
                    self.give_weights()
                self.tell("weights_given")

    def generate(self, seconds: float) -> None:
        """As trainer.outage."""
        s, world = self.schedule, self.world
        while True:
            self.call_engines(seconds)
            outage = None
            if world.is_in("outage"):
                outage = Outage("tools", "1 of 1 samples lost their tools (gone)", s.outage_wait_s)
            following = self.tell("answered", outage)
            while isinstance(following, c.CheckHealth):
                self.take(following.after_s)
                self.call_engines(s.health_s)
                following = self.tell("health", world.is_in("outage", but="flaky"))
            if following is not Do.RESAMPLE:
                return

    def steps(self) -> Iterator[int]:
        while isinstance(command := self.tell("step_wanted"), c.BeginStep):
            if self.elsewhere and not self.schedule.gives_up:
                self.tell("stopped_elsewhere")
                return
            self.step = command.step
            yield self.step

    def train(self) -> None:
        s, rules = self.schedule, self.rules
        if s.gives_up:
            with rules.phase("start"):
                self.give_weights()
                if self.tell("started") is Do.VALIDATE:
                    self.generate(s.test_s)
        for _ in self.steps():
            began = self.world.now
            with rules.phase("sample" if s.gives_up else "update"):
                if s.gives_up:
                    self.generate(s.sample_s)
                    self.take(self.varied(s.update_s / 2), polls=True)
                    self.tell("update_begins")
            with rules.phase("update"):
                self.take(self.varied(s.update_s), polls=s.gives_up)
                if self.world.crashes and self.step == s.crash_step:
                    self.world.crashes -= 1
                    self.dies()
                if s.gives_up:
                    self.tell("update_begins")
                    with suppress(StepAborted):
                        self.give_weights()
                self.tell("step_finished")
            self.finish(self.world.now - began)

    def finish(self, step_s: float) -> None:
        """As trainer.finish."""
        s, rules = self.schedule, self.rules
        with rules.phase("finish"):
            self.take(0.1, polls=s.gives_up)
            following = self.tell("step_measured")
        if following is Do.VALIDATE:
            began = self.world.now
            try:
                with rules.phase("validate" if s.gives_up else "update"):
                    if s.gives_up:
                        self.generate(s.test_s)
                    else:
                        self.take(self.varied(s.test_s))
            except StepAborted:
                pass
            step_s += 0.0 if s.gives_up else self.world.now - began
            following = self.tell("validated")
        save_s = 0.0
        if following is Do.SAVE:
            save_s = self.save()[1]
        with rules.phase("finish"):
            self.world.step_s = max(self.world.step_s, step_s)
            self.world.save_s = max(self.world.save_s, save_s)
            self.tell("step_ends", step_s, save_s)
            self.logged = self.step
            self.take(0.05)

    def save(self) -> tuple[Any, float]:
        """Write a checkpoint. Return what follows, and how long it took."""
        began = self.world.now
        with self.rules.phase("save"):
            self.take(self.varied(self.schedule.save_s), polls=self.schedule.gives_up)
            if self.world.is_in("full"):
                following = self.tell("save_failed", "full.")
                if isinstance(following, c.Fail):
                    raise Failed(1, following.reason or "full")
            else:
                self.world.saved = self.step
                following = self.tell("saved")
        return following, self.world.now - began

    def finalize(self) -> int:
        """As trainer.saving."""
        following = self.tell("loop_ends")
        if following is Do.SAVE:
            following = self.save()[0]
        if following is Do.EXPORT:
            with self.rules.phase("export"):
                self.take(self.varied(self.schedule.save_s))
            self.world.exported = True
            following = self.tell("exported")
        if not isinstance(following, c.Exit):
            raise Broken(f"end: {following} does not say how the run ends")
        return following.code

    def attempt(self, first: int) -> Attempt:
        """Run the process to its end. first: the newest checkpoint when the supervisor started."""
        code, signal = self.run()
        if self.error and self.machine.code is not None and not signal:
            code = self.machine.code  # that of error.json, also if native code ended the process
        saved = self.world.saved if self.world.saved > first else None
        return Attempt(
            code,
            "run" if self.has_folder else "",
            self.error,
            saved if self.logged is None else self.logged,
            saved,
            "the wall time is over" if self.wall_time_over else "",
            self.error_type,
            signal,
        )

    def run(self) -> tuple[int, str]:
        """Run the process to its end. Return its exit code and the signal that ended it."""
        world, rules = self.world, self.rules
        try:
            try:
                with rules.phase("open"):
                    self.take(self.varied(self.schedule.open_s))
                    self.has_folder = True
                    if world.is_in("missing"):
                        self.error_type = "ResourcesMissing"
                        raise Failed(exit_codes.REFUSED, "too few devices")
                    times = (world.step_s, world.save_s) if self.policy.deadline else (0.0, 0.0)
                    self.tell("begins", self.policy, world.start, world.saved, times)
                try:
                    self.train()
                except StepAborted:
                    self.step -= 1
                code = self.finalize()
                self.end(code)
            except Interrupted:
                self.end(None)
            except Failed as failure:
                self.error = str(failure) or "failed"
                self.end(failure.code)
                self.end(1)  # an error while cleaning up
            with rules.phase("cleanup"):
                while True:
                    try:
                        self.take(self.schedule.cleanup_s)
                        break
                    except Interrupted:
                        raise Broken("end: interrupted twice") from None
            code = self.machine.exit_code
        except ProcessEnded as ended:
            code = ended.code
            if ended.killed:
                return code, ended.signal
        rules.ended(code)
        return code, ""

    def end(self, code: int | None) -> None:
        self.tell("ended", code)


class EnginesGone(Exception):
    """Rollout engines died in a call."""

    def __init__(self, count: int) -> None:
        self.count = count


assert limits.WATCH_S <= TICK_S
