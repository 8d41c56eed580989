"""Run a command on this host for a client on another machine, and end it when the client is gone.

    python -m verlite.launch.lease          (over ssh; see verlite/launch/session.py)

The first line of the input is a JSON object: argv, environment, folder, and remove, an empty folder
to remove at the end. So no secret is on a command line. Each further line is "alive", or "signal N"
for the command. When the input ends (the client has died), or nothing has arrived for SILENCE_S
(the network has failed), the command gets SIGTERM, and SIGKILL after GRACE_S.

Whatever of the command is left when it has ended is killed by a guardian, also if this process
itself is killed. The exit code is the command's; 128 + N if signal N ended it.
"""

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from typing import Any

from verlite.controller import guardian

MARK = "VERLITE_LAUNCH"
"""Environment variable of everything that the command starts."""
ALIVE_S = 5.0
"""How often the client writes "alive"."""
SILENCE_S = 120.0
GRACE_S = 20.0


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
            if time.monotonic() - self._heard > SILENCE_S:
                self.lost = f"nothing was heard of the client for {SILENCE_S:.0f} s"
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
            kill_at = time.monotonic() + GRACE_S
        if kill_at is not None and time.monotonic() > kill_at:
            process.kill()
            kill_at = float("inf")
    code = process.returncode
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
