"""Last line against orphans: a tiny process that outlives its owner, then ends what the owner left behind.

    python -I -S guardian.py OWNER ALL=ID WORKERS=ID [folder]

It watches its parent, the process OWNER. When the owner is gone, in whatever way (kill -9 included), every process that was started
with ALL=ID in its environment is killed, also one that is stopped. When the owner writes something to the guardian's input, it
leaves in order: then only those with WORKERS=ID are killed, and the owner's own children, such as a tracker that still uploads,
are left alone. Either way Ray's processes that write into the folder are killed, and the folder is removed. It needs /proc, so it
does nothing on systems other than Linux. Standard library only: it must be small and start at once.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time

PATIENCE_S = 15.0
"""Processes that start while we look are found by looking again; this is for how long."""


def start(everything: str, workers: str, folder: str | None = None) -> "subprocess.Popen[bytes]":
    """Start a guardian of this process."""
    command = [
        sys.executable,
        "-I",
        "-S",
        __file__,
        str(os.getpid()),
        everything,
        workers,
        *([folder] if folder else []),
    ]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
    )


def dismiss(process: "subprocess.Popen[bytes]") -> None:
    """Leave in order: have the guardian end the workers, and wait for it."""
    try:
        process.communicate(b"done", timeout=PATIENCE_S + 5)
    except (BrokenPipeError, subprocess.TimeoutExpired):
        process.kill()


def marked(entry: str) -> list[int]:
    """Processes, except this one, whose environment at their start had the entry."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if entry.encode() in file.read().split(b"\0"):
                        found.append(int(name))
            except OSError:  # ended meanwhile, or another user's
                continue
    return found


def writing(folder: str) -> list[int]:
    """Ray's agents and workers, except this process and its parent, that have files of the folder (a path without links) open. To give
    itself a title such a process blanks the first part of what its environment was, and the mark may have been there."""
    found = []
    for name in set(filter(str.isdigit, os.listdir("/proc"))) - {
        str(os.getpid()),
        str(os.getppid()),
    }:
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if file.read(5) != b"ray::":
                    continue
            paths = (
                os.readlink(f"/proc/{name}/fd/{number}")
                for number in os.listdir(f"/proc/{name}/fd")
            )
            if any(path.startswith(folder + "/") for path in paths):
                found.append(int(name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def sweep(entry: str, *folders: str) -> None:
    """Kill marked processes, and Ray's of these folders, until two looks in a row find none."""
    quiet, deadline = 0, time.monotonic() + PATIENCE_S
    while quiet < 2 and time.monotonic() < deadline:
        pids = [pid for found in (marked(entry), *map(writing, folders)) for pid in found]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        quiet = 0 if pids else quiet + 1
        time.sleep(0.1)


def main(owner: int, everything: str, workers: str, *folders: str) -> None:
    # The end of the pipe alone would not tell: a process that the owner forked holds it open too.
    orderly = False
    while not orderly and os.getppid() == owner:
        readable, _, _ = select.select([0], [], [], 0.25)
        if readable:
            orderly = bool(os.read(0, 16))
            if not orderly:
                time.sleep(0.25)
    if os.path.isdir("/proc/self"):
        sweep(workers if orderly else everything, *folders)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
