"""Workers on a virtual clock, watched by the real `Supervisor`: who dies, hangs, is frozen or only
slow, and what is noticed when. Ray, processes and heartbeats are simulated.

What must hold, with the names of the rules as a broken one prints them:

accused    nobody is called dead, frozen or stuck who is not, and nothing is said of who works
noticed    a dead, frozen or hung worker that is needed is noticed within its limit
cause      the error names the first cause, not what followed from it
engines    dead engines do not end the run, and all others survive them
end        after the end no worker is left, and nothing waits without end
progress   without faults all calls are answered, and nothing is said
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.control.rules import Broken
from verlite.control import limits
from verlite.control.watch import Beat, Heard, Watch
from verlite.controller import failures, rank_watch, supervise, worker_handle
from verlite.controller.failures import FROZEN, STUCK, RankDied, StuckError, WorkerError
from verlite.controller.node import Diagnosis
from verlite.controller.records import Failed
from verlite.controller.worker_handle import WorkerHandle
from verlite.progress import Progress

POLL_S = 4.0
"""One turn of the simulated clock; the real supervisor polls every limits.POLL_S."""
KNOWN_S = 2.0
"""Until then the death of a process is known, or others have failed by it."""
# The times of docs/failures.md, on purpose not those of verlite.control.limits.
TIMEOUT_S, ENDED_S, TIMES, GRACE_S = 45.0, 180.0, 10.0, 3.0
CHECK_S = 6.0
"""How often heartbeats are looked at; really every limits.CHECK_EVERY_S."""
SLACK_S = 4 * POLL_S
MAX_TURNS = 20_000
PASSING = ("native", "pause", "slow", "tools", "lost", "suspend")
"""Faults that end."""


@dataclass(frozen=True)
class WatchFault:
    """What happens to one process, at `at` or from then until `until`.

    kind: die; freeze: it is stopped by SIGSTOP; hang; error: it raises an exception; native: native
    code holds Python's lock; pause: a slow disk; slow: it works, and others of its role wait for
    it; tools: it waits for something with a limit of its own; lost: its heartbeats are; suspend:
    the driver is stopped.
    """

    kind: str
    at: float
    until: float
    role: str
    rank: int


@dataclass(frozen=True)
class WatchSchedule:
    seed: int
    actors: int = 2
    engines: int = 2
    run_s: float = 1000.0
    """trainer.phase_timeout_s"""
    steps: int = 3
    work_s: float = 60.0
    turn_s: float = 5.0
    faults: tuple[WatchFault, ...] = field(default_factory=tuple)

    def smaller(self) -> Iterator["WatchSchedule"]:
        for number in range(len(self.faults)):
            yield replace(self, faults=self.faults[:number] + self.faults[number + 1 :])
        if self.steps > 1:
            yield replace(self, steps=self.steps - 1)


def watch_schedule(seed: int) -> WatchSchedule:
    draw = random.Random(seed)
    pick, uniform = draw.choice, draw.uniform
    one = WatchSchedule(
        seed,
        actors=pick((1, 2, 4)),
        engines=pick((1, 2, 3)),
        run_s=pick((300.0, 1000.0)),
        steps=pick((1, 2, 3)),
        work_s=uniform(5.0, 90.0),
        turn_s=uniform(0.5, 20.0),
    )
    found = []
    for _ in range(pick((0, 1, 1, 2, 2, 3))):
        at = uniform(0.0, one.steps * one.work_s * 2.5)
        role = pick(("actor", "rollout", "rollout"))
        rank = draw.randrange(one.actors if role == "actor" else one.engines)
        kind = pick(("die", "die", "freeze", "hang", "error", *PASSING))
        longest = 900.0 if kind in ("slow", "tools") else 170.0
        until = at + (uniform(10.0, longest) if kind in PASSING else 1e9)
        found.append(WatchFault(kind, at, until, role, rank))
        if kind in ("die", "freeze") and draw.random() < 0.4:  # another one at the same time
            kind, other = pick(("die", "freeze")), draw.randrange(one.engines)
            found.append(WatchFault(kind, at + pick((0.0, 1.0)), 1e9, "rollout", other))
    return replace(one, faults=tuple(sorted(found, key=lambda fault: fault.at)))


class Lost(Exception):
    """Ray's error about a worker that does not answer."""


class Process:
    """One worker's process."""

    def __init__(self, world: "WatchWorld", role: str, rank: int, number: int) -> None:
        self.world, self.role, self.rank = world, role, rank
        self.name = f"{role}/{rank}/{number}"
        self.since = world.now
        self.died = 1e9
        """When it ended."""
        self.work: Work | None = None
        self.calls = self.beats = 0
        self.done_s = 0.0
        """Seconds of the work of its call that are done."""
        self.moved = world.now
        """The receiver's time when it last made progress that shows."""
        self.process_info = SimpleNamespace(remote=lambda: Answer(self, None))
        self.handle = WorkerHandle(self, role, rank, "node", "here", "log", None, self.name)

    def has(self, *kinds: str) -> bool:
        now = self.world.now
        return any(f.kind in kinds and f.at <= now < f.until for f in self.faults())

    def faults(self) -> list[WatchFault]:
        """What happens to this process. A fault of an earlier process of its rank is over."""
        return [
            fault
            for fault in self.world.schedule.faults
            if (fault.role, fault.rank) == (self.role, self.rank) and fault.at >= self.since
        ]

    @property
    def is_dead(self) -> bool:
        return self.world.now >= self.died

    @property
    def is_blocked(self) -> bool:
        return self.is_dead or self.has("freeze", "hang", "native", "pause", "slow", "tools")

    @property
    def state(self) -> str:
        if self.is_dead:
            return "gone"
        return "stopped by a signal" if self.has("freeze") else "sleeping"


@dataclass(eq=False)
class Work:
    """What processes do in a call. joint: they wait for each other."""

    method: str
    seconds: float
    joint: bool
    answers: list["Answer"] = field(default_factory=list)


@dataclass(eq=False)
class Answer:
    """Ray's reference to the answer of one process. `ready`: when it is there."""

    process: Process
    work: Work | None
    value: Any = None
    ready: float = 1e9

    @property
    def is_ready(self) -> bool:
        """A process that is asked for its information answers at once unless it is dead."""
        now = self.process.world.now
        return now >= self.ready or (self.work is None and not self.process.has("freeze"))


class WatchWorld:
    """The clock, the processes, Ray and the driver."""

    def __init__(self, schedule: WatchSchedule) -> None:
        self.schedule = schedule
        self.draw = random.Random(schedule.seed + 1)
        self.now, self.turns, self.events = 1000.0, 0, 0
        # Faults are drawn from the start of the run on.
        faults = (replace(f, at=f.at + self.now, until=f.until + self.now) for f in schedule.faults)
        self.schedule = replace(schedule, faults=tuple(faults))
        self.said: list[str] = []
        self.longest: dict[tuple[str, str], float] = {}
        """The longest pause in each method's earlier calls."""
        self.supervisor = supervise.Supervisor(schedule.run_s)
        self.supervisor.ranks = Watch(TIMEOUT_S)
        self.heard = self.supervisor.ranks.heard
        self.supervisor.warn = self.warn
        self.supervisor.restartable = {"rollout"}
        self.number = 0
        self.groups = {
            "actor": [self.start("actor", rank) for rank in range(schedule.actors)],
            "rollout": [self.start("rollout", rank) for rank in range(schedule.engines)],
        }

    def start(self, role: str, rank: int) -> Process:
        self.number += 1
        process = Process(self, role, rank, self.number)
        self.supervisor.workers.append(process.handle)
        self.heard[process.name] = Heard(Beat(0, Progress()), self.clock, self.clock)
        return process

    @property
    def clock(self) -> float:
        return self.supervisor.ranks.clock

    @property
    def processes(self) -> list[Process]:
        return [*self.groups["actor"], *self.groups["rollout"]]

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            raise Broken(f"{text} (at {self.now - 1000.0:.1f} s)")

    # Time

    def advance(self, until: float) -> None:
        """Let time pass until then, or until the next thing happens."""
        faults = self.schedule.faults
        times = [t for fault in faults for t in (fault.at, fault.until) if t > self.now]
        works = {p.work for p in self.processes if p.work is not None}
        for work in works:
            for answer in self.moving(work):
                times.append(self.now + work.seconds - answer.process.done_s)
            times += [a.ready for a in work.answers if a.ready > self.now]
        end = max(self.now, min([until, *times]))
        passed = end - self.now
        for work in works:
            for answer in self.moving(work):
                before = answer.process.done_s // self.schedule.turn_s
                answer.process.done_s += passed
                if answer.process.done_s // self.schedule.turn_s != before:
                    answer.process.moved = self.clock + passed
        before, self.now = self.now, end
        self.supervisor.ranks.clock += passed
        for fault in faults:  # also those that happen while the driver is suspended
            if before < fault.at <= self.now:
                self.happens(fault)
        for work in works:
            for answer in self.moving(work):
                if answer.process.done_s >= work.seconds - 1e-9:
                    self.answer(answer, "done")

    def moving(self, work: Work) -> list[Answer]:
        """The answers whose processes make progress."""
        able = [a for a in work.answers if a.ready > 1e8 and not a.process.is_blocked]
        return able if not work.joint or len(able) == len(work.answers) else []

    def happens(self, fault: WatchFault) -> None:
        process = self.groups[fault.role][fault.rank]
        if process.since > fault.at or process.is_dead:
            return
        if fault.kind == "die":
            self.dies(process)
        if fault.kind == "suspend":
            self.now += min(fault.until - fault.at, 60.0)  # the receiver's clock stands still
        if fault.kind == "error" and process.work is not None:
            self.lose(process, Failed("ValueError", "a bug", "", self.now))

    def dies(self, process: Process) -> None:
        process.died = self.now
        self.lose(process)

    def lose(self, process: Process, value: Any = None) -> None:
        """The answer of a process is lost, and those that wait for it. Which is known first, is
        chance."""
        work = process.work
        for answer in work.answers if work else []:
            if answer.ready <= 1e8:
                continue
            if answer.process is process:
                self.answer(answer, value or Lost("it has died"), self.draw.uniform(0.0, KNOWN_S))
            elif work.joint:
                self.answer(
                    answer, self.consequence(answer.process), self.draw.uniform(0.0, KNOWN_S)
                )

    def consequence(self, process: Process) -> Failed:
        kind, text = "RuntimeError", "Connection closed by peer"
        if process.work is not None and process.work.method != "update":
            kind, text = "TransportError", "the other end is gone"
            if process.role == "rollout":
                kind, text = "WeightSyncError", f"sync failed: {kind}: {text}"
        return Failed(kind, text, "", self.now)

    def answer(self, answer: Answer, value: Any, after_s: float = 0.0) -> None:
        answer.value, answer.ready = value, self.now + after_s
        answer.process.calls += 1

    def beat(self) -> None:
        """Each process sends a heartbeat."""
        for process in self.processes:
            if process.is_dead or process.has("freeze", "native", "lost"):
                last = self.heard[process.name].beat  # as a datagram that comes late, or twice
                self.heard[process.name].hear(replace(last), self.clock)
                continue
            process.beats += 1
            work = process.work
            is_slow = work is not None and process.has("slow")
            if is_slow:
                process.moved = self.clock
            here = Progress(
                work.method if work else "",
                process.calls,
                int(process.done_s // self.schedule.turn_s) + (process.beats if is_slow else 0),
                requests=1 if work and work.method == "generate" else None,
                waits_for="tools" if process.has("tools") else "",
                in_group=bool(work and work.method == "update"),
            )
            self.heard[process.name].hear(Beat(process.beats, here), self.clock)

    # Ray

    def wait(self, refs: list[Answer], num_returns: int, timeout: float) -> Any:
        self.turns += 1
        self.check(self.turns < MAX_TURNS, "end: it waits without end")
        end = self.now + timeout
        while True:
            for ref in refs:  # a call of a process that is dead already
                if ref.work is not None and ref.process.is_dead and ref.ready > 1e8:
                    self.lose(ref.process)
            ready = [ref for ref in refs if ref.is_ready][:num_returns]
            if len(ready) == num_returns or self.now >= end:
                break
            self.advance(end)
        self.beat()
        self.look()
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Answer) -> Any:
        self.events += 1
        if ref.work is None:
            if ref.process.is_dead:
                raise Lost("it has died")
            return None
        if ref.process.work is ref.work:
            ref.process.work = None
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def kill(self, process: Process, no_restart: bool) -> None:
        if not process.is_dead:
            self.dies(process)

    def collect(self, workers: Any, outstanding: Any) -> dict[str, Any]:
        """Processes that can answer a signal write their stacks."""
        states = [worker.actor.state for worker in workers]
        found = [{"stacks": "a stack" if s == "sleeping" else "", "state": s} for s in states]
        return {"workers": found}

    def diagnose(self, workers: Any) -> list[Diagnosis]:
        return [Diagnosis("", worker.actor.state, 0) for worker in workers]

    # What must hold

    def warn(self, text: str) -> None:
        self.said.append(text)
        if "no progress of" not in text:
            return
        role, method = text.partition(":")[0].split(".")
        group = [process for process in self.groups[role] if process.work]
        if method != "update":
            named = text.partition("no progress of rank")[2].partition(" for ")[0]
            group = [process for process in group if str(process.rank) in numbers(named)]
        self.check(len(group) > 0, f"accused: nobody has a call: {text}")
        stalled_s = min(self.clock - process.moved for process in group)
        self.check(stalled_s > TIMEOUT_S - SLACK_S, f"accused: one that works is named: {text}")
        waits = any(one.has("tools") and one.state == "sleeping" for one in group)
        self.check(not waits, f"accused: one that waits for tools is named: {text}")

    def limit_s(self, process: Process) -> tuple[float, float]:
        """The least and the most seconds without progress after which its call is ended."""
        assert process.work is not None
        run_s = self.schedule.run_s
        longest = self.longest.get((process.role, process.work.method))
        if process.work.method == "fetch_weights" or longest is None:
            return run_s, run_s
        return min(run_s, ENDED_S), min(run_s, max(ENDED_S, TIMES * (longest + SLACK_S)))

    def look(self) -> None:
        """Whether all that should be noticed was noticed in time."""
        if self.supervisor.failure is not None:
            return
        for future in self.supervisor.outstanding:
            for worker in future.pending.values():
                process = worker.actor
                broken = [f for f in process.faults() if f.kind in ("freeze", "hang", "die")]
                if not process.work or not broken or broken[0].at > self.now:
                    continue
                # A silence, or a wait for tools, ends with another position than the last.
                others = [answer.process for answer in process.work.answers]
                seen = [f for one in others for f in one.faults() if f.kind in PASSING]
                moved = [
                    min(t, self.now) for f in seen for t in (f.at, f.until) if f.at <= self.now
                ]
                began = max([broken[0].at, future.started, *moved])
                limit_s = TIMEOUT_S if broken[0].kind == "freeze" else KNOWN_S + GRACE_S
                if broken[0].kind == "hang":
                    waits = any(p.has("tools", "freeze") for p in others)
                    limit_s = self.schedule.run_s if waits else self.limit_s(process)[1]
                lost_s = sum(min(f.until - f.at, 60.0) for f in self.schedule.faults
                             if f.kind == "suspend")  # fmt: skip
                late = self.now - began - lost_s > limit_s + SLACK_S
                self.check(not late, f"noticed: {process.name}, {broken[0].kind}, is not")

    def is_at_fault(self, process: Process) -> bool:
        """Whether a process may be called dead, frozen or stuck."""
        if process.is_dead or process.has("freeze", "hang"):
            return True
        least = self.limit_s(process)[0] if process.work else 1e9
        waits = process.has("tools") and self.clock - process.moved < self.schedule.run_s - SLACK_S
        return self.clock - process.moved > least - SLACK_S and not waits

    # The driver

    def send(self, seconds: float, joint: bool, *calls: tuple[str, str]) -> list[Any]:
        """Send calls, given as (role, method), which do one work if they are joint."""
        futures = []
        work = Work(calls[0][1], seconds, joint)
        for role, method in calls:

            def send(
                rank: int, role: str = role, method: str = method, work: Work = work
            ) -> tuple[Answer, WorkerHandle]:
                process = self.groups[role][rank]
                one = work if joint else Work(method, seconds, False)
                answer = Answer(process, one)
                one.answers = [a for a in one.answers if a.process.rank != rank or
                               a.process.role != role] + [answer]  # fmt: skip
                process.work, process.done_s, process.moved = one, 0.0, self.clock
                process.calls += 1
                if process.has("error"):
                    self.lose(process, Failed("ValueError", "a bug", "", self.now))
                return answer, process.handle

            pending = dict(send(rank) for rank in range(len(self.groups[role])))
            sent = {handle.rank: handle for handle in pending.values()}
            future = supervise.Future(
                self.supervisor, role, method, pending, list, send, sent, started=self.now
            )
            futures.append(self.supervisor.watch(future))
        return futures

    def step(self) -> None:
        s = self.schedule
        for seconds, joint, calls in (
            (s.work_s, False, [("rollout", "generate")]),
            (s.work_s, True, [("actor", "update")]),
            (5.0, True, [("actor", "publish"), ("rollout", "fetch_weights")]),
        ):
            futures = self.send(seconds * self.draw.uniform(0.8, 1.2), joint, *calls)
            while True:
                try:
                    for future in futures:
                        future.result()
                    break
                except RankDied as died:
                    self.restart(died)
                    if len(futures) > 1:
                        futures = self.send(seconds, joint, *calls)
                    else:
                        died.call.send_missing()
            for future in futures:
                key = (future.role, future.method)
                self.longest[key] = max(self.longest.get(key, 0.0), future.pause_s)

    def restart(self, died: RankDied) -> None:
        """As trainer.stages.weights."""
        self.events += 1
        before = [p for p in self.processes if not p.is_dead]
        for worker in died.workers:
            self.check(self.is_at_fault(worker.actor), f"accused: {worker.name} works")
        dead = [worker.actor for worker in self.supervisor.settle(died.workers)]
        for worker in died.call.sent.values():
            is_known = worker.actor in dead or worker.rank in died.call.values
            self.check(is_known or not worker.actor.is_dead, f"noticed: {worker.name} died, too")
        for process in before:
            if process not in dead:
                by_fault = any(f.kind == "die" and f.at <= self.now for f in process.faults())
                self.check(not process.is_dead or by_fault, "engines: another worker is killed")
        self.check(not self.supervisor.outstanding, "end: a call is left")
        self.supervisor.ranks.restarted("rollout")
        for key in [key for key in self.longest if key[0] == "rollout"]:
            del self.longest[key]
        for process in dead:
            self.check(process.role == "rollout", "cause: a death that ends the run does not")
            self.groups["rollout"][process.rank] = self.start("rollout", process.rank)

    def run(self) -> str:
        """Run all steps. Return what ended them; "" if nothing did."""
        with patched(self):
            try:
                for _ in range(self.schedule.steps):
                    self.step()
            except (WorkerError, StuckError) as error:
                self.ended(error)
                return str(error)
        if not self.schedule.faults:
            self.check(not self.said, f"progress: something is said without a fault: {self.said}")
        return ""

    def ended(self, error: WorkerError | StuckError) -> None:
        only_engines = all(f.role == "rollout" and f.kind in ("die", "freeze", "suspend")
                           for f in self.schedule.faults)  # fmt: skip
        self.check(not only_engines, f"engines: the run ends by {error}")
        if isinstance(error, WorkerError):
            self.check(error.exception_type in (None, "ValueError"), f"cause: {error}")
            needed = {FROZEN: ("freeze", "die"), "exception": ("error",)}.get(error.kind, ("die",))
            who = (error.role, error.rank)
            happened = [f for f in self.schedule.faults if f.at <= self.now]
            blamed = {f.kind for f in happened if (f.role, f.rank) == who}
            named = error.kind == STUCK or blamed.intersection(needed)
            self.check(bool(named), f"cause: {error}")
        elif error.method == "generate":
            waits = any(f.kind == "tools" for f in self.schedule.faults)
            self.check(waits, f"engines: one that hangs ends the run: {error}")
        alive = [p.name for p in self.processes if not p.is_dead]
        self.check(not alive, f"end: {alive} are left")


def numbers(text: str) -> list[str]:
    """Return the numbers of "s 0-2, 5"."""
    found: list[str] = []
    for part in text.lstrip("s ").split(", "):
        first, _, last = part.partition("-")
        found += [str(number) for number in range(int(first), int(last or first) + 1)]
    return found


@contextmanager
def patched(world: WatchWorld) -> Iterator[None]:
    """Put the world in place of Ray, the clock and the processes."""
    none = type("Never", (Exception,), {})
    errors = SimpleNamespace(RayError=Lost, RayTaskError=none, OutOfMemoryError=none)
    ray = SimpleNamespace(wait=world.wait, get=world.get, kill=world.kill, exceptions=errors)
    time = SimpleNamespace(monotonic=lambda: world.now, time=lambda: world.now)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", ray)
        patch.setattr(limits, "POLL_S", POLL_S)
        patch.setattr(limits, "CHECK_EVERY_S", CHECK_S)
        for module in (supervise, rank_watch, failures):
            patch.setattr(module, "time", time)
        for module in (supervise, rank_watch):
            patch.setattr(module, "collect", world.collect)
            patch.setattr(module, "diagnose", world.diagnose)
        patch.setattr(rank_watch, "write_stacks", lambda workers, dump: "stacks.txt")
        patch.setattr(supervise, "kill_processes", lambda workers: None)
        for module in (supervise, worker_handle):
            patch.setattr(module, "process_infos", lambda workers: [None] * len(workers))
        yield
