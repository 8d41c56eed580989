"""What heartbeats mean: a frozen process, a call without progress, a slow rank."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verlite.control import limits
from verlite.control.stragglers import Slow, Stragglers
from verlite.progress import Progress

NOT_JUDGED = ("construction", "load", "save", "export_hf", "fetch_weights")
"""Calls to which only the run's limit (`trainer.phase_timeout_s`) applies. The first four read or
write large files, and storage may pause for many minutes. The last one waits for the trainer, whose
call is judged."""
IN_BACKGROUND = "finished"
"""The call that asks for samples that were drawn in the background. It is short, so the steps of
each engine count in its place."""


@dataclass(frozen=True)
class Beat:
    """What one heartbeat says.

    Attributes:
        number: counts the worker's heartbeats.
        at: the worker's position.
        samples: how often the worker has looked, in this call, whether it waits in a collective.
        waits: how often it did.
        in_collective: whether it does now.
    """

    number: int
    at: Progress
    samples: int = 0
    waits: int = 0
    in_collective: bool = False


@dataclass
class Heard:
    """What the driver has heard of one worker's process.

    Attributes:
        beat: its last heartbeat.
        heard: the receiver's time of that.
        moved: the receiver's time when its position last changed.
        stepped: the receiver's time when its generation engine last made a step, or had nothing
            to do.
        pause_s: longest time between two steps so far; None before the first.
        signed: the receiver's time when it last answered a signal.
    """

    beat: Beat
    heard: float
    moved: float
    stepped: float = 0.0
    pause_s: float | None = None
    signed: float = -1

    def hear(self, beat: Beat, clock: float) -> None:
        """Note a heartbeat. Old ones are ignored."""
        if beat.number <= self.beat.number:
            return
        before = self.beat.at
        if beat.at != before:
            self.moved = clock
        if beat.at.steps != before.steps:
            self.pause_s = max(self.pause_s or 0.0, clock - self.stepped)
        if beat.at.steps != before.steps or not before.pending:
            self.stepped = clock
        self.beat, self.heard = beat, clock


@dataclass(frozen=True)
class Rank:
    """What is known of one rank that has not answered a call.

    Attributes:
        process: name of its process in heartbeats.
        silent_s: seconds since its last heartbeat; None if none has ever arrived.
        still_s: seconds since it made progress, or since the call was made.
        at: its position; None if no heartbeat has ever arrived.
        in_collective: whether its last heartbeat came from inside a collective.
    """

    rank: int
    process: str
    silent_s: float | None
    still_s: float
    at: Progress | None
    in_collective: bool = False


@dataclass(frozen=True)
class Still:
    """Ranks without progress, of which the user is told.

    Attributes:
        ranks: those that make none.
        over: those of them that are ended now.
        limit_s: after how many seconds without progress they are ended.
        in_group: whether they meet in collectives, so that one of them may have stopped all.
    """

    ranks: list[Rank]
    over: list[Rank]
    limit_s: float
    in_group: bool


@dataclass(frozen=True)
class Moves:
    """Ranks of which the user was told make progress again."""

    ranks: list[Rank]


class Watch:
    """Decides what heartbeats mean.

    Without any, only the run's limit on calls applies.

    Args:
        timeout_s: a process without heartbeats for this time is looked at, and a call without
            progress is named.

    Attributes:
        clock: the receiver's time.
        heard: what is known of each worker's process, by its name in heartbeats.
    """

    def __init__(self, timeout_s: float = limits.HEARTBEAT_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self.clock = 0.0
        self.heard: dict[str, Heard] = {}
        self.stragglers = Stragglers()
        self._pauses: dict[tuple[str, str], float] = {}
        self._named: set[str] = set()  # processes whose background sampling was named
        self._checked = 0.0

    def hear(self, process: str, beat: Beat) -> None:
        """Note a heartbeat. Old ones are ignored."""
        if process in self.heard:
            self.heard[process].hear(beat, self.clock)
        else:
            self.heard[process] = Heard(beat, self.clock, self.clock, self.clock)

    def is_due(self, now: float) -> bool:
        """Return True at most once per CHECK_EVERY_S."""
        if now - self._checked < limits.CHECK_EVERY_S:
            return False
        self._checked = now
        return True

    def look_now(self) -> None:
        """Let `is_due` return True the next time."""
        self._checked = 0.0

    def silent(self, processes: Iterable[str]) -> dict[str, float]:
        """Return {process: seconds since its last heartbeat} of those that must be looked at."""
        found = {}
        for process in processes:
            heard = self.heard.get(process)
            if heard and self.clock - max(heard.heard, heard.signed) > self.timeout_s:
                found[process] = self.clock - heard.heard
        return found

    def have_signed(self, processes: Iterable[str]) -> bool:
        """Whether these processes have answered a signal since their last heartbeats. They run as
        long as none is stopped: native code may hold Python's lock."""
        return all((one := self.heard.get(name)) and one.signed >= one.heard for name in processes)

    def sign(self, process: str, clock: float) -> None:
        """Note that a process has answered a signal."""
        if heard := self.heard.get(process):
            heard.signed = clock

    def facts(self, rank: int, process: str, elapsed_s: float) -> Rank:
        """Return the facts about a rank. elapsed_s: seconds since the call was made."""
        heard, clock = self.heard.get(process), self.clock
        if heard is None:
            return Rank(rank, process, None, elapsed_s, None)
        still_s = min(elapsed_s, clock - heard.moved)
        silent_s = clock - heard.heard
        return Rank(rank, process, silent_s, still_s, heard.beat.at, heard.beat.in_collective)

    def look(self, call: Any, ranks: Sequence[Rank], run_s: float) -> list[Still | Moves]:
        """Return what to say about the ranks that have not answered a call, and which are ended.

        Args:
            call: its role and method; the longest time without progress so far, `pause_s`; and
                `named`, which contains "" once the user has been told that it makes none.
            run_s: `trainer.phase_timeout_s`.
        """
        if call.method == IN_BACKGROUND:
            found = [self._look_at_engine(rank, run_s) for rank in ranks]
            return [one for one in found if one is not None]
        judged = [rank for rank in ranks if is_judged(rank, call.method)]
        in_group = meet(ranks)
        if in_group and len(judged) < len(ranks):
            return []
        longest = min if in_group else max
        call.pause_s = max(call.pause_s, longest((one.still_s for one in judged), default=0.0))
        limit_s = end_limit(run_s, self.timeout_s, self._pauses.get((call.role, call.method)))
        verdict = self._judge(judged, limit_s, in_group, call.named, "")
        return [] if verdict is None else [verdict]

    def _look_at_engine(self, rank: Rank, run_s: float) -> Still | Moves | None:
        """An engine with requests makes no progress since its last step."""
        heard = self.heard.get(rank.process)
        if heard and heard.beat.at.pending:
            rank = replace(rank, still_s=max(rank.still_s, self.clock - heard.stepped))
        limit_s = end_limit(run_s, self.timeout_s, heard.pause_s if heard else None)
        return self._judge([rank], limit_s, False, self._named, rank.process)

    def _judge(
        self, ranks: list[Rank], limit_s: float, in_group: bool, named: set[str], name: str
    ) -> Still | Moves | None:
        still = still_ranks(ranks, self.timeout_s)
        if not still:
            if name not in named:
                return None
            named.discard(name)
            return Moves(ranks)
        over = still_ranks(ranks, limit_s)
        if not over:
            # Others may be waiting for a rank that is frozen: nothing is said yet.
            is_late = any((rank.silent_s or 0.0) > limits.LATE_S for rank in still)
            if name in named or is_late:
                return None
            named.add(name)
        return Still(still, over, limit_s, in_group)

    def finished(self, call: Any, answered: Mapping[int, tuple[str, float]]) -> Slow | None:
        """Note a finished call: its longest pause, and how long each rank worked. Return the rank
        that has just become a straggler.

        Args:
            answered: {rank: (its process, seconds until its answer)}.
        """
        if call.method == "construction":
            return None
        key = (call.role, call.method)
        self._pauses[key] = max(self._pauses.get(key, 0.0), call.pause_s)
        work = {
            rank: own_work(seconds, self.heard.get(name))
            for rank, (name, seconds) in answered.items()
        }
        return self.stragglers.add(*key, work)

    def restarted(self, role: str) -> None:
        """Forget how long calls of a role have paused: a new process does everything for the first
        time."""
        self._pauses = {key: pause for key, pause in self._pauses.items() if key[0] != role}


class InARow:
    """Counts what happens in a row. Looks are counted, not seconds: a driver that is suspended, as
    by Ctrl-Z together with what it looks at, makes none."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, int] = {}

    def look(self, what: Hashable, happens: bool) -> int:
        """Return how often it has happened in a row, with this look."""
        self._counts[what] = self._counts.get(what, 0) + 1 if happens else 0
        return self._counts[what]


def meet(ranks: Sequence[Rank]) -> bool:
    """Whether ranks wait for each other in collectives."""
    return any(rank.at is not None and rank.at.in_group for rank in ranks)


def is_judged(rank: Rank, method: str) -> bool:
    """Return whether a rank that makes no progress must be doing something wrong.

    Not if it waits for something that has its own time limit, such as tools or rewards, or for the
    disk, and not without heartbeats.
    """
    if rank.at is None or method in NOT_JUDGED:
        return False
    return not rank.at.waits_for and rank.at.requests != 0


def still_ranks(ranks: Sequence[Rank], limit_s: float) -> list[Rank]:
    """Return the ranks that have made no progress for longer than the limit.

    Ranks that meet in collectives wait for each other, so as long as one of them makes progress,
    none of them is still.
    """
    still = [rank for rank in ranks if rank.still_s > limit_s]
    return [] if meet(ranks) and len(still) < len(ranks) else still


def end_limit(run_limit_s: float, timeout_s: float, longest_pause_s: float | None) -> float:
    """Return after how many seconds without progress a call is ended.

    Args:
        run_limit_s: `trainer.phase_timeout_s`, which applies to a method's first call.
        timeout_s: `trainer.heartbeat_timeout_s`.
        longest_pause_s: longest time without progress in the method's earlier calls; None at the
            first.
    """
    if longest_pause_s is None:
        return run_limit_s
    return min(
        run_limit_s, max(limits.END_FACTOR * timeout_s, limits.ADAPTIVE_FACTOR * longest_pause_s)
    )


def not_entered(ranks: Sequence[Rank], method: str) -> list[int]:
    """Return the ranks for which the others wait; [] if that is unknown.

    They are those that have not begun the call; else those that are not in a collective while
    others are; else those that have passed the fewest turns of their loops.
    """
    known = [rank for rank in ranks if rank.at is not None]
    for behind in (
        {rank.rank for rank in known if rank.at and rank.at.call != method},
        {rank.rank for rank in known if not rank.in_collective},
        fewest_turns(known),
    ):
        if 0 < len(behind) < len(known):
            return sorted(behind)
    return []


def fewest_turns(ranks: Sequence[Rank]) -> set[int]:
    """Return the ranks that have passed the fewest turns of their loops."""
    turns = {rank.rank: rank.at.ticks for rank in ranks if rank.at}
    return {rank for rank, ticks in turns.items() if ticks == min(turns.values())}


def position(at: Progress | None) -> str:
    """Return a position as text: "update, mini-batch 1 of 4, micro-batch 2 of 8"."""
    if at is None:
        return "no heartbeat has arrived from it"
    count = at.pending or None if at.requests is None else at.requests
    requests = "" if count is None else f"{count} unfinished requests"
    waits = f"waits for {at.waits_for}" if at.waits_for else ""
    parts = [at.call or "between two calls", at.part, at.turn, requests, waits]
    return ", ".join(part for part in parts if part)


def own_work(seconds: float, heard: Heard | None) -> float:
    """Return the seconds of a call in which a rank did not wait in collectives.

    Args:
        seconds: from the call to the rank's answer.
        heard: of the rank, after the call.
    """
    if heard is None or not heard.beat.samples:
        return seconds
    return seconds * (1 - heard.beat.waits / heard.beat.samples)
