"""Asynchronous training on a virtual clock, with simulated engines, a trainer, checkpoints and a
command that is started again.

`Process` does what `trainer.ppo` does with trainer.mode=async: it reports to the flow what happened
and does what the flow decides. What it knows itself (`tests.control.flow_rules`) is compared after
every event.
"""

import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from tests.control.flow_rules import FlowRules
from tests.control.flow_schedule import FlowSchedule
from tests.control.rules import Broken
from tests.control.schedule import Fault
from verlite.control.flow import Flow

MAX_EVENTS = 20_000
ATTEMPTS = 12


class Killed(Exception):
    """The process is gone."""


@dataclass(frozen=True)
class Facts:
    """Properties of a group, which are the same whichever engine samples it."""

    seconds: float
    """To sample it, which its length is proportional to."""
    teaches: bool


@dataclass(frozen=True)
class Sample:
    """The samples of a finished group. oldest: the oldest version of its tokens, in truth."""

    oldest: int


@dataclass(frozen=True)
class Begun:
    """What a running group has so far: the oldest version of its tokens, and the seconds that they
    took."""

    oldest: int
    seconds: float


class Engine:
    """A process that samples groups."""

    def __init__(self, number: int, version: int = 0) -> None:
        self.number, self.version = number, version
        self.alive = True
        self.queue: deque[tuple[int, Begun | None]] = deque()
        self.running = 0
        self.begun: dict[int, tuple[float, Begun]] = {}
        """Of each running group: when it started here, and what it had then."""


class FlowWorld:
    """What outlives a process: the clock, the checkpoint, and what is still to go wrong."""

    def __init__(self, schedule: FlowSchedule) -> None:
        self.schedule = schedule
        self.draw = random.Random(schedule.seed + 1)
        self.now = 0.0
        self.events = 0
        self.faults = list(schedule.faults)
        self.saved: tuple[str, dict[int, Sample], dict[int, Begun]] | None = None
        self.known: dict[int, Facts] = {}
        self.engines = schedule.engines
        self.rules = FlowRules(self, schedule)

    def facts(self, number: int) -> Facts:
        if number not in self.known:
            s = self.schedule
            draw = random.Random(s.seed * 1_000_003 + number)
            one = draw.lognormvariate(0.0, s.sigma) if s.sigma else draw.paretovariate(1.0)
            seconds = s.median_s * (50.0 if number == s.slow else min(one, 200.0))
            self.known[number] = Facts(seconds, draw.random() >= s.filtered)
        return self.known[number]

    def run(self) -> None:
        """Start the command until all steps are done. Raises Broken if a rule was broken."""
        for _ in range(ATTEMPTS):
            try:
                if Process(self).run():
                    return self.rules.ended()
            except Killed:
                pass
            self.engines = self.schedule.engines_later
            self.now += 1.0
        raise Broken("progress: the run does not end")


class Process:
    """One attempt: the driver, and its engines."""

    def __init__(self, world: FlowWorld) -> None:
        self.world, self.schedule, self.rules = world, world.schedule, world.rules
        s = world.schedule
        self.flow = Flow(s.groups_per_step, s.bound, s.depth, world.engines, s.swaps, s.total_steps)
        self.data: dict[int, Sample] = {}
        self.begun: dict[int, Begun] = {}
        """Groups of a process before that go on."""
        if world.saved is not None:
            text, self.data, self.begun = world.saved[0], dict(world.saved[1]), world.saved[2]
            oldest = {number: one.oldest for number, one in self.begun.items()}
            self.flow.load_state_dict(json.loads(text), self.data, oldest)
            alive = self.flow.groups.items()
            self.begun = {n: self.begun[n] for n, g in alive if n in oldest and g.oldest}
        self.rules.resumed(set(self.data), {n: one.oldest for n, one in self.begun.items()})
        self.engines = {number: Engine(number) for number in range(world.engines)}
        self.saved_step = self.flow.step
        self.started_again: list[int] = []
        """Engines that wait for their weights."""
        self.busy = self.stops = self.done = False
        self.coming: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        for fault in world.faults:
            self.after(fault.at - world.now, self.happens, fault)

    def after(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        self.count += 1
        at = self.world.now + max(0.0, seconds)
        heappush(self.coming, (at, self.count, what, arguments))

    def upto(self, seconds: float) -> float:
        return self.world.draw.uniform(0.0, seconds)

    def run(self) -> bool:
        """Run to the end. Returns whether all steps are done."""
        world = self.world
        self.decide()
        while not self.done:
            world.events += 1
            if world.events > MAX_EVENTS:
                raise Broken("progress: something has no end")
            if not self.coming:
                raise Broken(f"progress: nothing happens any more in step {self.flow.step + 1}")
            world.now, _, what, arguments = heappop(self.coming)
            what(*arguments)
            self.rules.look(self.flow.counts())
            self.decide()
        return self.flow.step >= self.schedule.total_steps

    # The driver

    def decide(self) -> None:
        """Begin what comes next."""
        s, flow = self.schedule, self.flow
        if self.busy:
            return self.feed() if s.feeds else None
        for number in self.started_again:
            self.engines[number] = Engine(number, flow.step + 1)
            flow.engine_back(number)
            self.rules.up.add(number)
        self.started_again.clear()
        is_last = flow.step >= s.total_steps
        if (self.stops or is_last) and flow.step > self.saved_step:
            return self.save()
        if self.stops or is_last:
            self.done = True
            return None
        if flow.step > self.saved_step and flow.step % s.save_freq == 0:
            return self.save()
        is_due = flow.version <= flow.step
        may = flow.may_publish()
        self.rules.may_publish(may)
        if is_due and may:
            return self.publish()
        self.feed()
        if not is_due or s.overlaps:
            numbers = flow.choose()
            self.rules.chosen(numbers)
            if numbers is not None:
                self.train(numbers)
        return None

    def begin(self, seconds: float, then: Callable[..., None], *arguments: Any) -> None:
        self.busy = True
        self.after(seconds, self.end, then, arguments)

    def end(self, then: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.busy = False
        then(*arguments)

    def feed(self) -> None:
        flow = self.flow
        wanted = flow.wanted()
        self.rules.drawn(wanted, flow.draw(wanted))
        found = flow.assign()
        self.rules.assigned(found)
        for number, groups in found.items():
            engine = self.engines[number]
            engine.queue.extend((group, self.begun.pop(group, None)) for group in groups)
            self.work(engine)

    def publish(self) -> None:
        for engine in self.engines.values():
            self.after(self.upto(self.schedule.sync_s), self.swap, engine, self.flow.step + 1)
        self.begin(self.schedule.sync_s, self.published)

    def swap(self, engine: Engine, version: int) -> None:
        if engine.alive:
            self.rules.swapped(engine.number, engine.running)
            engine.version = version

    def published(self) -> None:
        """All engines have answered; those that have not are given up."""
        for engine in self.engines.values():
            if not engine.alive:
                self.give_up(engine)
        self.flow.published()
        self.rules.published(self.flow.version)

    def train(self, numbers: list[int]) -> None:
        self.rules.ages({number: self.flow.groups[number].oldest for number in numbers})
        self.begin(self.schedule.update_s, self.trained, numbers)

    def trained(self, numbers: list[int]) -> None:
        self.rules.trained(numbers, [self.data.get(number) for number in numbers])
        self.flow.trained(numbers)
        for number in numbers:
            self.data.pop(number, None)

    def save(self) -> None:
        data = dict(self.data) if self.schedule.saves_ready else {}
        begun = self.running() if self.schedule.saves_running else {}
        saved = json.dumps(self.flow.state_dict()), data, begun
        self.begin(self.schedule.save_s, self.written, saved, self.rules.snapshot(), self.flow.step)

    def running(self) -> dict[int, Begun]:
        """What running groups have so far, and those that wait to go on."""
        found = dict(self.begun)
        for engine in self.engines.values():
            if engine.alive:
                found |= {number: one for number, one in engine.queue if one}
                for number, (since, one) in engine.begun.items():
                    found[number] = Begun(one.oldest, one.seconds + self.world.now - since)
        return found

    def written(
        self, saved: tuple[str, dict[int, Sample], dict[int, Begun]], snapshot: Any, step: int
    ) -> None:
        self.world.saved, self.rules.saved, self.saved_step = saved, snapshot, step

    # The engines

    def work(self, engine: Engine) -> None:
        """Start what has a slot."""
        while engine.alive and engine.queue and engine.running < self.schedule.slots:
            number, begun = engine.queue.popleft()
            self.rules.check(engine.version > 0, "weights: an engine samples without any")
            engine.running += 1
            one = begun or Begun(engine.version, 0.0)
            engine.begun[number] = self.world.now, one
            seconds = self.world.facts(number).seconds - one.seconds
            self.after(seconds, self.sampled, engine, number, one.oldest)

    def sampled(self, engine: Engine, number: int, oldest: int) -> None:
        if not engine.alive:
            return
        engine.running -= 1
        engine.begun.pop(number, None)
        for _ in range(1 + (self.world.draw.random() < self.schedule.doubled)):
            self.after(self.upto(self.schedule.delay_s), self.answer, engine, number, oldest)
        self.work(engine)

    def answer(self, engine: Engine, number: int, oldest: int) -> None:
        flow, rules = self.flow, self.rules
        if not self.is_up(engine):
            return  # its calls have ended with it
        reported = oldest if self.schedule.reports_oldest else None
        kept = flow.finished(number, reported)
        rules.answered(number, engine.number, reported, kept)
        if kept and not self.world.facts(number).teaches:
            rules.filtered(number, flow.filtered(number, "equal scores"))
        elif kept:
            self.data[number] = Sample(oldest)

    # Faults

    def happens(self, fault: Fault) -> None:
        self.world.faults.remove(fault)
        if fault.kind == "kill":
            raise Killed
        if fault.kind == "stop":
            self.stops = True
            return
        engine = self.engines[int(fault.name) % len(self.engines)]
        if not engine.alive:
            return
        engine.alive = False
        self.after(self.schedule.detect_s, self.give_up, engine)

    def is_up(self, engine: Engine) -> bool:
        """Whether it has not been given up."""
        return engine.number in self.rules.up and self.engines[engine.number] is engine

    def give_up(self, engine: Engine) -> None:
        """An engine is noticed to be dead. Another is started in its place."""
        if not self.is_up(engine):
            return
        self.rules.lost(engine.number, self.flow.engine_lost(engine.number))
        self.after(self.schedule.restart_s, self.started_again.append, engine.number)
