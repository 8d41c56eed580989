"""Notice a lost node, and a lost process of Ray on this machine, before Ray does.

Ray's head needs up to a minute to declare a silent node dead, and a driver that cannot reach the
head ends after a minute with a message of Ray's own. So in a joined cluster a thread of the driver
opens a TCP connection to Ray on each node every few seconds (`NodeWatch`).

Ray itself notices the end of a daemon late, or reports it as the death of a worker, and a daemon
that is stopped (SIGSTOP) not at all: calls into Ray then hang. Another thread looks at the
processes in /proc once a second (`DaemonWatch`), and at the run's guardian.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from verlite.control import limits
from verlite.control.watch import InARow
from verlite.controller.failures import RayLost, indent
from verlite.controller.node import Process, full_disks, process_state, tail

MAX_THREADS = 32


@dataclass(frozen=True)
class Watched:
    """Something that must stay reachable.

    Attributes:
        name: for messages, such as "node 10.0.0.2 (rank 1)".
        address: (host, port) of Ray there.
        node_id: Ray's id of the node; None for the head's own service.
    """

    name: str
    address: tuple[str, int]
    node_id: str | None


class NodeWatch:
    """A thread that probes nodes until `stop`.

    Attributes:
        lost: {what: reason} for the nodes that no longer answer. A lost node stays lost.
    """

    def __init__(self, watched: list[Watched]) -> None:
        self.lost: dict[Watched, str] = {}
        self._watched = watched
        self._failures = InARow()
        self._stopped = threading.Event()
        if watched:
            threading.Thread(target=self._run, name="nodes", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _run(self) -> None:
        with ThreadPoolExecutor(min(len(self._watched), MAX_THREADS)) as pool:
            while not self._stopped.wait(limits.PROBE_EVERY_S):
                for one, error in zip(self._watched, pool.map(probe, self._watched), strict=True):
                    if self._failures.look(one, bool(error)) >= limits.LOST_PROBES:
                        self.lost.setdefault(one, error)


def probe(watched: Watched) -> str:
    """Return why Ray cannot be reached there, "" if it can."""
    try:
        socket.create_connection(watched.address, timeout=limits.PROBE_TIMEOUT_S).close()
        return ""
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, OverflowError) as error:  # a host name or port that is none
        return str(error)


LOG_LINES = 5
READ_LINES = 400


@dataclass(frozen=True)
class Daemon:
    """A process to watch.

    Attributes:
        name: for messages, such as "raylet".
        logs: its log files; the end of the first one that has text is shown.
    """

    name: str
    process: Process
    logs: tuple[str, ...] = ()


@dataclass(eq=False)
class DaemonWatch:
    """A thread that looks at processes until `stop`."""

    find: Callable[[], Sequence[Daemon]]
    """Returns Ray's daemons."""
    on_lost: Callable[[RayLost], None]
    """Called with the error if the main thread has not raised it within limits.REACT_S."""
    others: Callable[[], None] = lambda: None
    """Called at each poll, for other processes that need a look."""
    lost: RayLost | None = field(init=False, default=None)
    """The error once a daemon is lost."""
    raised: bool = field(init=False, default=False)
    """Whether the main thread has raised the error."""

    def __post_init__(self) -> None:
        self._known: dict[Process, Daemon] = {}
        self._stopped = InARow()
        self._ended = threading.Event()
        self._looking = threading.Lock()
        self._add(self.find())
        threading.Thread(target=self._run, name="daemons", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()

    def check(self) -> RayLost | None:
        """Look at the processes now. Return the error to raise if one is lost."""
        if self.lost is None and not self._ended.is_set():
            self._look(counts=False)
        self.raised = self.lost is not None
        return self.lost

    def _run(self) -> None:
        polls = 0
        while not self._ended.wait(limits.DAEMONS_EVERY_S):
            # Without free file descriptors or memory a poll fails. A later one may not.
            with suppress(OSError, MemoryError):
                if polls % limits.FIND_LOOKS == 0 and polls < limits.FIND_UNTIL:
                    self._add(self.find())
            polls += 1
            with suppress(OSError, MemoryError):
                self.others()
            if self.lost is None:
                with suppress(OSError, MemoryError):
                    self._look(counts=True)
                continue
            if not self._ended.wait(limits.REACT_S) and not self.raised:
                self.on_lost(self.lost)
            return

    def _add(self, daemons: Sequence[Daemon]) -> None:
        with self._looking:
            for daemon in daemons:
                if daemon.process.started:
                    self._known.setdefault(daemon.process, daemon)

    def _look(self, counts: bool) -> None:
        with self._looking:
            for daemon in self._known.values():
                state = process_state(daemon.process)
                if state in ("gone", "dead"):
                    self.lost = lost(daemon, "has ended")
                    return
                is_stopped = state == "stopped by a signal"
                if counts and self._stopped.look(daemon.process, is_stopped) >= limits.FROZEN_LOOKS:
                    self.lost = lost(daemon, "is stopped by a signal (SIGSTOP)")
                    return


def lost(daemon: Daemon, what: str) -> RayLost:
    """Return the error about a lost daemon, with the end of its log."""
    lines = [f"Ray's process {daemon.name} (process {daemon.process.pid}) {what}."]
    text = next(filter(None, (end_of_log(log) for log in daemon.logs)), "")
    if text:
        lines += ["  end of its log:", indent(text)]
    full = full_disks()
    if full:
        lines.append(f"  Disks of this machine are full: {full}")
    lines.append("  The same command resumes from the last checkpoint.")
    return RayLost("\n".join(lines))


def end_of_log(path: str) -> str:
    """Return the last lines of a log without Ray's periodic dumps of its state."""
    lines = tail(path, READ_LINES).splitlines()
    told = [line for line in lines if line.strip() and "[state-dump]" not in line]
    return "\n".join(told[-LOG_LINES:])
