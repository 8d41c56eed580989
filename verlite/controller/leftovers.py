"""Clean up after a run whose guardian was killed together with its driver.

A run notes its mark and its private folder in its run directory, with its driver's process and the
identity of the directory. What has that mark is left over if the driver has ended. The next run in
that directory holds the directory's lock, but the directory may be a copy of that of a living run.
"""

import json
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from verlite.controller import guardian, node
from verlite.files import read_json, replace_file

NOTE = "logs/processes.json"
"""File in the run directory, while a run is connected to Ray."""
MARK = re.compile(r"VERLITE_RUN=\d+-[0-9a-f]{16}")
FOLDER = re.compile(r"/tmp/verlite-[a-z0-9_]+")


def note(run_dir: Path, mark: str, folder: str | None) -> None:
    """Write down what this process's run may leave."""
    driver = node.this_process()
    noted = {
        "mark": mark,
        "folder": folder,
        "driver": [driver.pid, driver.started],
        "directory": _identity(run_dir),
    }
    with suppress(OSError):
        replace_file(run_dir / NOTE, json.dumps(noted))


def _identity(run_dir: Path) -> list[int]:
    """Return what a copy of the directory does not have: its disk and its number there."""
    status = os.stat(run_dir)
    return [status.st_dev, status.st_ino]


def forget(run_dir: Path) -> None:
    """Remove the note: nothing is left."""
    with suppress(OSError):
        (run_dir / NOTE).unlink(missing_ok=True)


def clean(run_dir: Path) -> bool:
    """Kill the processes of the last run in this directory and remove its private folder.

    Does nothing if the note came with a copy of another run's directory, or if that driver lives.

    Returns whether there were any processes.
    """
    try:
        noted = read_json(run_dir / NOTE)
        mark, folder = str(noted["mark"]), str(noted["folder"])
        pid, started = noted["driver"]
        state = node.process_state(node.Process(int(pid), int(started)))
        if noted["directory"] != _identity(run_dir) or state not in ("gone", "dead"):
            return False
    except (OSError, ValueError, TypeError, KeyError):
        return False
    folders = [folder] if is_private(folder) else []
    found = False
    if MARK.fullmatch(mark) and os.path.isdir("/proc/self"):
        found = guardian.kill(mark, False, *folders)
        guardian.sweep(mark, False, *folders)
    for left in folders:
        shutil.rmtree(left, ignore_errors=True)
    forget(run_dir)
    return found


def is_private(folder: str) -> bool:
    """Whether this is a folder of the user that a run has created."""
    if not FOLDER.fullmatch(folder):
        return False
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
