"""Clean up after a run whose guardian was killed together with its driver.

A run notes its mark and its private folder in its run directory. The next run in that directory
holds the directory's lock, so the earlier driver has ended, and what has that mark is left over.
"""

import json
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from verlite.controller import guardian
from verlite.files import read_json, replace_file

NOTE = "logs/processes.json"
"""File in the run directory, while a run is connected to Ray."""
MARK = re.compile(r"VERLITE_RUN=\d+-[0-9a-f]{16}")
FOLDER = re.compile(r"/tmp/verlite-[a-z0-9_]+")


def note(run_dir: Path, mark: str, folder: str | None) -> None:
    """Write down what this run may leave."""
    with suppress(OSError):
        replace_file(run_dir / NOTE, json.dumps({"mark": mark, "folder": folder}))


def forget(run_dir: Path) -> None:
    """Remove the note: nothing is left."""
    with suppress(OSError):
        (run_dir / NOTE).unlink(missing_ok=True)


def clean(run_dir: Path) -> bool:
    """Kill the processes of the last run in this directory and remove its private folder.

    Returns whether there were any processes.
    """
    try:
        noted = read_json(run_dir / NOTE)
        mark, folder = str(noted["mark"]), str(noted["folder"])
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
