"""A schedule: what a run wants, how long its stages take, and what goes wrong when. One seed is one
schedule, and a schedule without some of its faults is one, too."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

SIGNALS = ("SIGTERM", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at `at`, in seconds since the first start of the command."""

    kind: str
    """signal; kill; error: a worker is lost; engine: a rollout engine dies; full: the disk is full;
    outage: a service is down; supervisor: a signal to `verlite supervise`; elsewhere: another rank
    of SFT or DPO is asked to stop; broken: no engine can be started; missing: the cluster is away.
    """
    at: float
    until: float = 0.0
    """full, outage, broken, missing: the end."""
    name: str = ""
    """signal, supervisor: its name. outage: "flaky" if health checks pass. engine: "samples" if the
    samples may be the reason. kill: "silent" if native code ends the process with 1."""
    in_c: bool = False
    """signal: the main thread runs C code, and learns of it when its stage has ended."""


@dataclass(frozen=True)
class Schedule:
    seed: int
    gives_up: bool = True
    """False: SFT or DPO."""
    total_steps: int = 3
    resumed: int = 0
    """Steps of another run's checkpoint from which the first attempt starts."""
    test_freq: int = 0
    save_freq: int = 1
    validates_first: bool = False
    exports: bool = True
    max_restarts: int = 2
    max_failed_saves: int = 2
    grace_s: float = 30.0
    runtime_s: float | None = None
    """Wall time of each attempt."""
    outage_wait_s: float = 60.0
    open_s: float = 5.0
    sample_s: float = 20.0
    update_s: float = 10.0
    sync_s: float = 2.0
    test_s: float = 10.0
    save_s: float = 4.0
    cleanup_s: float = 3.0
    health_s: float = 0.0
    val_only: bool = False
    command_restarts: int = 10
    """--max-restarts of `verlite supervise`."""
    same_step: int = 3
    """--same-step."""
    crash_step: int = 0
    """The step whose update crashes the process, `crashes` times."""
    crashes: int = 0
    varies: float = 1.0
    """A stage takes up to this many times its seconds."""
    faults: tuple[Fault, ...] = field(default_factory=tuple)

    def smaller(self) -> Iterator["Schedule"]:
        """Schedules with one fault or one complication less."""
        for number in range(len(self.faults)):
            yield replace(self, faults=self.faults[:number] + self.faults[number + 1 :])
        if self.resumed:
            yield replace(self, resumed=0)
        if self.total_steps > self.resumed + 1:
            yield replace(self, total_steps=self.total_steps - 1)
        if self.runtime_s is not None:
            yield replace(self, runtime_s=None)
        if self.crashes:
            yield replace(self, crashes=self.crashes - 1)
        for name in ("test_freq", "validates_first", "exports", "val_only"):
            if getattr(self, name):
                yield replace(self, **{name: 0})


def schedule(seed: int) -> Schedule:
    """Draw a schedule."""
    draw = random.Random(seed)
    pick, uniform = draw.choice, draw.uniform
    steps = pick((1, 2, 3, 3, 5))
    settings = Schedule(
        seed,
        gives_up=draw.random() < 0.75,
        total_steps=steps,
        test_freq=pick((0, 0, 1, 2, 3)),
        save_freq=pick((0, 1, 2, 3, 50)),
        validates_first=draw.random() < 0.3,
        exports=draw.random() < 0.8,
        max_restarts=pick((0, 1, 3)),
        max_failed_saves=pick((1, 2, 3)),
        grace_s=pick((1.0, 30.0)),
        runtime_s=pick((None, None, None, 60.0, 150.0, 300.0)),
        outage_wait_s=pick((0.1, 7.0, 60.0)) * uniform(0.9, 1.1),
        open_s=uniform(0.1, 9.0),
        sample_s=uniform(0.1, 40.0),
        update_s=uniform(0.1, 20.0),
        sync_s=uniform(0.1, 3.0),
        test_s=uniform(0.1, 30.0),
        save_s=pick((uniform(0.1, 5.0), uniform(20.0, 70.0))),
        cleanup_s=pick((0.5, 5.0, 15.0, 1000.0)),
        health_s=pick((0.0, 0.0, 0.01)),
        varies=pick((1.0, 1.3)),
    )
    length = steps * (settings.sample_s + settings.update_s + settings.save_s) * 1.3 + 10.0
    found: list[Fault] = []
    for _ in range(pick((0, 1, 1, 2, 3, 4))):
        at = uniform(0.0, length)
        kind = pick(("signal", "signal", "signal", "engine", "engine", "full", "outage", "error"))
        if draw.random() < 0.04:
            kind = "kill"
        if kind == "signal":
            found.append(Fault(kind, at, name=pick(SIGNALS), in_c=draw.random() < 0.2))
            while draw.random() < 0.35:  # another one, often soon
                at += pick((0.05, 0.5, 1.5, uniform(0.0, 40.0)))
                found.append(Fault("signal", at, name=pick(SIGNALS)))
        elif kind in ("full", "outage"):
            flaky = "flaky" if kind == "outage" and draw.random() < 0.3 else ""
            length_s = pick((3.0, 20.0, 200.0)) * uniform(0.5, 1.0)
            found.append(Fault(kind, at, at + length_s, name=flaky))
        elif kind == "engine":
            found += [Fault(kind, at + more) for more in (0.0, 0.0, 5.0, 9.0)[: pick((1, 1, 2, 4))]]
            if draw.random() < 0.4:  # while it is started again
                found.append(Fault("signal", at + uniform(0.0, 8.0), name=pick(SIGNALS)))
        else:
            found.append(Fault(kind, at))
    resumed = pick((0, 0, 0, steps // 2))
    for _ in range(pick((0, 0, 0, 0, 1, 2))):
        at = uniform(0.0, length)
        kind = pick(("supervisor", "broken", "missing", "error", "kill", "samples"))
        if not settings.gives_up and draw.random() < 0.6:
            kind = "elsewhere"
        if kind == "missing":  # often while it is lost
            found.append(Fault("error", at))
            found.append(Fault(kind, at, at + pick((2.0, 30.0, 2000.0))))
        elif kind == "samples":
            found += [Fault("engine", at + more, name=kind) for more in (0.0, 9.0)]
        elif kind == "broken":
            found += [Fault("engine", at), Fault(kind, at, at + 30.0)]
        else:
            name = {"supervisor": pick(SIGNALS), "kill": pick(("", "silent"))}.get(kind, "")
            found.append(Fault(kind, at, name=name))
    val_only = draw.random() < 0.05 and settings.gives_up
    return replace(
        settings,
        resumed=resumed,
        val_only=val_only,
        validates_first=settings.validates_first or val_only,
        command_restarts=pick((0, 1, 2, 10, 10)),
        same_step=pick((0, 2, 3, 3)),
        crash_step=pick((1, steps)),
        crashes=pick((0, 0, 0, 0, 0, 1, 2, 4)),
        faults=tuple(sorted(found, key=lambda fault: fault.at)),
    )
