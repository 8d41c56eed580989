"""A small process that outlives its owner and then kills what the owner left behind.

    python -I -S guardian.py OWNER NAME=VALUE [--head=HOST:PORT] [folder]

All processes of a run carry the run's mark in their environment: NAME=VALUE for the owner's own
children, NAME=VALUE/... for Ray, the workers and their children.

The guardian watches its parent, the process OWNER. When the owner ends in any way, including kill
-9, the guardian kills every marked process, including stopped ones. When the owner writes to the
guardian's input, the owner is exiting normally. Then the guardian kills only the processes with
NAME=VALUE/..., and spares the owner's own children, such as a tracker that is still uploading.
In both cases it kills Ray's processes that have files of the folder open, and removes the folder.

On a node whose network is cut nobody tells a worker that its run has ended, and Ray takes about two
minutes to notice. With --head the guardian therefore opens a TCP connection there every few
seconds, and kills its owner, too, if that fails several times in a row:
--head=HOST:PORT,SECONDS,TIMEOUT,TIMES.

It needs /proc, so it does nothing on systems other than Linux. It uses the standard library only,
because it must be small and start at once.
"""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

SWEEP_S = 15.0
"""How long to look for marked processes again, to find those that start during the search."""


def start(
    mark: str, folder: str | None = None, head: str | None = None
) -> "subprocess.Popen[bytes]":
    """Start a guardian of this process.

    Args:
        mark: NAME=VALUE.
        head: host:port of Ray's head, without which this process must end.
    """
    from verlite.control import limits  # which the program below does not find

    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark]
    if head:
        times = (limits.HEAD_EVERY_S, limits.HEAD_TIMEOUT_S, limits.HEAD_FAILURES)
        command.append(f"--head={','.join(map(str, (head, *times)))}")
    if folder:
        command.append(folder)
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def dismiss(process: "subprocess.Popen[bytes]") -> None:
    """Exit normally: have the guardian kill the workers, and wait until it has ended."""
    try:
        process.communicate(b"done", timeout=SWEEP_S + 5)
    except (BrokenPipeError, subprocess.TimeoutExpired):
        process.kill()


def marked(mark: str, workers_only: bool = False) -> list[int]:
    """Return the ids of the other processes that were started with the mark.

    Args:
        mark: NAME=VALUE; matches that entry and NAME=VALUE/... in the environment.
        workers_only: match only NAME=VALUE/...
    """
    exact = mark.encode()
    prefix = exact + b"/"
    found = []
    for name in _other_processes(os.getpid()):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                entries = file.read().split(b"\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        for entry in entries:
            if entry.startswith(prefix) or (entry == exact and not workers_only):
                found.append(int(name))
                break
    return found


def ray_processes_using(folder: str) -> list[int]:
    """Return the ids of Ray's processes that have files of the folder open.

    This process and its parent are left out.

    Such a process sets its title by overwriting the first part of its environment, which may have
    contained the mark. The folder must be a path without links.
    """
    found = []
    for name in _other_processes(os.getpid(), os.getppid()):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if file.read(5) != b"ray::":
                    continue
            descriptors = f"/proc/{name}/fd"
            for number in os.listdir(descriptors):
                if os.readlink(f"{descriptors}/{number}").startswith(folder + "/"):
                    found.append(int(name))
                    break
        except OSError:  # the process has ended, or belongs to another user
            continue
    return found


def _other_processes(*excluded: int) -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in excluded]


def kill(mark: str, workers_only: bool, *folders: str) -> bool:
    """Kill marked processes and Ray's processes that use the folders.

    Returns whether there were any.
    """
    pids = marked(mark, workers_only)
    for folder in folders:
        pids += ray_processes_using(folder)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    return bool(pids)


def sweep(mark: str, workers_only: bool, *folders: str) -> None:
    """Repeat `kill` until it finds no process twice in a row."""
    empty_passes = 0
    deadline = time.monotonic() + SWEEP_S
    while empty_passes < 2 and time.monotonic() < deadline:
        found_any = kill(mark, workers_only, *folders)
        empty_passes = 0 if found_any else empty_passes + 1
        time.sleep(0.1)


def answers(address: str, timeout_s: float) -> bool:
    """Return whether something accepts TCP connections at host:port within so many seconds."""
    host, _, port = address.rpartition(":")
    try:
        server = (host.strip("[]"), int(port))
        socket.create_connection(server, timeout=timeout_s).close()
        return True
    except OSError:
        return False


def main(owner: int, mark: str, *folders: str) -> None:
    """Wait until the owner exits, or loses Ray's head, then clean up."""
    head, every_s, timeout_s, times = "", 0.0, 0.0, 0.0
    if folders and folders[0].startswith("--head="):
        head, *numbers = folders[0].partition("=")[2].split(",")
        (every_s, timeout_s, times), folders = map(float, numbers), folders[1:]
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # all processes of a job or service may get them
    failures = 0
    next_try = time.monotonic() + every_s
    # A process that the owner forked also keeps the pipe open, so its end alone does not show that
    # the owner has exited. The parent's id does.
    normal_exit = False
    while not normal_exit and os.getppid() == owner:
        if head and time.monotonic() > next_try:
            failures = 0 if answers(head, timeout_s) else failures + 1
            next_try = time.monotonic() + every_s
            if failures == times and os.getppid() == owner:
                os.kill(owner, signal.SIGKILL)
        readable, _, _ = select.select([0], [], [], 0.25)
        if readable:
            normal_exit = bool(os.read(0, 16))
            if not normal_exit:
                time.sleep(0.25)
    if os.path.isdir("/proc/self"):
        sweep(mark, normal_exit, *folders)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
