"""The control on a virtual clock, with simulated stages, engines, services, a disk and a command
that is started again, as `verlite supervise` does.

`Process` does what `trainer.run`, `trainer.finish`, `sft.run` and `controller.stop` do with a
command. What it knows itself (`tests.control.rules`) is written down without a look into the
machine, and compared after every event.
"""

import random
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from typing import Any

from tests.control.rules import Broken, Rules
from tests.control.schedule import Fault, Schedule
from verlite.control import events as e
from verlite.control import limits
from verlite.control.machine import Machine
from verlite.control.policy import Policy

TICK_S = 1.0
"""How often the watching thread looks. The real one does so every limits.WATCH_S."""
ATTEMPTS = 12
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
    """The process is gone. code: None after SIGKILL."""

    def __init__(self, code: int | None) -> None:
        self.code = code


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
        self.pending = [f for f in schedule.faults if f.kind not in ("full", "outage")]
        self.events = 0

    @property
    def start(self) -> int:
        """The step from which an attempt starts."""
        return self.saved or self.schedule.resumed

    def is_in(self, kind: str, but: str = "no name") -> bool:
        """Whether the disk is full, or a service down that has not this name."""
        faults = (f for f in self.schedule.faults if f.kind == kind and f.name != but)
        return any(f.at <= self.now < f.until for f in faults)

    def run(self) -> list[int | None]:
        """Start the command until it is done, or has failed. Return the exit codes.

        Raises Broken if a rule was broken.
        """
        codes: list[int | None] = []
        stuck = 0
        while len(codes) < ATTEMPTS:
            before = self.saved
            process = Process(self)
            code = process.run()
            codes.append(code)
            if code in (0, 1):
                self.check_codes(codes)
                return codes
            stuck = stuck + 1 if self.saved == before else 0
            if stuck == 3 and self.schedule.runtime_s is not None:
                return codes  # the wall time is too short for a step
            self.now += 1.0
        raise Broken("progress: it is neither done nor has it failed")

    def check_codes(self, codes: list[int | None]) -> None:
        undisturbed = not self.schedule.faults and self.schedule.runtime_s is None
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
            max_restarts=s.max_restarts,
            max_failed_saves=s.max_failed_saves,
            stop_grace_s=s.grace_s,
            max_runtime="1h" if deadline else None,
            deadline=deadline,
        )
        self.rules = Rules(world, self.policy)
        self.step = world.start
        self.late: list[str] = []  # signals that the main thread does not know of yet
        self.ticks = self.leave_at = inf
        self.deaths = 0

    # The shell

    def tell(self, event: e.Event) -> Any:
        """As `Stop.tell` and `Run.obey`."""
        self.world.events += 1
        if self.world.events > MAX_EVENTS:
            raise Broken("end: a wait, restart or repetition has no end")
        commands = self.machine.handle(event, self.world.now)
        self.rules.look(event, commands)
        if self.machine.patience.first is not None and self.ticks == inf:
            self.ticks = self.world.now + TICK_S
        following = None
        for command in commands:
            match command:
                case e.Interrupt():
                    raise Interrupted
                case e.GiveUp():
                    raise StepAborted
                case e.LeaveWithin(seconds):
                    self.leave_at = self.world.now + seconds
                case e.EndProcess(code):
                    raise ProcessEnded(code)
                case e.Say() | e.Warn() | e.WallTimeOver() | e.NotSaved() | e.SaveLimited():
                    pass
                case e.EndEngines():
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
            world.now = max(world.now, min(end, fault, self.ticks, poll, self.leave_at))
            if world.now >= self.leave_at:
                raise ProcessEnded(self.machine.exit_code)
            if world.now >= fault:
                self.happens(world.pending.pop(0))
                poll = min(poll, world.now) if polls else inf
                continue
            if world.now >= self.ticks:
                self.ticks = world.now + TICK_S
                self.tell(e.Watched())
            if world.now >= poll:
                poll = world.now + stride
                self.tell(e.Polled())
            if world.now >= end or (engines and self.deaths):
                break
        while self.late:
            self.tell(e.Asked(self.late.pop(0)))

    def happens(self, fault: Fault) -> None:
        if fault.kind == "kill":
            raise ProcessEnded(None)
        if fault.kind == "error" and self.rules.where not in ("cleanup", "open"):
            raise Failed(76, "a worker was lost")
        if fault.kind == "engine":
            self.deaths += 1  # the next call of the engines notices it
        if fault.kind != "signal":
            return
        self.rules.signal(fault.name)
        order = [e.Signal(fault.name), e.Asked(fault.name)]
        if fault.in_c:
            self.late.append(fault.name)
            order.pop()
        elif self.world.draw.random() < 0.5:
            order.reverse()
        for event in order:
            self.tell(event)

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
        """As trainer.recovery."""
        while True:
            following = self.tell(e.EnginesDied(died.count, "engine", "killed"))
            if isinstance(following, e.Fail):
                raise Failed(76, following.reason)
            try:
                with self.rules.phase("restart"):
                    self.call(self.schedule.sync_s)
                break
            except EnginesGone as again:
                died = again
        self.tell(e.EnginesRestarted())

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
                self.tell(e.WeightsGiven())

    def generate(self, seconds: float) -> None:
        """As trainer.outage."""
        s, world = self.schedule, self.world
        while True:
            self.call_engines(seconds)
            outage = None
            if world.is_in("outage"):
                outage = e.Outage("tools", "tools", 1, 1, "gone", s.outage_wait_s)
            following = self.tell(e.Answered(outage))
            while isinstance(following, e.CheckHealth):
                self.take(following.after_s)
                self.call_engines(s.health_s)
                following = self.tell(e.Health(world.is_in("outage", but="flaky")))
            if not isinstance(following, e.Resample):
                return

    def steps(self) -> Iterator[int]:
        while isinstance(command := self.tell(e.StepWanted()), e.BeginStep):
            self.step = command.step
            yield self.step

    def train(self) -> None:
        s, rules = self.schedule, self.rules
        if s.gives_up:
            with rules.phase("start"):
                self.give_weights()
                if self.tell(e.Started()) == e.Validate():
                    self.generate(s.test_s)
        for _ in self.steps():
            began = self.world.now
            with rules.phase("sample" if s.gives_up else "update"):
                if s.gives_up:
                    self.generate(s.sample_s)
                    self.take(self.varied(s.update_s / 2), polls=True)
                    self.tell(e.UpdateBegins())
            with rules.phase("update"):
                self.take(self.varied(s.update_s), polls=s.gives_up)
                if s.gives_up:
                    self.tell(e.UpdateBegins())
                    with suppress(StepAborted):
                        self.give_weights()
                self.tell(e.StepFinished())
            self.finish(self.world.now - began)

    def finish(self, step_s: float) -> None:
        """As trainer.finish."""
        s, rules = self.schedule, self.rules
        with rules.phase("finish"):
            self.take(0.1, polls=s.gives_up)
            following = self.tell(e.StepMeasured())
        if following == e.Validate():
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
            following = self.tell(e.Validated())
        save_s = 0.0
        if following == e.Save():
            save_s = self.save()[1]
        with rules.phase("finish"):
            self.world.step_s = max(self.world.step_s, step_s)
            self.world.save_s = max(self.world.save_s, save_s)
            self.tell(e.StepEnds(step_s, save_s))
            self.take(0.05)

    def save(self) -> tuple[Any, float]:
        """Write a checkpoint. Return what follows, and how long it took."""
        began = self.world.now
        with self.rules.phase("save"):
            self.take(self.varied(self.schedule.save_s), polls=self.schedule.gives_up)
            if self.world.is_in("full"):
                following = self.tell(e.SaveFailed("full."))
                if isinstance(following, e.Fail):
                    raise Failed(1, following.reason or "full")
            else:
                self.world.saved = self.step
                following = self.tell(e.Saved())
        return following, self.world.now - began

    def finalize(self) -> int:
        """As trainer.saving."""
        following = self.tell(e.LoopEnds())
        if following == e.Save():
            following = self.save()[0]
        if following == e.Export():
            with self.rules.phase("export"):
                self.take(self.varied(self.schedule.save_s))
            self.world.exported = True
            following = self.tell(e.Exported())
        if not isinstance(following, e.Exit):
            raise Broken(f"end: {following} does not say how the run ends")
        return following.code

    def run(self) -> int | None:
        """Run the process to its end. Return its exit code; None if it was killed."""
        world, rules = self.world, self.rules
        try:
            try:
                with rules.phase("open"):
                    self.take(self.varied(self.schedule.open_s))
                    times = (world.step_s, world.save_s) if self.policy.deadline else (0.0, 0.0)
                    self.tell(e.Begins(self.policy, world.start, world.saved, *times))
                try:
                    self.train()
                except StepAborted:
                    self.step -= 1
                code = self.finalize()
                self.end(code)
            except Interrupted:
                self.end(None)
            except Failed as failure:
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
            if ended.code is None:
                return None
            code = ended.code
        rules.ended(code)
        return code

    def end(self, code: int | None) -> None:
        self.tell(e.Ended(code))


class EnginesGone(Exception):
    """Rollout engines died in a call."""

    def __init__(self, count: int) -> None:
        self.count = count


assert limits.WATCH_S <= TICK_S
