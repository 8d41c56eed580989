"""A schedule of asynchronous training: what a run wants, how long things take, and what goes wrong
when. One seed is one schedule, and a schedule without some of its faults is one, too."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tests.control.schedule import Fault


@dataclass(frozen=True)
class FlowSchedule:
    """Faults: engine: the engine `name` dies; kill: the process is killed; stop: it is asked to
    stop."""

    seed: int
    total_steps: int = 3
    groups_per_step: int = 2
    bound: int = 1
    depth: int = 1
    engines: int = 2
    engines_later: int = 2
    """After a resume."""
    swaps: bool = True
    slots: int = 2
    """Groups that an engine samples at once; others wait in its queue."""
    median_s: float = 10.0
    """Of the time to sample a group."""
    sigma: float = 0.5
    """Of its logarithm. 0: a Pareto distribution without a mean in place of the lognormal one."""
    slow: int = -1
    """The number of a group that takes 50 times the median."""
    filtered: float = 0.0
    """Share of groups that teach nothing."""
    doubled: float = 0.0
    """Share of answers that come twice."""
    delay_s: float = 0.1
    """An answer takes up to this."""
    detect_s: float = 5.0
    """A dead engine is noticed after this, or by the next publication."""
    restart_s: float = 5.0
    update_s: float = 10.0
    sync_s: float = 2.0
    save_s: float = 1.0
    save_freq: int = 1
    saves_ready: bool = True
    """Whether a checkpoint has the samples of finished groups."""
    saves_running: bool = True
    """Whether it has what running groups have so far."""
    reports_oldest: bool = True
    """Whether answers have the oldest version of their tokens."""
    feeds: bool = True
    """Whether groups are drawn and started during an update and a publication."""
    overlaps: bool = False
    """Whether a step may begin while a publication waits."""
    faults: tuple[Fault, ...] = field(default_factory=tuple)

    def smaller(self) -> Iterator["FlowSchedule"]:
        """Schedules with one fault or one complication less."""
        for number in range(len(self.faults)):
            yield replace(self, faults=self.faults[:number] + self.faults[number + 1 :])
        if self.total_steps > 1:
            yield replace(self, total_steps=self.total_steps - 1)
        for name, plain in (("filtered", 0.0), ("doubled", 0.0), ("slow", -1),
                            ("saves_ready", False), ("saves_running", False), ("overlaps", False),
                            ("reports_oldest", False), ("feeds", False)):  # fmt: skip
            if getattr(self, name) != plain:
                yield replace(self, **{name: plain})
        for name in ("engines", "engines_later", "groups_per_step", "bound", "depth"):
            if getattr(self, name) > 1:
                yield replace(self, **{name: getattr(self, name) - 1})


def flow_schedule(seed: int) -> FlowSchedule:
    """Draw a schedule."""
    draw = random.Random(seed)
    pick, uniform, chance = draw.choice, draw.uniform, draw.random
    one = FlowSchedule(
        seed,
        total_steps=pick((1, 2, 3, 4, 5)),
        groups_per_step=pick((1, 1, 2, 2, 3)),
        bound=pick((0, 1, 1, 2, 3, 4)),
        depth=pick((0, 1, 1, 2, 3, 4)),
        engines=pick((1, 2, 3)),
        engines_later=pick((1, 2, 3)),
        swaps=chance() < 0.6,
        slots=pick((1, 2, 8)),
        median_s=uniform(1.0, 30.0),
        sigma=pick((0.0, 0.1, 0.6, 1.5)),
        slow=pick((-1, -1, -1, 0, 1, 2, 5)),
        filtered=pick((0.0, 0.0, 0.0, 0.2, 0.6)),
        doubled=pick((0.0, 0.3)),
        delay_s=pick((0.0, 0.1, 5.0)),
        detect_s=pick((0.0, 5.0, 40.0)),
        restart_s=uniform(0.1, 30.0),
        update_s=uniform(0.1, 30.0),
        sync_s=pick((uniform(0.1, 5.0), uniform(10.0, 60.0))),
        save_s=uniform(0.1, 5.0),
        save_freq=pick((1, 1, 2, 3)),
        saves_ready=chance() < 0.6,
        reports_oldest=chance() < 0.6,
        feeds=chance() < 0.7,
        overlaps=chance() < 0.4,
        saves_running=chance() < 0.6,
    )
    if chance() < 0.03:  # nearly all
        one = replace(one, filtered=0.95, total_steps=min(2, one.total_steps))
    length = one.total_steps * (one.median_s + one.update_s + one.sync_s) * 1.2
    found: list[Fault] = []
    for _ in range(pick((0, 1, 1, 2, 3))):
        at, kind = uniform(0.0, length), pick(("engine",) * 4 + ("kill", "stop"))
        engine = draw.randrange(one.engines)
        found.append(Fault(kind, at, name=str(engine)))
        if kind == "engine" and chance() < 0.4:  # another one, at once or soon
            at += pick((0.0, 0.0, uniform(0.0, one.detect_s + one.restart_s)))
            found.append(Fault(kind, at, name=str((engine + 1) % one.engines)))
    return replace(one, faults=tuple(sorted(found, key=lambda fault: fault.at)))
