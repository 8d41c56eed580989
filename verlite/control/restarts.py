"""Whether a command that has ended is started again, and when: `verlite supervise`."""

from dataclasses import dataclass

from verlite.control import limits
from verlite.control.exit_codes import DONE, FAILED, INTERRUPTED, LOST, REFUSED, STOPPED
from verlite.control.patience import INTERRUPT

STOPS = ("SIGTERM", "SIGUSR1", "SIGHUP")
"""Signals that stop a command, which resumes when it is started again."""
CRASHES = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL")
"""Signals that end a command which may succeed when it is started again."""
MISSING = ("NoCluster", "ResourcesMissing", "ServiceMissing")
"""Types in error.json of a run that did not find its cluster, its devices or a service."""


@dataclass(frozen=True)
class Attempt:
    """How one run of the command ended.

    Attributes:
        code: exit code as a shell reports it: 128 + N if signal N ended it.
        signal: name of the signal that ended it, else "".
        run_dir: whether its run directory is known.
        error: first line of its error.json; "" if it has written none.
        error_type: class of that error.
        step: last step that it has written to metrics.jsonl; without one, that of the checkpoint
            from which it resumed, if the supervisor has seen it saved; otherwise None.
        saved: step of the newest checkpoint since the supervisor started; None without one.
        no_restart: why the command must not be started again although it could resume; "": it may.
    """

    code: int
    run_dir: str = ""
    error: str = ""
    step: int | None = None
    saved: int | None = None
    no_restart: str = ""
    error_type: str = ""
    signal: str = ""

    @property
    def ending(self) -> str:
        """How it ended, for messages."""
        text = f"was ended by {self.signal}" if self.signal else f"ended with exit code {self.code}"
        return f"{text} ({self.error})" if self.error else text

    @property
    def is_stop(self) -> bool:
        """Whether it was stopped on request."""
        return self.code == STOPPED or self.signal in STOPS

    @property
    def misses_cluster(self) -> bool:
        """Whether it did not start because a cluster, devices or a service were not there."""
        return self.code == REFUSED and self.error_type in MISSING

    @property
    def vanished(self) -> bool:
        """Whether native code has ended it: a failure of the run's own has a report."""
        return self.code == FAILED and bool(self.run_dir) and not self.error

    @property
    def progress(self) -> tuple[int, int]:
        """(step of the newest checkpoint, last step), each -1 without one."""
        return -1 if self.saved is None else self.saved, -1 if self.step is None else self.step


@dataclass(frozen=True)
class Again:
    """Start the command again after so many seconds."""

    after_s: float
    why: str


@dataclass(frozen=True)
class Leave:
    """End with this exit code. `why`: "" if the command has said it."""

    code: int
    why: str = ""


@dataclass
class Restarts:
    """Counts restarts without progress. Progress is a checkpoint of a later step.

    In a run that has no checkpoint yet, a later step in metrics.jsonl is progress, too.

    Attributes:
        max_restarts: restarts in a row without progress.
        same_step: failed attempts in a row that end at the same step without progress. Attempts
            that did not find their cluster do not count. 0: no limit.
        restarts, failures, at_step: counted so far.
        lost: whether an attempt lost something, and none has made progress since. A lost node may
            stay away for longer than the run waits for it.
    """

    max_restarts: int
    same_step: int
    restarts: int = 0
    failures: int = 0
    at_step: int = 0
    lost: bool = False
    best: tuple[int, int] = (-1, -1)
    last_step: int | None = None

    def ended(self, attempt: Attempt, asked: str = "") -> Again | Leave:
        """Count an attempt that has ended, and decide what follows.

        Args:
            asked: name of the signal that has reached the supervisor; "" without one.
        """
        has_progress = self._has_progress(attempt)
        self.lost = attempt.code == LOST or (self.lost and not has_progress)
        if asked:
            return Leave(self.code_when_asked(attempt, asked))
        if not self._may_succeed(attempt):
            return Leave(attempt.code, attempt.no_restart and f"no restart: {attempt.no_restart}")
        self._count(attempt, has_progress)
        refusal = self._refusal(attempt)
        if refusal:
            return Leave(FAILED, f"the command {attempt.ending}. No restart: {refusal}")
        count = f"restart {self.restarts} of {self.max_restarts}"
        if has_progress and attempt.saved is not None:
            count += f" since checkpoint {attempt.saved}"
        elif not has_progress:
            count += " without a new checkpoint"
        pause_s = self._pause_s()
        return Again(pause_s, f"the command {attempt.ending}; {count}, in {pause_s:g} s")

    def code_when_asked(self, attempt: Attempt, asked: str) -> int:
        """Return the exit code after a signal to the supervisor: there is no restart."""
        if asked == INTERRUPT:
            return attempt.code if attempt.code in (DONE, FAILED, REFUSED) else INTERRUPTED
        return STOPPED if self._may_succeed(attempt) else attempt.code

    def _has_progress(self, attempt: Attempt) -> bool:
        """Whether an attempt that is not counted yet went further than those before."""
        saved, step = attempt.progress
        return saved > self.best[0] or (saved < 0 and step > self.best[1])

    def _may_succeed(self, attempt: Attempt) -> bool:
        """Whether the same command may succeed now."""
        if attempt.no_restart:
            return False
        if attempt.is_stop or attempt.code == LOST or attempt.signal in CRASHES or attempt.vanished:
            return True
        return self.lost and attempt.misses_cluster

    def _count(self, attempt: Attempt, has_progress: bool) -> None:
        saved, step = attempt.progress
        if has_progress:
            self.restarts = self.failures = self.at_step = 0
        self.best = max(saved, self.best[0]), max(step, self.best[1])
        self.restarts += 1
        if attempt.is_stop:
            return
        self.failures += 1
        if not attempt.misses_cluster:
            self.at_step = self.at_step + 1 if attempt.step == self.last_step else 1
            self.last_step = attempt.step

    def _refusal(self, attempt: Attempt) -> str:
        """Return why there is no restart; "": there is one."""
        step = attempt.progress[1]
        where = "before the first step" if step < 1 else f"after step {step}"
        if self.same_step and self.at_step >= self.same_step:
            return f"{self.at_step} attempts in a row failed {where}"
        if self.restarts > self.max_restarts:
            return f"{self.max_restarts} restarts brought no new checkpoint; the last ended {where}"
        return ""

    def _pause_s(self) -> float:
        if not self.failures:
            return limits.AFTER_STOP_S
        return min(limits.LONGEST_PAUSE_S, limits.FIRST_PAUSE_S * float(2 ** (self.failures - 1)))


@dataclass
class Frozen:
    """Counts for how long SIGSTOP has stopped the command, in looks: a supervisor that is itself
    stopped, as by Ctrl-Z, counts nothing."""

    seconds: float = 0.0

    def look(self, is_stopped: bool) -> str:
        """Return "say" once, when it has been stopped for FROZEN_S; "kill" from FROZEN_END_S on;
        otherwise "". To be called every LOOK_S."""
        before, self.seconds = self.seconds, self.seconds + limits.LOOK_S if is_stopped else 0.0
        if self.seconds >= limits.FROZEN_END_S:
            return "kill"
        return "say" if before < limits.FROZEN_S <= self.seconds else ""
