"""Which failure of several is the first cause, and whether the run goes on without the dead.

A failure (`controller.failures.Cause`) says whether another worker's failure explains it
(`is_consequence`), whether the worker's process has ended or cannot be used any more (`ended`), and
in which order failures are reported (`order`).
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from verlite.control import limits


def can_restart(cause: Any, roles: Collection[str]) -> bool:
    """Whether it is the death of a worker of a role that can be started again."""
    return bool(cause.ended and cause.worker.role in roles)


def dead_workers(causes: list[Any], roles: Collection[str]) -> list[Any]:
    """Sort failures, the first cause first. Return the workers to start again; [] ends the run.

    The run goes on if the first cause is the death of a worker of these roles, and such deaths
    explain all other failures.
    """
    causes.sort(key=lambda cause: cause.order)
    dead = [cause for cause in causes if can_restart(cause, roles)]
    others = [cause for cause in causes if not can_restart(cause, roles)]
    if not can_restart(causes[0], roles) or not all(cause.is_consequence for cause in others):
        return []
    return [cause.worker for cause in dead]


@dataclass
class Failures:
    """Failures that become known together. A collective that lost a rank often fails before the
    death of that rank is known."""

    causes: list[Any] = field(default_factory=list)
    _ends_by: float | None = None
    _is_last: bool = False

    @property
    def are_unexplained(self) -> bool:
        """Whether each may be the consequence of another that is not known."""
        return all(cause.is_consequence for cause in self.causes)

    def wait_s(self, is_waiting: bool, now: float) -> float | None:
        """Return how long to wait for further failures; None: no longer.

        Args:
            is_waiting: whether there are calls that have not ended.
        """
        if self._is_last:
            return None
        if self._ends_by is None:
            self._ends_by = now + limits.GRACE_S
        if self.are_unexplained and is_waiting and now < self._ends_by:
            return limits.POLL_S
        self._is_last = True
        return 0.0


@dataclass
class Settling:
    """Waits after deaths that the run survives until all calls have ended.

    Attributes:
        dead: the workers that have died so far. They are killed, should they only be stuck.
    """

    dead: list[Any]
    _ends_by: float = 0.0

    def begin(self, now: float) -> None:
        """The dead are killed: calls that wait for them fail soon."""
        self._ends_by = now + limits.GRACE_S

    def may_be_stuck(self, now: float) -> bool:
        """Whether a call over its limit does not just wait for a worker that was killed."""
        return now >= self._ends_by

    def more(self, causes: list[Any], roles: Collection[str]) -> list[Any] | None:
        """Note failures. Return the workers that have died, too; None if others failed, which ends
        the run."""
        if not all(can_restart(cause, roles) or cause.is_consequence for cause in causes):
            return None
        found = dict.fromkeys(cause.worker for cause in causes if can_restart(cause, roles))
        more = [worker for worker in found if worker not in self.dead]
        self.dead += more
        return more
