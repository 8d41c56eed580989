"""What may be given up in which phase, and how long a stop waits.

| signal | when | what happens |
|---|---|---|
| SIGTERM, SIGUSR1, SIGHUP | no finished step has to be saved | the main thread is interrupted |
| SIGTERM, SIGUSR1, SIGHUP | a finished step is not saved yet | noted; the run saves, then ends |
| Ctrl-C | always | the main thread is interrupted |
| a second signal | a finished step is not saved yet | the save has another `stop_grace_s` seconds |
| a second signal | otherwise | the process ends at once |
| a third signal | always | the process ends at once |

A closed terminal sends SIGHUP, often twice: from the kernel and from the shell. After another
signal it is not counted. What interrupts the main thread ends the process within END_S.
"""

from dataclasses import dataclass
from enum import Enum
from math import inf

from verlite.control import limits
from verlite.control.commands import SayNow

INTERRUPT = "SIGINT"


class Phase(Enum):
    """Where a run is."""

    START = "before the first step"
    SAMPLE = "before the step's first update"
    RESTART = "starting rollout engines again"
    RESYNC = "giving restarted engines the weights"
    UPDATE = "from the step's first update to the end of its weight sync"
    FINISH = "a finished step"
    VALIDATE = "validating after a step"
    SAVE = "saving"
    IDLE = "between steps"
    END = "after the last step"


GIVEN_UP = frozenset({Phase.SAMPLE, Phase.RESTART, Phase.VALIDATE})
"""Phases that a stop gives up. Not RESYNC: giving that up would fail the actor, which has to save.
RESTART after an update as well: nothing is generated after the stop."""


@dataclass
class Patience:
    """Counts signals, and knows until when a stop waits."""

    first: str | None = None
    """What asked for the stop first."""
    signals: int = 0
    _last: float = -inf
    _idle_since: float = 0.0
    """When the run last had something to save, when the stop was requested, or when the exit code
    was decided."""
    _limit_s: float = 0.0
    """How long it may live since then; 0: no limit."""
    _give_up_at: float | None = None

    def begin(self, name: str, now: float) -> None:
        """Start to wait, unless that has begun."""
        if self.first is None:
            self.first = name
            if not self._limit_s:
                self.leave(limits.END_S, now)

    def leave(self, limit_s: float, now: float) -> None:
        """Let the process live for so many seconds."""
        self._idle_since, self._limit_s = now, limit_s

    @property
    def waits(self) -> bool:
        """Whether a stop was requested or the exit code is decided: time then matters."""
        return self._limit_s > 0.0

    def signal(self, name: str, now: float) -> bool:
        """Count a signal. Returns whether it counts."""
        is_first = self.first is None or (self.first == name and not self.signals)
        if not is_first and (name == "SIGHUP" or now - self._last <= limits.REPEAT_S):
            return False
        self.begin(name, now)
        self.signals += 1
        self._last = now
        return True

    def look(
        self, signal: str | None, now: float, saves: bool, decided: bool, grace_s: float
    ) -> SayNow | str | None:
        """Return what to say about the wait, or why it is over.

        Args:
            signal: a signal that has just been counted.
            saves: whether the run has to save before it ends.
            decided: whether the exit code is decided.
        """
        if not self.waits:
            return None
        if signal is not None and (self.signals > 2 or (self.signals == 2 and not saves)):
            count = "a second" if self.signals == 2 else "a third"
            return f"{count} signal, {signal}, ended the process at once"
        if saves:
            self.leave(limits.LEAVE_S, now)
            return self._look_at_save(signal, now, grace_s)
        if now - self._idle_since <= self._limit_s:
            return None
        if decided:
            return f"cleaning up took longer than {self._limit_s:g} s, so the process was ended"
        return f"it did not end within {self._limit_s:g} s, so it was ended without cleaning up"

    def _look_at_save(self, signal: str | None, now: float, grace_s: float) -> SayNow | str | None:
        if self._give_up_at is None:
            self._give_up_at = now + grace_s
        if signal is not None and self.signals == 2:
            self._give_up_at = now + grace_s
            return SayNow(f"a second signal: the save has {grace_s:g} s")
        if now <= self._give_up_at:
            return None
        if self.signals > 1:
            return f"not saved within {grace_s:g} s of the second signal"
        self._give_up_at = inf
        another = f"; another signal gives it {grace_s:g} s more" if self.signals else ""
        return SayNow(
            f"{self.first}: not saved within trainer.stop_grace_s={grace_s:g}, {{where}}. The run "
            f"still saves and then ends{another}. {{checkpoint}}"
        )
