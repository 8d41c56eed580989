"""What heartbeats mean: which rank is frozen, which makes no progress, which is slow.

Plain functions of facts. `supervise` gathers the facts and acts.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from verlite.controller.heartbeat import Heard
from verlite.progress import Progress

END_FACTOR = 4
"""A call without progress is named after `trainer.heartbeat_timeout_s`, and ended after that many
times as long at the earliest: a file system or a network may pause for a minute."""
ADAPTIVE_FACTOR = 10
"""A call without progress is ended after that many times the longest pause of its earlier calls."""
IN_BACKGROUND = "finished"
"""The call that asks for samples that were drawn in the background. It is short, so the steps of
the engine count in its place."""
NOT_JUDGED = ("construction", "load", "save", "export_hf", "fetch_weights")
"""Calls to which only the run's limit (`trainer.phase_timeout_s`) applies. The first four read or
write large files, and storage may pause for many minutes. The last one waits for the trainer, whose
call is judged."""

SLOW_RATIO = 1.5
SLOW_S = 1.0
"""A rank is slow if its work takes SLOW_RATIO times as long as the median of the others, and at
least SLOW_S seconds longer."""
SLOW_CALLS = 3
"""A straggler is the slow rank of that many calls of a method in a row."""


@dataclass(frozen=True)
class Rank:
    """What is known of one rank that has not answered a call.

    Attributes:
        silent_s: seconds since its last heartbeat; None if none has ever arrived.
        still_s: seconds since it made progress, or since the call was made.
        at: its position; None if no heartbeat has ever arrived.
        in_collective: whether its last heartbeat came from inside a collective.
    """

    rank: int
    silent_s: float | None
    still_s: float
    at: Progress | None
    in_collective: bool = False


def rank_facts(rank: int, heard: Heard | None, clock: float, elapsed_s: float) -> Rank:
    """Return the facts about a rank.

    Args:
        heard: what has been heard of its process.
        clock: the receiver's time now.
        elapsed_s: seconds since the call was made.
    """
    if heard is None:
        return Rank(rank, None, elapsed_s, None)
    still_s = min(elapsed_s, clock - heard.moved)
    return Rank(rank, clock - heard.heard, still_s, heard.beat.at, heard.beat.in_collective)


def engine_facts(facts: Rank, heard: Heard | None, clock: float) -> Rank:
    """Return the facts about a rank whose engine samples in the background: an engine with requests
    makes no progress since its last step."""
    if heard is None or not heard.beat.at.pending:
        return facts
    return replace(facts, still_s=max(facts.still_s, clock - heard.stepped))


def is_silent(rank: Rank, timeout_s: float) -> bool:
    """Return whether heartbeats of this rank have stopped. The process must then be looked at."""
    return rank.silent_s is not None and rank.silent_s > timeout_s


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
    if any(rank.at is not None and rank.at.in_group for rank in ranks):
        all_still = all(rank.still_s > limit_s for rank in ranks)
        return list(ranks) if all_still else []
    return [rank for rank in ranks if rank.still_s > limit_s]


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
    return min(run_limit_s, max(END_FACTOR * timeout_s, ADAPTIVE_FACTOR * longest_pause_s))


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


def slow_rank(work: Mapping[int, float]) -> tuple[int, float] | None:
    """Return (rank, seconds more than the median of the others) of the slow rank of a call.

    Args:
        work: {rank: seconds of its own work, without waiting for other ranks}.
    """
    if len(work) < 2:
        return None
    slowest = max(work, key=lambda rank: work[rank])
    others = statistics.median(seconds for rank, seconds in work.items() if rank != slowest)
    more_s = work[slowest] - others
    is_slow = work[slowest] > SLOW_RATIO * others and more_s > SLOW_S
    return (slowest, more_s) if is_slow else None


def own_work(seconds: float, heard: Heard | None) -> float:
    """Return the seconds of a call in which a rank did not wait in collectives.

    Args:
        seconds: from the call to the rank's answer.
        heard: of the rank, after the call.
    """
    if heard is None or not heard.beat.samples:
        return seconds
    return seconds * (1 - heard.beat.waits / heard.beat.samples)


@dataclass
class Stragglers:
    """Finds ranks that are slow in one call after another.

    Attributes:
        seconds: {role: the most seconds by which a slow rank exceeded the others} since `take`.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    _in_a_row: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    _named: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, role: str, method: str, work: Mapping[int, float]) -> int | None:
        """Note a finished call. Return the rank that has just become a straggler, else None.

        A rank is named once, and again only after a call in which it was not slow.
        """
        key = (role, method)
        found = slow_rank(work)
        if found is None:
            self._in_a_row[key].clear()
            self._named.pop(key, None)
            return None
        rank, more_s = found
        self.seconds[role] = max(self.seconds.get(role, 0.0), more_s)
        self._in_a_row[key] = [*self._in_a_row[key], rank][-SLOW_CALLS:]
        if self._in_a_row[key] != [rank] * SLOW_CALLS or self._named.get(key) == rank:
            return None
        self._named[key] = rank
        return rank

    def take(self, role: str) -> float:
        """Return the seconds of a role, 0 if no rank was slow, and start anew."""
        return self.seconds.pop(role, 0.0)
