"""The process that imports the modules of agent.preload once, and forks for each sample. Its
interpreter is the program's; of verlite it has the keeper and, in forks, `function`.

    PYTHON -P fork_process.py SETTINGS

SETTINGS is JSON: `words` of the command; `modules`; `memory_bytes`; `root`: where verlite is;
`path`: null, or sys.path for a function; `worker`: id of the process whose samples it starts.

It prints the name of an abstract Unix socket, where a connection is a sample. The connection says
"pid NUMBER", or why there is no fork. It brings the descriptors of input, output and error stream,
and the environment, a line of JSON, to the fork, which then becomes the program. Once it has ended,
the connection says its exit code.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any


def prepare(settings: dict[str, Any]) -> Any:
    """Import the modules; return the keeper. Exits with a line that says why it cannot."""
    path = settings["path"] or list(sys.path)
    sys.path[:] = [*path, settings["root"]]
    from verlite import keeper

    sys.path[:] = path
    if settings["path"] is None:  # as the interpreter does with a file
        sys.path.insert(0, os.path.dirname(os.path.realpath(settings["words"][1])))
    for module in settings["modules"]:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # a module may raise anything
            words = f"{type(error).__name__}: {error}".split()
            cause = " ".join(words).rstrip(":")  # the last line is shown
            remedy = "Leave it out"
            if isinstance(error, MemoryError) or "failed to map segment" in cause:
                remedy = "Raise agent.memory_gb, or leave it out"
            elif isinstance(error, ImportError):
                remedy = "Install it there, name another Python in agent.command, or leave it out"
            sys.exit(f"{module} cannot be imported by {sys.executable}: {cause}. {remedy}")
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(
            f"importing them starts {threads - 1} threads, which a fork does not have: leave out "
            "the module that starts them"
        )
    sys.stdout.flush()  # what the modules printed, or each fork prints it
    gc.collect()
    gc.freeze()  # collections in the forks would copy the memory that they share
    return keeper


def serve(settings: dict[str, Any], keeper: Any, events: int) -> None:
    """Fork for each sample. Returns in forks only, which have all that is the sample's."""
    own_id = os.getpid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # a free abstract address
    listener.listen(4096)
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    keeper.adopt_orphans()
    before = children()
    connections: dict[int, socket.socket] = {}
    os.write(events, listener.getsockname()[1:] + b"\n")
    os.close(events)
    while True:
        sources: list[Any] = [listener, ended]
        ready = select.select(sources, [], [])[0]
        if ended in ready:
            os.read(ended, 1 << 16)
            reap(connections, before)
        if listener not in ready:
            continue
        connection = listener.accept()[0]
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", peer)[0] != settings["worker"]:  # an address is no secret
            connection.close()
            continue
        try:
            pid = os.fork()
        except OSError as error:
            answer(connection, str(error))
            continue
        if pid:
            connections[pid] = connection
            continue
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (listener, *connections.values()):
            other.close()
        os.close(ended)
        os.close(wakeup)
        variables = b""
        with connection, connection.makefile("rb") as lines, suppress(OSError):
            connection.sendall(b"pid %d\n" % os.getpid())
            files = socket.recv_fds(connection, 1, 3)[1]
            variables = lines.readline()
        if not variables.endswith(b"\n"):  # the sample was canceled
            os._exit(0)
        for target, file in enumerate(files):
            os.dup2(file, target)
            os.close(file)
        os.environ.clear()
        os.environ.update(json.loads(variables))
        keeper.split(own_id, settings["memory_bytes"])
        return


def children() -> set[int]:
    """Return the ids of the children of this process."""
    own_id = os.getpid()
    return set(map(int, Path(f"/proc/{own_id}/task/{own_id}/children").read_text().split()))


def reap(connections: dict[int, socket.socket], before: set[int]) -> None:
    """Report the forks that have ended. Kill what they left behind, if they killed their keeper."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            before.discard(pid)
            connection = connections.pop(pid, None)
            if connection is not None:
                answer(connection, str(os.waitstatus_to_exitcode(status)))
            if connection is None or os.WIFSIGNALED(status):
                for orphan in children() - connections.keys() - before:
                    os.kill(orphan, signal.SIGKILL)


def answer(connection: socket.socket, line: str) -> None:
    """Send a line and close the connection."""
    with connection, suppress(OSError):  # nobody waits for it
        connection.sendall(line.encode() + b"\n")


def become(words: list[str], is_function: bool) -> None:
    """Run the function, or the file after the name of the interpreter, as that would."""
    if "numpy" in sys.modules:  # `random` does this by itself
        sys.modules["numpy"].random.seed()
    if is_function:
        from verlite.gateway.function import call

        sys.argv[:] = ["-c", *words]
        call(*words[0].rsplit(":", 1))
        return
    sys.argv[:] = words[1:]
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    program.__file__ = os.path.abspath(words[1])
    with open(program.__file__, "rb") as file:
        code = compile(file.read(), program.__file__, "exec", dont_inherit=True)
    exec(code, program.__dict__)


def main() -> None:
    settings = json.loads(sys.argv[1])
    events = os.dup(1)
    os.dup2(2, 1)  # modules may print
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # or one that asks would wait
    keeper = prepare(settings)
    serve(settings, keeper, events)
    become(settings["words"], settings["path"] is not None)


if __name__ == "__main__":
    main()
