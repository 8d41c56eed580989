"""Ranks that are slow in one call after another, by the seconds in which they did not wait for
others."""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from verlite.control import limits


@dataclass(frozen=True)
class Slow:
    """A rank that has just become a straggler. work: {rank: seconds}."""

    rank: int
    work: Mapping[int, float]


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
    is_slow = work[slowest] > limits.SLOW_RATIO * others and more_s > limits.SLOW_S
    return (slowest, more_s) if is_slow else None


@dataclass
class Stragglers:
    """Finds ranks that are slow in one call after another.

    Attributes:
        seconds: {role: the most seconds by which a slow rank exceeded the others} since `take`.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    _in_a_row: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    _named: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, role: str, method: str, work: Mapping[int, float]) -> Slow | None:
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
        self._in_a_row[key] = [*self._in_a_row[key], rank][-limits.SLOW_CALLS :]
        if self._in_a_row[key] != [rank] * limits.SLOW_CALLS or self._named.get(key) == rank:
            return None
        self._named[key] = rank
        return Slow(rank, work)

    def take(self, role: str) -> float:
        """Return the seconds of a role, 0 if no rank was slow, and reset them."""
        return self.seconds.pop(role, 0.0)
