"""Run schedules, and shrink one that breaks a rule."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.control.flow_schedule import FlowSchedule, flow_schedule
from tests.control.flow_world import FlowWorld
from tests.control.rules import Broken
from tests.control.schedule import Schedule, schedule
from tests.control.watch_world import WatchSchedule, WatchWorld, watch_schedule
from tests.control.world import World

AnySchedule = Schedule | FlowSchedule | WatchSchedule
WORLDS: dict[type, Callable[[AnySchedule], World | FlowWorld | WatchWorld]] = {
    Schedule: World,
    FlowSchedule: FlowWorld,
    WatchSchedule: WatchWorld,
}
DRAWS: dict[str, Callable[[int], AnySchedule]] = {
    "run": schedule,
    "flow": flow_schedule,
    "watch": watch_schedule,
}
"""What is simulated: stops, faults and restarts of a run; the prompts of asynchronous training;
dead, frozen, hanging and slow workers."""


@dataclass(frozen=True)
class Failure:
    """A schedule that breaks a rule. `schedules`: how many were run until then."""

    schedule: AnySchedule
    text: str
    schedules: int

    def __str__(self) -> str:
        faults = "\n".join(f"  {fault}" for fault in self.schedule.faults)
        settings = replace(self.schedule, faults=())
        return f"seed {self.schedule.seed}: {self.text}\n{faults or '  no fault'}\n  {settings}"


def broken(schedule: AnySchedule) -> str:
    """Return which rule a schedule breaks; "" if none."""
    try:
        WORLDS[type(schedule)](schedule).run()
    except Broken as error:
        return str(error)
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shrink(schedule: AnySchedule, text: str) -> AnySchedule:
    """Leave out faults and steps as long as the same rule is broken."""
    rule = text.partition(":")[0]

    def still(smaller: AnySchedule) -> bool:
        return broken(smaller).partition(":")[0] == rule

    changed = True
    while changed:
        changed = False
        for smaller in schedule.smaller():
            if still(smaller):
                schedule, changed = smaller, True
                break
    return schedule


def simulate(schedules: int, seed: int = 0, what: str = "run") -> Failure | None:
    """Run schedules of the seeds from `seed` on. Return the first that breaks a rule, shrunk."""
    for number in range(schedules):
        one = DRAWS[what](seed + number)
        text = broken(one)
        if text:
            smaller = shrink(one, text)
            return Failure(smaller, broken(smaller), number + 1)
    return None
