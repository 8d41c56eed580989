"""Facts about one machine, and control of its processes. Imports only light modules."""

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from verlite.files import size_text

PROCESS_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for the disk",
    "T": "stopped by a signal",
    "Z": "dead",
}
"""Names of the state letters in /proc/PID/stat."""
STACK_LINE = re.compile(r'(Current t|T)hread 0x[0-9a-f]+ |  File "|  <')
"""A line of faulthandler's dump."""
END_S = 5.0
"""Longest wait for the end of killed processes. It is shorter than that for a node's answer."""
DUMP_S = 5.0
"""Longest wait for the dump of a process."""
DUMP_QUIET_S = 0.3
FULL_BYTES = 64 << 20
FULL_SHARE = 0.02
"""A disk with less free space than FULL_BYTES and than this share of its size is full."""
LOG_HEADER = "--- pid"
"""A worker's log starts with this text and the process id, once per process."""
SIGTERM_LINE = "--- received SIGTERM"
"""A worker that receives SIGTERM writes this into its log."""


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory, 0 if unknown.

    The count is that of this container, or of the machine outside a container.
    """
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            for line in Path(path).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        except (OSError, ValueError):
            continue
    return 0


def full_disks(*folders: str) -> str:
    """Return which disks of this machine are full, "" if none is: "/tmp (0 bytes free)".

    Args:
        folders: to look at, besides /tmp and /dev/shm, which Ray and the engines use.
    """
    found = []
    for folder in ("/tmp", "/dev/shm", *folders):
        with suppress(OSError):
            disk = shutil.disk_usage(folder)
            if disk.free < min(FULL_BYTES, FULL_SHARE * disk.total):
                found.append(f"{folder} ({size_text(disk.free)} free)")
    return ", ".join(found)


def tail(path: str, lines: int) -> str:
    """Return the last lines of a text file, "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 400 * lines))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


@dataclass(frozen=True)
class Process:
    """A process id with the process's start time, because the kernel reuses process ids.

    Attributes:
        started: clock ticks since boot; 0 on systems without /proc.
    """

    pid: int
    started: int


def this_process() -> Process:
    """Return the current process."""
    return process(os.getpid())


def process(pid: int) -> Process:
    """Return the process with this id. Its start time is 0 if there is none, or no /proc."""
    stat: list[str] = []
    with suppress(OSError):
        stat = _stat(pid)
    return Process(pid, int(stat[19]) if stat else 0)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third (the state) on, [] without a process.

    Raises:
        OSError: it cannot be read, for example because too many files are open.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def process_state(process: Process) -> str:
    """Return a value of PROCESS_STATES, "gone", or "unknown" if it cannot be read."""
    try:
        stat = _stat(process.pid)
    except OSError:
        return "unknown"
    if not stat or int(stat[19]) != process.started:
        return "gone"
    return PROCESS_STATES.get(stat[0], stat[0])


def send_signal(processes: Iterable[Process], number: int) -> None:
    """Send a signal to those of the processes that still exist."""
    for process in processes:
        if process.started == 0 or process_state(process) not in ("gone", "unknown"):
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def kill(processes: Iterable[Process]) -> None:
    """Kill processes, and what each of them has started in its session or process group: its own
    end may have left that. Wait up to END_S for their ends: vLLM fails if another process frees
    memory of its GPU while it starts, so a new engine must not start before."""
    processes = list(processes)
    send_signal(processes, signal.SIGKILL)
    left = _descendants(processes)
    send_signal(left, signal.SIGKILL)
    ends_by = time.monotonic() + END_S
    for process in (*processes, *left):
        while process_state(process) not in ("gone", "dead") and time.monotonic() < ends_by:
            time.sleep(0.01)


def _descendants(processes: Sequence[Process]) -> list[Process]:
    """Return the other processes in the sessions and process groups that these lead or have led.

    A process id is not used again while a session or a group has it.
    """
    leaders = {str(one.pid): one for one in processes if one.started}
    found = []
    for name in os.listdir("/proc") if leaders else []:
        with suppress(OSError):
            stat = _stat(int(name)) if name.isdecimal() else []
            group, session, started = (stat[2], stat[3], stat[19]) if stat else ("", "", "0")
            leader = leaders.get(session) or leaders.get(group)
            if leader is not None and name not in leaders and int(started) >= leader.started:
                found.append(Process(int(name), int(started)))
    return found


class Diagnosis(NamedTuple):
    """What a node knows about a worker.

    Attributes:
        log: the end of what its process wrote into its log.
        state: see `process_state`.
        oom_kills: see `oom_kills`.
        full_disks: see `full_disks`.
    """

    log: str
    state: str
    oom_kills: int
    full_disks: str = ""


def diagnose(workers: Iterable[tuple[str, Process | None]]) -> list[Diagnosis]:
    """Return a diagnosis for each (log path, process) on this node."""
    found = []
    for log, process in workers:
        text = _log_of(process, tail(log, 400))
        state = "unknown" if process is None else process_state(process)
        found.append(Diagnosis(text, state, oom_kills(), full_disks(os.path.dirname(log))))
    return found


class Dump(NamedTuple):
    """What a process is doing.

    Attributes:
        host: name of this node.
        state: see `process_state`.
        stacks: of all its threads, as faulthandler writes them; "" if it did not write them.
    """

    host: str
    state: str
    stacks: str


def dump_stacks(workers: Iterable[tuple[str, Process]]) -> list[Dump]:
    """Return the stacks of each (log path, process) on this node.

    The processes write them into their logs at SIGUSR1 (`worker_actor`).
    """
    started = [(log, process, _size(log)) for log, process in workers]
    send_signal([process for _, process, _ in started], signal.SIGUSR1)
    texts = [""] * len(started)
    deadline = time.monotonic() + DUMP_S
    # Written threads by threads: a dump is complete when nothing was added for a while.
    while time.monotonic() < deadline:
        time.sleep(DUMP_QUIET_S)
        before = texts
        texts = [_stacks_in(_text_from(log, start)) for log, _, start in started]
        if all(texts) and texts == before:
            break
    host = socket.gethostname()
    return [
        Dump(host, process_state(process), text)
        for (_, process, _), text in zip(started, texts, strict=True)
    ]


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _text_from(path: str, start: int) -> str:
    """Return a text file's content from a position on, "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _stacks_in(text: str) -> str:
    """Return the lines of faulthandler's dump, without what other code has written meanwhile."""
    lines = [line for line in text.splitlines() if STACK_LINE.match(line)]
    return "\n".join(lines)


def _log_of(process: Process | None, text: str) -> str:
    """Return the part of a log that the process wrote, without the lines of earlier runs."""
    if process is not None:
        header = f"{LOG_HEADER} {process.pid} "
        if header in text:
            text = text.rpartition(header)[2].partition("\n")[2]
    lines = text.splitlines()
    return "\n".join(line for line in lines if not line.startswith("Extension modules:"))


def free_listener(address: str) -> socket.socket:
    """Return a listening socket on a free port.

    Keep it open until the port is used: then no other process can take the port in between.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(1024)
    return listener


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this IP address, None if it is not found."""
    if address in ("127.0.0.1", "::1"):
        names = {name for _, name in socket.if_nameindex()}
        return next((name for name in ("lo", "lo0") if name in names), None)
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None
