"""Run schedules, and shrink one that breaks a rule."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tests.control.rules import Broken
from tests.control.schedule import Schedule, schedule
from tests.control.world import World


@dataclass(frozen=True)
class Failure:
    """A schedule that breaks a rule. `schedules`: how many were run until then."""

    schedule: Schedule
    text: str
    schedules: int

    def __str__(self) -> str:
        faults = "\n".join(f"  {fault}" for fault in self.schedule.faults)
        settings = replace(self.schedule, faults=())
        return f"seed {self.schedule.seed}: {self.text}\n{faults or '  no fault'}\n  {settings}"


def broken(schedule: Schedule) -> str:
    """Return which rule a schedule breaks; "" if none."""
    try:
        codes = World(schedule).run()
    except Broken as error:
        return str(error)
    except (AssertionError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    if not schedule.faults and schedule.runtime_s is None and codes != [0]:
        return f"progress: exit codes {codes} without a fault"
    return ""


def shrink(schedule: Schedule, text: str) -> Schedule:
    """Leave out faults and steps as long as the same rule is broken."""
    rule = text.partition(":")[0]

    def still(smaller: Schedule) -> bool:
        return broken(smaller).partition(":")[0] == rule

    changed = True
    while changed:
        changed = False
        for smaller in _smaller(schedule):
            if still(smaller):
                schedule, changed = smaller, True
                break
    return schedule


def _smaller(one: Schedule) -> Iterable[Schedule]:
    for number in range(len(one.faults)):
        yield replace(one, faults=one.faults[:number] + one.faults[number + 1 :])
    if one.resumed:
        yield replace(one, resumed=0)
    if one.total_steps > one.resumed + 1:
        yield replace(one, total_steps=one.total_steps - 1)
    if one.runtime_s is not None:
        yield replace(one, runtime_s=None)
    for name in ("test_freq", "validates_first", "exports"):
        if getattr(one, name):
            yield replace(one, **{name: 0})


def simulate(schedules: int, seed: int = 0) -> Failure | None:
    """Run schedules of the seeds from `seed` on. Return the first that breaks a rule, shrunk."""
    for number in range(schedules):
        one = schedule(seed + number)
        text = broken(one)
        if text:
            smaller = shrink(one, text)
            return Failure(smaller, broken(smaller), number + 1)
    return None
