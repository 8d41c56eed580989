"""One command on another host, over ssh. It ends there when this process ends, even by kill -9.

The host runs verlite/launch/lease.py, whose input is a pipe of this process. The pipe closes with
this process; `beat` tells the host that the network in between still works.
"""

import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verlite.launch import ClusterError
from verlite.launch.lease import ALIVE_S

SSH_OPTIONS = (
    "BatchMode=yes",  # never ask: nobody is there to answer
    "ConnectTimeout=15",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    "ClearAllForwardings=yes",
)
"""Everything else, such as ports, keys and StrictHostKeyChecking, is up to the user's settings."""
SSH_FAILED = 255
"""Exit code of ssh itself."""
LAST_LINES = 30


@dataclass(frozen=True)
class Remote:
    """How commands are run on other hosts.

    Attributes:
        ssh: the ssh command, with options.
        python: interpreter with verlite, the same path on all hosts.
        folder: working folder, the same path on all hosts.
        environment: variables for the commands.
    """

    ssh: Sequence[str]
    python: str
    folder: str
    environment: Mapping[str, str]

    def argv(self, target: str) -> list[str]:
        """Return the ssh command that starts a lease on a host."""
        # verlite itself must be found before the environment has been sent.
        path = self.environment.get("PYTHONPATH")
        variables = f"PYTHONPATH={shlex.quote(path)} " if path else ""
        command = (
            f"cd {shlex.quote(self.folder)} && "
            f"exec env {variables}{shlex.quote(self.python)} -m verlite.launch.lease"
        )
        options = [part for option in SSH_OPTIONS for part in ("-o", option)]
        return [*self.ssh, *options, "-T", "--", target, command]


class Session:
    """A command that runs on a host.

    name: of the host, for messages. last: its last lines of output, errors included.
    attempt: a command with which the user can try the connection.
    """

    def __init__(
        self,
        remote: Remote,
        target: str,
        arguments: Sequence[str],
        *,
        log: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        remove: str | None = None,
    ) -> None:
        """Start `python arguments` on the host.

        Args:
            log: file that gets all output.
            on_line: is called with each line, in a thread.
            remove: empty folder that the host removes at the end.

        Raises:
            ClusterError: ssh cannot be run.
        """
        self.name = target.rpartition("@")[2]
        self.attempt = shlex.join([*remote.ssh, "-o", "BatchMode=yes", target, "true"])
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._log = log
        self._on_line = on_line
        # A session of its own: Ctrl-C in the terminal must not end ssh before the command.
        try:
            self._process = subprocess.Popen(
                remote.argv(target),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            program = remote.ssh[0]
            raise ClusterError(f"--ssh: {program} cannot be run: {error.strerror}") from None
        assert self._process.stdin
        self._input = self._process.stdin.fileno()
        job = {
            "argv": [remote.python, *arguments],
            "environment": dict(remote.environment),
            "folder": remote.folder,
            "remove": remove,
        }
        self._write(json.dumps(job) + "\n")
        os.set_blocking(self._input, False)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """The command's exit code; None while it runs. SSH_FAILED: ssh has lost the host."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(5)
        return code

    def why(self) -> str:
        """Return the exit code and the last lines of a command that has ended."""
        text = "\n".join(f"  {line}" for line in list(self.last)[-8:])
        what = f"exit code {self.code}" if self.code != SSH_FAILED else "ssh failed"
        return f"{what}:\n{text}" if text else what

    def beat(self) -> None:
        """Tell the host that this process is there."""
        self._write("alive\n")

    def signal(self, number: int) -> None:
        """Send a signal to the command."""
        self._write(f"signal {int(number)}\n")

    def wait(self, seconds: float) -> bool:
        """Return whether the command has ended within this time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(5)
        return True

    def close(self) -> None:
        """End the command at once if it still runs, and ssh."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        if not self.wait(30):
            self._process.kill()
            self._process.wait()

    def _write(self, text: str) -> None:
        try:
            os.write(self._input, text.encode())
        except (OSError, ValueError):
            pass  # ssh has ended, which `code` tells; or its buffer is full

    def _read(self) -> None:
        assert self._process.stdout
        file = self._log.open("ab") if self._log else None
        with self._process.stdout:
            for line in self._process.stdout:
                if file:
                    file.write(line)
                    file.flush()
                text = line.decode(errors="replace").rstrip("\r\n")
                self.last.append(text)
                if self._on_line:
                    self._on_line(text)
        if file:
            file.close()


class Heart:
    """Tells the hosts of all sessions, every ALIVE_S seconds, that this process is there."""

    def __init__(self) -> None:
        self._sessions: list[Session] = []
        self._ended = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def add(self, session: Session) -> Session:
        """Beat for this session too, and return it."""
        self._sessions.append(session)
        return session

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(ALIVE_S):
            for session in list(self._sessions):
                if session.code is None:
                    session.beat()


def end_all(sessions: Sequence[Session], seconds: float) -> None:
    """Ask all commands to end (SIGTERM), and end those that have not within this time."""
    for session in sessions:
        session.signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds
    for session in sessions:
        session.wait(max(0.0, deadline - time.monotonic()))
    for session in sessions:
        session.close()
