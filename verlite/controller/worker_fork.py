"""Start Ray's workers as forks of one process that has imported what they need.

    python worker_fork.py [the arguments of Ray's default_worker.py]

Imports take most of a worker's start: 7 of 8.5 s of CPU time, and 300 MiB that forks share.

`ray_internals.forked_workers` has Ray run this file where it would run its own default_worker.py.
The first process of this file starts a server, which imports the modules. Every process of this
file sends its arguments, environment, working directory and output files to the server and ends;
the server forks, and the fork continues as Ray's worker. Ray knows a worker by the process id that
the worker itself reports. If the server does not answer, the process runs Ray's worker itself.

A worker must find what it would find as a new process. So there is one server for each environment,
apart from the variables in OWN_VARIABLES, and none for another Python than the driver's. A fork has
no threads of its parent, so a server with threads refuses to fork. What it imports must not use a
GPU.

It needs /proc, so it works on Linux only.

Its top imports the standard library only, because every worker waits for it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
from typing import Any

SETTINGS = "VERLITE_FORK"
"""Environment variable with the settings in JSON: "modules" to import, the driver's Python and
sys.path as "python" and "path", and the path of Ray's default_worker.py as "worker"."""
OWN_VARIABLES = ("VERLITE_RUN",)
"""Variables that differ between workers and that no import reads."""
CHECK_S = 1.0
"""How often the server looks whether Ray's raylet, for which it works, is still there."""
LONGEST_REQUEST_S = 10.0
FORKED = b"1"
NO_JOB = "ffffffff"


def main() -> None:
    """Become Ray's worker: in a fork of the server, or else in this process."""
    settings = json.loads(os.environ[SETTINGS])
    arguments = sys.argv[1:]
    if arguments[:1] == ["--serve"]:
        arguments = _serve(arguments[1], settings)  # returns in forks only
        sys.argv[:] = [settings["worker"], *arguments]
        sys.path.insert(0, os.path.dirname(settings["worker"]))
        runpy.run_path(settings["worker"], run_name="__main__")
        return
    with contextlib.suppress(OSError):
        if sys.executable == settings["python"] and _ask_for_fork(arguments):
            return
    python = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv)]
    os.execv(sys.executable, [*python, settings["worker"], *arguments])


def _ask_for_fork(arguments: list[str]) -> bool:
    """Have the server fork. Returns False if it has not done so.

    Raises:
        OSError: the server does not answer.
    """
    if os.environ.get("RAY_JOB_ID", NO_JOB) == NO_JOB:  # a worker that Ray needs for itself
        return False
    sockets = os.path.dirname(_option(arguments, "--raylet-name"))
    path = os.path.join(sockets, f"fork-{_environment_key()}")
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "oom_score_adj": _oom_score_adj(),
    }
    with _connect(path) as connection:
        if _peer_uid(connection) != os.getuid():
            print(f"{__file__}: {path} belongs to another user; nothing was sent", file=sys.stderr)
            return False
        socket.send_fds(connection, [b"\0"], [0, 1, 2])
        connection.sendall(json.dumps(request).encode())
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(1) == FORKED


def _option(arguments: list[str], name: str) -> str:
    """Return the value of an argument NAME=VALUE, "" without it."""
    for argument in arguments:
        if argument.startswith(name + "="):
            return argument.partition("=")[2]
    return ""


def _environment_key() -> str:
    """Return a short text that is equal for processes that may share a server."""
    environment = {name: os.environ[name] for name in os.environ if name not in OWN_VARIABLES}
    described = json.dumps(environment, sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:8]


def _connect(path: str) -> socket.socket:
    """Connect to the server. Start it if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        connection.connect(path)
        return connection
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(path)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            # Bound here, so that requests can wait while the server imports.
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(4096)
                _start_server(listener)
            connection.connect(path)
    return connection


def _peer_uid(connection: socket.socket) -> int:
    """Return the user of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


def _start_server(listener: socket.socket) -> None:
    """Start the server with this process's environment, but without threads of its own."""
    descriptor = listener.fileno()
    subprocess.Popen(
        [sys.executable, __file__, "--serve", str(descriptor)],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        pass_fds=[descriptor],
        start_new_session=True,
    )


def _serve(descriptor: str, settings: dict[str, Any]) -> list[str]:
    """Fork for each request. Returns the arguments of Ray's worker, in the forks only."""
    listener = socket.socket(fileno=int(descriptor))
    sys.path[:] = settings["path"]
    from verlite.importing import import_ahead

    import_ahead(*settings["modules"])
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        print(f"{__file__}: no forks, because the imports have started threads", file=sys.stderr)
    raylet = int(os.environ["RAY_RAYLET_PID"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended forks
    listener.settimeout(CHECK_S)
    while _exists(raylet):
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            with connection:
                request = _answer(connection) if threads == 1 else None
            if request is not None:
                listener.close()
                return _become(request)
    raise SystemExit


def _answer(connection: socket.socket) -> dict[str, Any] | None:
    """Fork if the request is whole. Returns the request, in the fork only."""
    if _peer_uid(connection) != os.getuid():
        return None
    try:
        connection.settimeout(LONGEST_REQUEST_S)
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
        request: dict[str, Any] = json.loads(b"".join(parts))
        if os.fork() == 0:
            for target, file in enumerate(files):
                os.dup2(file, target)
                os.close(file)
            return request
        for file in files:
            os.close(file)
        connection.sendall(FORKED)
    except (OSError, ValueError):  # the client runs the worker itself
        pass
    return None


def _become(request: dict[str, Any]) -> list[str]:
    """Take over what the process that asked had from Ray; return its arguments."""
    os.setsid()  # a signal to the worker's process group must not reach the server
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(request["oom_score_adj"])
    if "numpy" in sys.modules:  # `random` does this by itself
        sys.modules["numpy"].random.seed()
    arguments: list[str] = request["arguments"]
    return arguments


def _oom_score_adj() -> str:
    """Return how much the kernel prefers this process when memory is short; Ray sets it."""
    try:
        with open("/proc/self/oom_score_adj") as file:
            return file.read()
    except OSError:
        return "0"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main()
