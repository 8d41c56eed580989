"""The report of a run to the `verlite supervise` that has started it: a small file."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from verlite.files import read_json, replace_file

VARIABLE = "VERLITE_SUPERVISOR"
"""Environment variable with the path of the file."""
STARTED = "VERLITE_SUPERVISE_STARTED"
"""Environment variable with the time at which the supervisor started, in seconds since the
epoch."""
RESTARTS = "VERLITE_SUPERVISE_RESTARTS"
"""Environment variable with how often the supervisor has started the command again."""
ERROR_FILE = "error.json"
"""File in the run directory with the error that ended the last run there."""


@dataclass(frozen=True)
class Report:
    """What the file contains.

    Attributes:
        run_dir: the run directory; "" until the run has locked it.
        no_restart: why the command must not be started again although it could resume; "": it may.
    """

    run_dir: str = ""
    no_restart: str = ""


def write(report: Report) -> None:
    """Write the file, if this process has a supervisor."""
    path = os.environ.get(VARIABLE)
    if path:
        with suppress(OSError):  # the supervisor has ended, or runs outside this container
            replace_file(Path(path), json.dumps(asdict(report)))


def read(path: Path) -> Report:
    """Return the run's last report; an empty one without a file."""
    try:
        return Report(**read_json(path))
    except (OSError, ValueError, TypeError):
        return Report()


def started() -> float | None:
    """Return when the supervisor of this process started, in seconds since the epoch."""
    try:
        return float(os.environ[STARTED])
    except (KeyError, ValueError):
        return None


def restarted_since() -> float | None:
    """Return `started()` if the supervisor has started this process again. None for its first
    start, and without a supervisor."""
    return started() if os.environ.get(RESTARTS, "0") != "0" else None
