"""`trainer.max_runtime`: stop a run in time to save, before its wall time is over."""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from verlite.config.durations import duration_s
from verlite.controller import supervisor_file
from verlite.controller.stop import LEAVE_S, Stop
from verlite.controller.supervisor_file import STARTED
from verlite.trainer.tracking import METRICS, read_lines

SPARE_S = 10.0
UNKNOWN_SAVE_S = 60.0
"""Time that is kept for a checkpoint before the first one has shown how long it takes."""
SLOWER = 1.5
"""A step or a save may take so much longer than the longest so far."""
EARLIER_STEPS = 20
"""Steps of an earlier run in the same directory that show how long steps and saves take."""


def deadline(
    max_runtime: str | None, started: float, environment: Mapping[str, str] = os.environ
) -> float | None:
    """Return when the run must have ended, in seconds since the epoch; None without a limit.

    The time counts from the start of Slurm's allocation if Slurm says it (22.05 and later), else
    from the start of `verlite supervise`, else of the process. The end of the allocation is a
    limit, too.

    Args:
        max_runtime: see `duration_s`.
        started: when the process started.
    """
    if max_runtime is None:
        return None
    known = (_number(environment.get(name)) for name in ("SLURM_JOB_START_TIME", STARTED))
    begin = next((number for number in known if number is not None), started)
    end = begin + duration_s(max_runtime)
    allocation_end = _number(environment.get("SLURM_JOB_END_TIME"))
    return end if allocation_end is None else min(end, allocation_end)


def _number(text: str | None) -> float | None:
    """Return seconds since the epoch; None if the text is not such a number."""
    try:
        number = float(text or "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@dataclass
class TimeLimit:
    """Compares the time that is left with the time that steps and saves take.

    Attributes:
        deadline: see `deadline`.
        step_s, save_s: the longest step and the longest save so far, 0 before the first.
    """

    deadline: float | None
    step_s: float = 0.0
    save_s: float = 0.0

    def observe(self, metrics: Mapping[str, float | None]) -> None:
        """Take the durations from a line of metrics.jsonl."""
        self.step_s = max(self.step_s, metrics.get("timing_s/step") or 0.0)
        self.save_s = max(self.save_s, metrics.get("timing_s/save_checkpoint") or 0.0)

    @property
    def end_s(self) -> float:
        """How long saving and ending may take."""
        return SLOWER * (self.save_s or UNKNOWN_SAVE_S) + LEAVE_S + SPARE_S

    def is_over(self, now: float | None = None) -> bool:
        """Whether only the time to save and to end is left."""
        return self._left(now) < self.end_s

    def fits_step(self, now: float | None = None) -> bool:
        """Whether there is time for another step, after which the run can save and end."""
        return self._left(now) >= SLOWER * self.step_s + self.end_s

    def _left(self, now: float | None) -> float:
        if self.deadline is None:
            return float("inf")
        return self.deadline - (time.time() if now is None else now)


def time_limit(max_runtime: str | None, run_dir: Path) -> TimeLimit:
    """Return the run's wall time, with the durations of earlier steps of the same run directory."""
    limit = TimeLimit(deadline(max_runtime, psutil.Process().create_time()))
    if limit.deadline is not None:
        for line in read_lines(run_dir / METRICS)[-EARLIER_STEPS:]:
            limit.observe(line)
    return limit


def stop_for_time(stop: Stop, max_runtime: str | None, run_dir: Path) -> None:
    """Ask a run to stop, because trainer.max_runtime is nearly over. `verlite supervise` does not
    start it again. Raises KeyboardInterrupt if no finished step has to be saved."""
    name = f"trainer.max_runtime={max_runtime}"
    supervisor_file.tell(supervisor_file.Told(str(run_dir), f"{name} is over"))
    stop.request(name)
