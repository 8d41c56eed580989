"""Start commands as forks of one process that has imported what a run's driver imports.

Imports take 6 of a driver's 7 s of CPU time. A fork has its own environment (also in /proc),
working directory and output. The forks of a test process have one seed of Python's hashes, and one
OpenMP thread. Ray and the workers start as always.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from typing import IO, Any

IMPORTS = ("verlite.workers.actor", "verlite.workers.rollout", "verlite.workers.inference")
"""What takes longest. Without pyarrow, whose allocator has a thread."""
ROOM = 1 << 16
"""Bytes of the variable that makes room for the environment of a fork."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_server: socket.socket | None = None


class Forked:
    """A process with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: Sequence[str], out: IO[Any], env: dict[str, str]) -> None:
        """Start `python ARGUMENTS`, which are ["-c", CODE, ...] or ["-m", MODULE, ...]."""
        status, self._status = os.pipe(), b""
        request = {"arguments": list(arguments), "environment": env, "folder": os.getcwd()}
        server = _running_server()
        body = json.dumps(request).encode()
        socket.send_fds(server, [len(body).to_bytes(4, "big")], [out.fileno(), status[1]])
        server.sendall(body)
        os.close(status[1])
        self._pipe = os.fdopen(status[0], "rb", buffering=0)
        self.pid = int.from_bytes(self._pipe.read(4), "big")
        os.set_blocking(self._pipe.fileno(), False)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, as Popen does; None while the process runs."""
        if self.returncode is None and (status := self._pipe.read(4)) is not None:
            assert len(status) == 4, "the parent of the process has died"
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "big"))
            self._pipe.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _running_server() -> socket.socket:
    """Return the connection to this process's server, which ends when it is closed."""
    global _server
    if _server is None:
        _server, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD, "ROOM": "x" * ROOM},
                pass_fds=[theirs.fileno()],
            )
    return _server


def _serve(descriptor: int) -> None:
    """Import, then fork for each request. The parent of a fork reports how it ends."""
    server = socket.socket(fileno=descriptor)
    for module in IMPORTS:
        __import__(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads of the imports"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        size, files, _, _ = socket.recv_fds(server, 4, 2)
        if not size:
            os._exit(0)
        body = b""
        while len(body) < int.from_bytes(size, "big"):
            body += server.recv(1 << 16)
        if os.fork() == 0:
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            out, status = files
            child = os.fork()
            if child == 0:
                os.close(status)
                os.dup2(out, 1)
                os.dup2(out, 2)
                os.close(out)
                _become(**json.loads(body))
            os.close(out)
            os.write(status, child.to_bytes(4, "big"))
            os.write(status, os.waitpid(child, 0)[1].to_bytes(4, "big"))
            os._exit(0)
        for file in files:
            os.close(file)


def _become(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Run the program and end this process."""
    import runpy

    import numpy

    os.environ.clear()
    os.environ.update(environment)
    _show_environment(environment)
    os.chdir(folder)
    added = [path for path in environment.get("PYTHONPATH", "").split(":") if path]
    sys.path[:1] = [folder, *(path for path in added if path not in sys.path)]
    numpy.random.seed()  # `random` does this by itself
    (kind, program), sys.argv[1:] = arguments[:2], arguments[2:]
    code = 1
    try:
        if kind == "-c":
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _show_environment(environment: dict[str, str]) -> None:
    """Write the environment where /proc/PID/environ reads it."""
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    block = b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
    assert len(block) <= end - start, "enlarge ROOM"
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
