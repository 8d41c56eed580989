"""What must hold in every schedule of asynchronous training: a second bookkeeping, which does not
look into the flow. It knows what was drawn, started, answered and trained, and with which weights.

The names of the rules, as a broken one prints them:

ledger     each group that was drawn is in exactly one state, also after a kill and a resume
lost       every group that teaches something is trained once, and none is made up
age        no token is trained with an age above the bound
admission  exactly as many groups are drawn as bound, depth and the number of steps allow
start      groups start at once if they may, on engines that work, evenly
choice     a step waits only if it must, and takes the finished groups with the lowest numbers
weights    versions never go back; none is replaced under running groups without `swaps`
data       no step trains samples that are gone
progress   something always happens next, and a run without faults is never slow
"""

from collections import Counter
from typing import TYPE_CHECKING

from tests.control.flow_schedule import FlowSchedule
from tests.control.rules import Broken
from verlite.control.flow import State

if TYPE_CHECKING:
    from tests.control.flow_world import FlowWorld, Sample

ALIVE = (State.QUEUED, State.RUNNING, State.READY)


class Entry:
    """What is known of a group."""

    __slots__ = ("engine", "is_again", "oldest", "state")

    def __init__(self) -> None:
        self.state, self.engine, self.oldest, self.is_again = "queued", -1, 0, False

    def copy(self) -> "Entry":
        new = Entry()
        new.state, new.engine = self.state, self.engine
        new.oldest, new.is_again = self.oldest, self.is_again
        return new


class FlowRules:
    """The rules of one run, over all its attempts."""

    def __init__(self, world: "FlowWorld", schedule: FlowSchedule) -> None:
        self.world, self.schedule = world, schedule
        self.entries: dict[int, Entry] = {}
        self.alive: dict[int, Entry] = {}
        self.gone: Counter[str] = Counter()
        self.trained_numbers: list[list[int]] = []
        self.version = 0
        self.up: set[int] = set(range(world.engines))
        self.step_at = 0.0
        self.saved: tuple[dict[int, Entry], list[list[int]]] = ({}, [])

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            raise Broken(f"{text} (at {self.world.now:.3f} s, step {self.step})")

    @property
    def step(self) -> int:
        """Finished steps."""
        return len(self.trained_numbers)

    def having(self, state: str) -> list[int]:
        return [number for number, entry in self.alive.items() if entry.state == state]

    def settle(self, number: int, state: str) -> None:
        """A group is trained or filtered."""
        self.alive.pop(number).state = state
        self.gone[state] += 1

    def look(self, counts: dict[State, int]) -> None:
        """After every event."""
        own = dict.fromkeys(State, 0) | self.gone
        for entry in self.alive.values():
            own[entry.state] += 1
        if counts != own:
            differ = {str(s): (counts[s], own[s]) for s in State if counts[s] != own[s]}
            self.check(False, f"ledger: groups in the flow, and in truth: {differ}")

    # Admission and starts

    def drawn(self, wanted: int, numbers: list[int]) -> None:
        s, size = self.schedule, self.schedule.groups_per_step
        alive = len(self.alive)
        admitted = alive + self.gone["trained"]
        by_age = (self.version + s.bound) * size - admitted if self.version else 0
        by_depth = (1 + s.depth) * size - alive
        allowed = max(0, min(by_age, by_depth, s.total_steps * size - admitted))
        self.check(wanted == allowed, f"admission: {wanted} groups are wanted, not {allowed}")
        following = list(range(len(self.entries), len(self.entries) + wanted))
        self.check(numbers == following, f"ledger: {numbers} are drawn, not {following}")
        for number in numbers:
            self.entries[number] = self.alive[number] = Entry()

    def assigned(self, found: dict[int, list[int]]) -> None:
        s = self.schedule
        queued = sorted(self.having("queued"))
        is_due = not s.swaps and self.version <= self.step
        may = bool(self.version and self.up and not is_due)
        started = [number for numbers in found.values() for number in numbers]
        if sorted(started) != (queued if may else []):
            self.check(False, f"start: {started} of {queued}, with version {self.version}")
        if not started:
            return
        self.check(set(found) <= self.up, "start: on an engine that has died")
        again = [self.entries[n].is_again or self.entries[n].oldest > 0 for n in started]
        self.check(again == sorted(again, reverse=True), "start: put back or begun, and not first")
        runs = Counter(self.entries[number].engine for number in self.having("running"))
        for engine, numbers in found.items():
            runs[engine] += len(numbers)
            for number in numbers:
                entry = self.entries[number]
                entry.state, entry.engine = "running", engine
                entry.oldest = entry.oldest or self.version
        least = min(runs[engine] for engine in self.up)
        self.check(all(runs[engine] <= least + 1 for engine in found), "start: unevenly")

    # Answers

    def answered(self, number: int, engine: int, oldest: int | None, kept: bool) -> None:
        entry = self.entries[number]
        wanted = entry.state == "running" and entry.engine == engine
        self.check(kept == wanted, f"ledger: group {number} from engine {engine}: kept is {kept}, "
                   f"but it is {entry.state} on engine {entry.engine}")  # fmt: skip
        if kept:
            entry.state = "ready"
            entry.oldest = oldest or entry.oldest

    def filtered(self, number: int, done: bool) -> None:
        state = self.entries[number].state
        self.check(done == (state == "ready"), f"ledger: group {number} is {state}, left: {done}")
        if done:
            self.settle(number, "filtered")

    def lost(self, engine: int, found: list[int]) -> None:
        wanted = sorted(n for n in self.having("running") if self.entries[n].engine == engine)
        self.check(found == wanted, f"ledger: {found} are put back, not {wanted}")
        self.up.discard(engine)
        for number in wanted:
            self.put_back(self.entries[number])

    @staticmethod
    def put_back(entry: Entry) -> None:
        entry.state, entry.oldest, entry.is_again = "queued", 0, True

    # Steps

    def chosen(self, numbers: list[int] | None) -> None:
        s, size = self.schedule, self.schedule.groups_per_step
        ready = self.having("ready")
        if numbers is None:
            if len(ready) >= size:
                oldest_first = sorted(ready, key=lambda number: self.entries[number].oldest)[:size]
                self.check(not self.leaves_time(oldest_first), "choice: it waits without need")
            return
        self.check(
            len(set(numbers)) == len(numbers) == size and set(numbers) <= set(ready),
            f"ledger: a step takes {numbers}, ready are {ready}",
        )
        self.check(self.leaves_time(numbers), f"age: later steps have no place after {numbers}")
        self.check(numbers == sorted(numbers), "choice: the groups are not in order")
        for number in numbers:
            for other in set(ready) - set(numbers):
                better = (
                    other < number and self.entries[other].oldest <= self.entries[number].oldest
                )
                self.check(not better, f"choice: {number} is taken before {other}")
        if not s.bound and not s.filtered:
            batch = list(range(self.step * size, (self.step + 1) * size))
            self.check(numbers == batch, f"choice: {numbers}, but synchronous training has {batch}")

    def leaves_time(self, numbers: list[int]) -> bool:
        """Whether the other groups that have been started can be trained in later steps, the oldest
        first, within the bound."""
        s = self.schedule
        left = sorted(
            entry.oldest
            for number, entry in self.alive.items()
            if entry.oldest and number not in numbers
        )
        first = self.step + 2
        return all(
            first + place // s.groups_per_step - oldest <= s.bound
            for place, oldest in enumerate(left)
        )

    def ages(self, oldest: dict[int, int | None]) -> None:
        """The oldest versions of a step's groups, as the flow knows them."""
        own = {number: self.entries[number].oldest for number in oldest}
        self.check(oldest == own, f"ledger: oldest versions {oldest}, but {own}")

    def trained(self, numbers: list[int], samples: "list[Sample | None]") -> None:
        s, step = self.schedule, self.step + 1
        for number, sample in zip(numbers, samples, strict=True):
            self.check(sample is not None, f"data: group {number} is trained without its samples")
            assert sample is not None
            facts = self.world.facts(number)
            self.check(facts.teaches, f"lost: group {number} has nothing to train")
            age = step - sample.oldest
            self.check(0 <= age <= s.bound, f"age: group {number} has age {age} in step {step}")
            self.settle(number, "trained")
        self.trained_numbers.append(list(numbers))
        waited, self.step_at = self.world.now - self.step_at, self.world.now
        if not s.faults and not s.filtered:
            alive = (1 + s.bound) * s.groups_per_step
            longest = max(self.world.facts(number).seconds for number in self.entries)
            limit = (alive // s.slots + 2) * (longest + s.delay_s) + s.update_s
            limit += 2 * (s.sync_s + s.save_s + s.delay_s)
            self.check(waited <= limit, f"progress: a step after {waited:.1f} s, not {limit:.1f}")

    # Weights and engines

    def may_publish(self, may: bool) -> None:
        wanted = self.schedule.swaps or not self.having("running")
        self.check(may == wanted, f"weights: publication is allowed: {may}")

    def swapped(self, engine: int, running: int) -> None:
        """An engine gets new weights."""
        self.check(self.schedule.swaps or not running,
                   f"weights: replaced under {running} groups of engine {engine}")  # fmt: skip

    def published(self, version: int) -> None:
        self.check(version == self.step + 1 >= self.version, f"weights: version {version}")
        self.version = version

    # Checkpoints

    def snapshot(self) -> tuple[dict[int, Entry], list[list[int]]]:
        return {n: entry.copy() for n, entry in self.entries.items()}, list(self.trained_numbers)

    def resumed(self, kept: set[int], begun: dict[int, int]) -> None:
        """A new process begins, from what was saved last. Groups of `kept` are trained as they are,
        and those of `begun` go on with tokens of that version."""
        saved, self.trained_numbers = self.saved[0], list(self.saved[1])
        self.entries = {number: entry.copy() for number, entry in saved.items()}
        self.gone = Counter(e.state for e in self.entries.values() if e.state not in ALIVE)
        self.alive = {n: entry for n, entry in self.entries.items() if entry.state in ALIVE}
        for number, entry in self.alive.items():
            if entry.state in ("queued", "running") and number in begun:
                mixes = not self.schedule.swaps and begun[number] <= self.step
                self.check(not mixes, f"weights: replaced under group {number}, which goes on")
                entry.state, entry.oldest = "queued", begun[number]
            elif entry.state == "running" or (entry.state == "ready" and number not in kept):
                self.put_back(entry)
            elif entry.state == "queued" and entry.oldest:
                self.put_back(entry)
        self.version, self.up = 0, set(range(self.world.engines))
        self.step_at = self.world.now

    def ended(self) -> None:
        """All steps are done."""
        s = self.schedule
        self.check(self.step == s.total_steps, "progress: steps are missing")
        for number, entry in self.entries.items():
            facts = self.world.facts(number)
            wanted = "trained" if facts.teaches else entry.state
            self.check(entry.state == wanted and entry.state not in ALIVE,
                       f"lost: group {number} ends as {entry.state}")  # fmt: skip
        numbers = [number for step in self.trained_numbers for number in step]
        self.check(len(set(numbers)) == len(numbers) == s.total_steps * s.groups_per_step,
                   "lost: groups are trained twice")  # fmt: skip
