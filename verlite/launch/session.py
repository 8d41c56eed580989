"""One command on another host, over ssh. It ends there when this process ends, even by kill -9.

The host runs `python -m verlite.launch.session` as a lease, whose input is a pipe of this process.
Its first line is a JSON object: argv, environment, folder, and remove, an empty folder to remove at
the end. So no secret is on a command line. Each further line is "alive" (`Session.beat`), or
"signal N" for the command. When the input ends (the client has died), or nothing has arrived for
SILENCE_S (the network has failed), the command gets SIGTERM, and SIGKILL after LEASE_GRACE_S.

Whatever of the command is left when it has ended is killed by a guardian, also if the lease itself
is killed. The exit code is the command's; 128 + N if signal N ended it.
"""

import json
import os
import secrets
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verlite.control import limits
from verlite.controller import guardian
from verlite.launch import ClusterError

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
MARK = "VERLITE_LAUNCH"
"""Environment variable of everything that the command starts."""


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
            f"exec env {variables}{shlex.quote(self.python)} -m verlite.launch.session"
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
    """Tells the hosts of all sessions, every limits.ALIVE_S seconds, that this process is there."""

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
        while not self._ended.wait(limits.ALIVE_S):
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


class LeaseClient:
    """The lines that the client writes to this process's input.

    lost: why the client is taken for gone; "" as long as it is there.
    """

    def __init__(self) -> None:
        self.lost = ""
        self._partial = b""
        self._heard = time.monotonic()

    def lines(self, wait_s: float) -> list[str]:
        """Return the lines that arrive within wait_s seconds; set `lost`."""
        if self.lost:
            time.sleep(wait_s)
            return []
        readable, _, _ = select.select([0], [], [], wait_s)
        if not readable:
            if time.monotonic() - self._heard > limits.SILENCE_S:
                self.lost = f"nothing was heard of the client for {limits.SILENCE_S:.0f} s"
            return []
        data = os.read(0, 65536)
        if not data:
            self.lost = "the client has ended"
            return []
        self._heard = time.monotonic()
        *whole, self._partial = (self._partial + data).split(b"\n")
        return [line.decode() for line in whole]


def main() -> int:
    """Run the command of the first line; return its exit code."""
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    client = LeaseClient()
    received: list[str] = []
    while not received and not client.lost:
        received = client.lines(0.5)
    if not received:
        return 1
    job, commands = json.loads(received[0]), received[1:]
    mark = f"{MARK}={secrets.token_hex(8)}"
    guard = guardian.start(mark)
    try:
        process = _start(job, mark)
        if process is None:
            return 127
        try:
            return _attend(process, client, commands)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    finally:
        guardian.dismiss(guard)
        if job.get("remove"):
            try:
                os.rmdir(job["remove"])
            except OSError:
                pass  # not empty, or gone


def _start(job: dict[str, Any], mark: str) -> "subprocess.Popen[bytes] | None":
    name, _, value = mark.partition("=")
    try:
        return subprocess.Popen(
            job["argv"],
            cwd=job["folder"],
            env={**os.environ, **job["environment"], name: f"{value}/command"},
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        print(f"{job['argv'][0]}: {error.strerror}", file=sys.stderr, flush=True)
        return None


def _attend(process: "subprocess.Popen[bytes]", client: LeaseClient, commands: list[str]) -> int:
    """Pass on signals until the process has ended; return its exit code."""
    kill_at: float | None = None
    while process.poll() is None:
        for line in commands:
            if line.startswith("signal "):
                process.send_signal(int(line.removeprefix("signal ")))
        commands = client.lines(0.2)
        if client.lost and kill_at is None:
            process.terminate()
            kill_at = time.monotonic() + limits.LEASE_GRACE_S
        if kill_at is not None and time.monotonic() > kill_at:
            process.kill()
            kill_at = float("inf")
    code = process.returncode
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
