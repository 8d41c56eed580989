"""What one machine can tell about itself and do to its own processes. Standard library only, so that any process may import it."""

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


def cores() -> int:
    """Cores this process may use: its affinity, cut by the container's CPU quota."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # no affinity on macOS
        usable = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(usable, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no cgroup v2, or no quota ("max")
        return usable


def oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory, in this container or on this machine; 0 where unknown."""
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
    """The last lines of a text file; empty when it cannot be read."""
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
    """A process, told from later ones with the same number by the time of its start (clock ticks since boot; 0 without /proc)."""

    pid: int
    started: int


def this_process() -> Process:
    return Process(os.getpid(), int((_stat(os.getpid()) or ["0"] * 20)[19]))


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (the state) on; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def process_state(process: Process) -> str:
    """running, sleeping, waiting for the disk, stopped by a signal, dead or gone."""
    stat = _stat(process.pid)
    if not stat or int(stat[19]) != process.started:
        return "gone"
    letter = stat[0]
    return {
        "R": "running",
        "S": "sleeping",
        "D": "waiting for the disk",
        "T": "stopped by a signal",
        "Z": "dead",
    }.get(letter, letter)


def send_signal(processes: Iterable[Process], number: int) -> None:
    """Send a signal to those of the processes that still exist."""
    for process in processes:
        if process.started == 0 or process_state(process) != "gone":
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                pass


def diagnose(workers: Iterable[tuple[str, Process | None]]) -> list[tuple[str, str, int]]:
    """For each log and its process: (end of what the process wrote there, its state, oom_kills()), in one visit to the node."""
    found = []
    for log, process in workers:
        text = tail(log, 400)
        if process is not None and (start := f"--- pid {process.pid} ") in text:
            text = text.rpartition(start)[2].partition("\n")[2]  # not what earlier runs wrote
        state = "unknown" if process is None else process_state(process)
        found.append(
            (
                "\n".join(
                    line for line in text.splitlines() if not line.startswith("Extension modules:")
                ),
                state,
                oom_kills(),
            )
        )
    return found


def free_listener(address: str) -> socket.socket:
    """A listening socket on a port that the kernel chose. It stays open until it is used, so nobody can take the port in between."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(1024)
    return listener


def interface_of(address: str) -> str | None:
    """Name of the network interface that has this address; None when it cannot be told."""
    if address in ("127.0.0.1", "::1"):
        return next(
            (name for name in ("lo", "lo0") if name in {n for _, n in socket.if_nameindex()}), None
        )
    import psutil

    found = (
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(entry.address == address for entry in addresses)
    )
    return next(found, None)
