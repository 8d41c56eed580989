"""`trainer.max_runtime`: stop a run in time to save, before its wall time is over."""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from verlite.config.rules.declared import duration_s
from verlite.control.limits import EARLIER_STEPS
from verlite.controller.supervisor_file import STARTED
from verlite.trainer.tracking import METRICS, read_lines


def deadline(max_runtime: str | None) -> float | None:
    """Return when the run must have ended, on the clock of `time.monotonic`; None without a
    limit."""
    end = end_of_wall_time(max_runtime, psutil.Process().create_time())
    return None if end is None else end - time.time() + time.monotonic()


def end_of_wall_time(
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


def longest(max_runtime: str | None, run_dir: Path) -> tuple[float, float]:
    """Return the longest of the last steps, and of their saves, of earlier runs in the directory.

    In seconds; 0.0 if there was none, or without a limit.
    """
    lines = [] if max_runtime is None else read_lines(run_dir / METRICS)[-EARLIER_STEPS:]

    def most(name: str) -> float:
        return max((line.get(name) or 0.0 for line in lines), default=0.0)

    return most("timing_s/step"), most("timing_s/save_checkpoint")
