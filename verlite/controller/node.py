"""Facts about one machine, and control of its processes. Imports only light modules."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
DUMP_S = 5.0
"""Longest wait for the dump of a process."""
DUMP_QUIET_S = 0.3
LOG_HEADER = "--- pid"
"""A worker's log starts with this text and the process id, once per process."""


def cores() -> int:
    """Return how many cores this process may use: its affinity, limited by the CPU quota."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        usable = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(usable, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no cgroup v2, or no quota ("max")
        return usable


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
    stat = _stat(pid)
    return Process(pid, int(stat[19]) if stat else 0)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third (the state) on, [] without a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def process_state(process: Process) -> str:
    """Return a value of PROCESS_STATES, or "gone"."""
    stat = _stat(process.pid)
    if not stat or int(stat[19]) != process.started:
        return "gone"
    return PROCESS_STATES.get(stat[0], stat[0])


def send_signal(processes: Iterable[Process], number: int) -> None:
    """Send a signal to those of the processes that still exist."""
    for process in processes:
        if process.started == 0 or process_state(process) != "gone":
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                pass


class Diagnosis(NamedTuple):
    """What a node knows about a worker.

    Attributes:
        log: the end of what its process wrote into its log.
        state: see `process_state`.
        oom_kills: see `oom_kills`.
    """

    log: str
    state: str
    oom_kills: int


def diagnose(workers: Iterable[tuple[str, Process | None]]) -> list[Diagnosis]:
    """Return a diagnosis for each (log path, process) on this node."""
    found = []
    for log, process in workers:
        text = _log_of(process, tail(log, 400))
        state = "unknown" if process is None else process_state(process)
        found.append(Diagnosis(text, state, oom_kills()))
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
