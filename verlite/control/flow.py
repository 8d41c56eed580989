"""The flow of prompts in asynchronous training: which are drawn, sampled and trained when.

A group is a prompt with its `rollout.n` samples. Its number is its place in the order in which
prompts are drawn, from 0 over the whole run. Version v of the weights is what step v starts from:
the first weight sync gives the engines version 1, and the sync after step s version s + 1. A token
that version v sampled has age s - v in step s, which is 0 in synchronous training.

Nothing finished is dropped for its age: a rule that drops trains on short answers. Instead

- admission: a group is drawn only if a step can still take it before its tokens exceed the bound.
  Version v may have started (v + bound - finished steps) * groups_per_step groups that are not
  trained yet, so all of them can be trained by step v + bound.
- choice: a step takes the finished groups with the lowest numbers, except where later steps would
  then have no place for the older ones in time. Those it takes first, and waits for them if need
  be: with G groups a step, at most k * G groups may have to be trained in the next k steps.

With bound 0 both rules give exactly one batch per version, in order: synchronous training.

Like the rest of the control this does no IO. Events may be reported twice and late: an answer for a
group that does not run is refused.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heapreplace
from typing import Any


class State(StrEnum):
    """Where a group is. Each group that was drawn is in exactly one state."""

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    """All its samples are finished and scored."""
    TRAINED = "trained"
    FILTERED = "filtered"
    """Its samples teach nothing; another one is drawn in its place."""


@dataclass
class Group:
    """A group that is alive: queued, running or ready.

    engine: where it runs or ran; None while it is queued.
    oldest: the oldest version that sampled a token of it; None if it has none. A queued group has
        some if a process before has begun it.
    """

    number: int
    state: State = State.QUEUED
    engine: int | None = None
    oldest: int | None = None


class Flow:
    """Keeps every group in exactly one state, and decides what is drawn, started and trained.

    Attributes:
        step: finished steps.
        version: of the engines' weights; 0 while they have none.
        groups: those that are alive, by number.
        gone: how many groups were trained or filtered.
        reasons: how many groups were filtered, by reason.

    Args:
        groups_per_step: groups that one step trains on.
        bound: the highest age, in steps, of any token that is trained on.
        depth: at most (1 + depth) * groups_per_step groups are alive at once.
        engines: engines that groups can be assigned to, numbered from 0.
        swaps: whether weights are replaced while groups run. Otherwise groups that run are finished
            first, and none is started meanwhile.
        total_steps: steps of the run. No more groups are drawn than they need. None: no end.
    """

    def __init__(
        self,
        groups_per_step: int,
        bound: int,
        depth: int,
        engines: int,
        swaps: bool,
        total_steps: int | None = None,
    ) -> None:
        self.groups_per_step, self.bound, self.depth = groups_per_step, bound, depth
        self.swaps, self.total_steps = swaps, total_steps
        self.step = self.version = 0
        self.groups: dict[int, Group] = {}
        self.gone: Counter[State] = Counter()
        self.reasons: Counter[str] = Counter()
        self._next = 0
        self._queued: set[int] = set()
        self._ready: set[int] = set()
        self._running: dict[int, set[int]] = {engine: set() for engine in range(engines)}
        # How many groups have this oldest version: all that have begun, and ready ones.
        self._started_with: Counter[int] = Counter()
        self._ready_with: Counter[int] = Counter()

    def counts(self) -> dict[State, int]:
        """Return how many of the groups that were drawn are in each state."""
        queued, ready = len(self._queued), len(self._ready)
        alive = {
            State.QUEUED: queued,
            State.RUNNING: len(self.groups) - queued - ready,
            State.READY: ready,
        }
        return alive | {s: self.gone[s] for s in (State.TRAINED, State.FILTERED)}

    # Admission

    def wanted(self) -> int:
        """Return how many new prompts to draw now."""
        limit = min(self._places(), (1 + self.depth) * self.groups_per_step)
        return max(0, limit - len(self.groups))

    def draw(self, count: int) -> list[int]:
        """Put `count` new groups in the queue. Returns their numbers.

        Raises ValueError if more are drawn than wanted.
        """
        if not 0 <= count <= self.wanted():
            raise ValueError(f"{count} groups are drawn, but {self.wanted()} are wanted")
        numbers = list(range(self._next, self._next + count))
        self._next += count
        self.groups |= {number: Group(number) for number in numbers}
        self._queued.update(numbers)
        return numbers

    def _places(self) -> int:
        """How many groups the steps can take in which this version's tokens are within the
        bound."""
        last = self.version + self.bound
        if self.total_steps is not None:
            last = min(last, self.total_steps)
        return (last - self.step) * self.groups_per_step if self.version else 0

    def assign(self) -> dict[int, list[int]]:
        """Start the queued groups that may start now. Returns their numbers by engine.

        The lowest numbers go first, and so do groups that were put back. Groups that a process
        before has begun start in any case: they have their places. An engine gets consecutive
        groups; the fewer it runs, the more it gets, and the earlier ones. Nothing starts before the
        engines have weights, and without `swaps` nothing while a publication is due.
        """
        room = self._places() - sum(self._started_with.values())
        waits = self.version <= self.step and not self.swaps
        if not self._queued or not self._running or not self.version or waits:
            return {}
        begun = {number for number in self._queued if self.groups[number].oldest is not None}
        order = sorted(begun | set(sorted(self._queued - begun)[: max(0, room)]))
        loads = [(len(numbers), engine) for engine, numbers in self._running.items()]
        heapify(loads)
        shares: Counter[int] = Counter()
        for _ in order:
            load, engine = loads[0]
            heapreplace(loads, (load + 1, engine))
            shares[engine] += 1
        found: dict[int, list[int]] = {}
        begin = 0
        for engine, share in shares.items():  # in the order of their loads
            found[engine] = order[begin : begin + share]
            begin += share
            self._start(found[engine], engine)
        return found

    def _start(self, numbers: list[int], engine: int) -> None:
        for number in numbers:
            group = self.groups[number]
            group.state, group.engine = State.RUNNING, engine
            if group.oldest is None:
                group.oldest = self.version
                self._started_with[self.version] += 1
        self._queued.difference_update(numbers)
        self._running[engine].update(numbers)

    # What happens to a group

    def finished(self, number: int, oldest: int | None = None) -> bool:
        """All samples of a group are finished and scored. Returns whether to keep them: False if
        the group does not run (any more).

        The caller drops answers of engines that it has given up (`engine_lost`).

        Args:
            oldest: the oldest version that sampled one of its tokens. By default the one under
                which it was started.

        Raises ValueError if `number` was never drawn, or if `oldest` is not between the version
        under which the group was started and the newest.
        """
        group = self._find(number)
        if group is None or group.state is not State.RUNNING:
            return False
        assert group.engine is not None and group.oldest is not None
        if oldest is not None and oldest != group.oldest:
            if not group.oldest <= oldest <= self.step + 1:
                raise ValueError(
                    f"group {number} has tokens of version {oldest}, but it was started with "
                    f"version {group.oldest} of at most {self.step + 1}: engine {group.engine} "
                    "does not have the weights that it was given"
                )
            self._count(self._started_with, group.oldest, -1)
            self._started_with[oldest] += 1
            group.oldest = oldest
        group.state = State.READY
        self._running[group.engine].discard(number)
        self._ready.add(number)
        self._ready_with[group.oldest] += 1
        return True

    def filtered(self, number: int, reason: str) -> bool:
        """A finished group teaches nothing. Admission may draw another in its place.

        Returns False if it is not ready (any more). Raises ValueError if it was never drawn.
        """
        group = self._find(number)
        if group is None or group.state is not State.READY:
            return False
        self._take_out(group)
        del self.groups[number]
        self.gone[State.FILTERED] += 1
        self.reasons[reason] += 1
        return True

    def _find(self, number: int) -> Group | None:
        """Return the group if it is alive. Raises ValueError if it was never drawn."""
        if not 0 <= number < self._next:
            raise ValueError(f"group {number} was never drawn: the last one is {self._next - 1}")
        return self.groups.get(number)

    def _take_out(self, group: Group) -> None:
        """Forget a group in all lists but `groups`."""
        self._queued.discard(group.number)
        if group.oldest is None:
            return
        self._count(self._started_with, group.oldest, -1)
        if group.state is State.READY:
            self._ready.discard(group.number)
            self._count(self._ready_with, group.oldest, -1)
        elif group.engine is not None:
            self._running[group.engine].discard(group.number)

    @staticmethod
    def _count(counter: Counter[int], version: int, change: int) -> None:
        counter[version] += change
        if not counter[version]:
            del counter[version]

    # Steps

    def choose(self) -> list[int] | None:
        """Return the numbers of the groups for the next step, ascending. None: wait.

        Changes nothing: the groups stay ready until `trained`.
        """
        size = self.groups_per_step
        needs = self._needs()
        if len(self._ready) < size or any(need > ready for _, need, ready in needs):
            return None
        left = sorted(self._ready)
        chosen: list[int] = []
        for version, need, _ in needs:
            if need > len(chosen):
                old = [number for number in left if self._oldest(number) <= version]
                chosen += old[: need - len(chosen)]
                left = sorted(set(left) - set(chosen))
        return sorted(chosen + left[: size - len(chosen)])

    def _needs(self) -> list[tuple[int, int, int]]:
        """Return for each version, ascending: how many groups with tokens of it or older the next
        step must take, because later steps have no place for them in time; and how many of these
        are ready."""
        found: list[tuple[int, int, int]] = []
        started = ready = 0
        for version in sorted(self._started_with):
            started += self._started_with[version]
            ready += self._ready_with[version]
            later_steps = version + self.bound - (self.step + 1)
            found.append((version, started - later_steps * self.groups_per_step, ready))
        return found

    def _oldest(self, number: int) -> int:
        oldest = self.groups[number].oldest
        assert oldest is not None
        return oldest

    def trained(self, numbers: Sequence[int]) -> None:
        """A step has been trained on these groups, which are forgotten.

        Raises ValueError if they are not as many as a step takes, if one is not ready, or if later
        steps could not train the others within the bound.
        """
        if len(numbers) != self.groups_per_step or len(set(numbers)) != len(numbers):
            raise ValueError(f"a step needs {self.groups_per_step} groups, not {list(numbers)}")
        for number in numbers:
            if number not in self._ready:
                raise ValueError(f"group {number} is trained, but it is not ready")
        for version, need, _ in self._needs():
            old = sum(self._oldest(number) <= version for number in numbers)
            if old < need:
                raise ValueError(
                    f"step {self.step + 1} trains {old} groups of version {version} or older, but "
                    f"{need} are due: age would exceed the bound {self.bound}"
                )
        for number in numbers:
            self._take_out(self.groups.pop(number))
        self.gone[State.TRAINED] += len(numbers)
        self.step += 1

    # Weights

    def may_publish(self) -> bool:
        """Whether the engines can be given the newest weights now."""
        return self.swaps or not any(self._running.values())

    def published(self) -> None:
        """All engines have the weights after the last step, or their first ones.

        Raises ValueError if groups run that weights must not be replaced under.
        """
        if not self.may_publish():
            raise ValueError("weights are published while groups run, which needs swaps")
        self.version = self.step + 1

    # Engines

    def engine_lost(self, engine: int) -> list[int]:
        """An engine has died. Put back what it ran. Returns the numbers, ascending.

        Nothing is assigned to it until `engine_back`. May be called twice.
        """
        numbers = sorted(self._running.get(engine, set()))
        for number in numbers:
            self._take_out(self.groups[number])
            self._put_back(self.groups[number])
        self._running.pop(engine, None)
        return numbers

    def again(self, numbers: Iterable[int]) -> None:
        """Put ready groups back, because their samples cannot be trained on: a service failed
        them."""
        for number in numbers:
            if number not in self._ready:
                raise ValueError(f"group {number} is put back, but it is not ready")
            self._take_out(self.groups[number])
            self._put_back(self.groups[number])

    def _put_back(self, group: Group) -> None:
        group.state, group.engine, group.oldest = State.QUEUED, None, None
        self._queued.add(group.number)

    def engine_back(self, engine: int) -> None:
        """A new engine runs in the place of one that died, and has the newest weights."""
        self._running.setdefault(engine, set())

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep, for JSON: the step and all groups that are alive.
        `check_flow_state` has its shape."""
        return {
            "step": self.step,
            "next": self._next,
            "gone": {str(state): count for state, count in self.gone.items()},
            "reasons": dict(self.reasons),
            "groups": [
                [g.number, str(self._state_to_save(g)), g.oldest] for g in self.groups.values()
            ],
        }

    @staticmethod
    def _state_to_save(group: Group) -> State:
        is_begun = group.state is State.QUEUED and group.oldest is not None
        return State.RUNNING if is_begun else group.state

    def load_state_dict(
        self,
        state: dict[str, Any],
        ready: Collection[int] = (),
        begun: Mapping[int, int] | None = None,
    ) -> None:
        """Go on from a checkpoint, in a new Flow. The engines have no weights until `published`.

        Groups that were ready or ran are sampled again, unless their samples were saved with the
        checkpoint. Those keep their age. Those of them that the steps could not train within the
        bound are sampled again too, the last drawn first: it is lower than the checkpoint's.

        Args:
            ready: groups of which all samples were saved.
            begun: oldest version of groups that ran, and that go on with the tokens so far. Without
                `swaps` only those of the newest version do.
        """
        begun = begun or {}
        self.step, self._next = state["step"], state["next"]
        self.gone = Counter({State(name): count for name, count in state["gone"].items()})
        self.reasons = Counter(state["reasons"])
        for number, name, oldest in state["groups"]:
            group = self.groups[number] = Group(number, State(name), None, oldest)
            if group.state is State.READY and number in ready:
                self._ready.add(number)
                self._started_with[oldest] += 1
                self._ready_with[oldest] += 1
            elif group.state is State.QUEUED:
                self._queued.add(number)
            elif self._may_go_on(group, begun.get(number)):
                group.state, group.oldest = State.QUEUED, begun[number]
                self._queued.add(number)
                self._started_with[begun[number]] += 1
            else:
                self._put_back(group)
        for version in sorted(self._started_with):
            old = [g for g in self.groups.values() if g.oldest is not None and g.oldest <= version]
            old.sort(key=lambda group: (group.state is not State.READY, group.number))
            places = (version + self.bound - self.step) * self.groups_per_step
            for group in old[max(0, places) :]:
                self._take_out(group)
                self._put_back(group)

    def _may_go_on(self, group: Group, oldest: int | None) -> bool:
        if group.state is not State.RUNNING or oldest is None:
            return False
        return self.swaps or oldest == self.step + 1


def flow_state_at(step: int, groups_per_step: int) -> dict[str, Any]:
    """Return the state of a flow that has trained all groups that it drew."""
    drawn = step * groups_per_step
    gone = {State.TRAINED: drawn}
    return {"step": step, "next": drawn, "gone": gone, "reasons": {}, "groups": []}


def versions_of(state: dict[str, Any], kind: State) -> dict[int, int]:
    """Return the oldest version of each ready, or running, group of a state."""
    return {number: oldest for number, name, oldest in state["groups"] if name == kind}


def check_flow_state(state: Any, step: int, groups_per_step: int) -> list[int]:
    """Check that a flow can go on from a state of `Flow.state_dict`. Return the numbers of its
    groups.

    step: of the checkpoint that the state is of.

    Raises:
        ValueError: names the entry, its value and what it must be.
    """
    kinds = {"step": int, "next": int, "gone": dict, "reasons": dict, "groups": list}
    check_entries("flow", state, kinds)
    if state["step"] != step:
        raise wrong("flow.step", state["step"], f"{step}, the checkpoint's step")
    for place, group in enumerate(state["groups"]):
        if not _is_group(group, state["next"], step + 1):
            rule = (
                f"[number below next={state['next']}, queued or running or ready, oldest version "
                f"up to {step + 1} or null if it is queued]"
            )
            raise wrong(f"flow.groups[{place}]", group, rule)
    numbers = [group[0] for group in state["groups"]]
    if len(set(numbers)) != len(numbers):
        raise wrong("flow.groups", numbers, "each number once")
    for entry, names in (("gone", set(State)), ("reasons", set(state["reasons"]))):
        if not set(state[entry]) <= names or not all(map(is_count, state[entry].values())):
            raise wrong(f"flow.{entry}", state[entry], "counts by name")
    drawn = step * groups_per_step + state["gone"].get(State.FILTERED, 0) + len(numbers)
    if state["next"] != drawn:
        rule = f"{drawn}: {groups_per_step} for each step, those left out, and those of flow.groups"
        raise wrong("flow.next", state["next"], rule)
    return numbers


def check_entries(name: str, value: Any, kinds: dict[str, type]) -> None:
    """Check the types of a dict's entries. Raises ValueError, as `check_flow_state`."""
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    for entry, kind in kinds.items():
        if type(value.get(entry)) is not kind:
            words = {int: "a whole number", dict: "an object", list: "a list"}
            raise wrong(f"{name}.{entry}", value.get(entry), words[kind])


def _is_group(group: Any, drawn: int, newest: int) -> bool:
    """Return whether this is a group of `Flow.state_dict`."""
    if not isinstance(group, list) or len(group) != 3:
        return False
    number, name, oldest = group
    if not (is_count(number) and number < drawn):
        return False
    if name == State.QUEUED:
        return oldest is None
    return name in (State.RUNNING, State.READY) and is_count(oldest) and 1 <= oldest <= newest


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 0."""
    return type(value) is int and value >= 0


def wrong(entry: str, value: Any, rule: str) -> ValueError:
    """Return the error of an entry of a state that has a value against the rule."""
    return ValueError(f"{entry} is {value!r:.80}, and must be {rule}")
