"""The process that imports the modules of agent.preload once, and forks for each sample. Its
interpreter is the program's; of verlite it has the keeper and, in forks, `function`.

    PYTHON -P fork_process.py SETTINGS

SETTINGS is JSON: `words` of the command; `modules`; `memory_bytes`; `root`: where verlite is;
`path`: null, or sys.path for a function; `channel`: a socket. On it, a message is a sample: the
descriptors of its connection, input, output and error stream. The fork reads its environment from
the connection, a line of JSON, and becomes the program. The connection says the fork's id, a line,
and its exit code once it has ended.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any


def prepare(settings: dict[str, Any]) -> Any:
    """Import the modules; return the keeper. Exits with a line that says why it cannot."""
    path = settings["path"] or list(sys.path)
    sys.path[:] = [*path, settings["root"]]
    from verlite import keeper

    sys.path[:] = path
    if len(settings["words"]) > 1:  # as the interpreter does with a file
        sys.path.insert(0, os.path.dirname(os.path.abspath(settings["words"][1])))
    for module in settings["modules"]:
        try:
            importlib.import_module(module)
        except Exception as error:  # a module may raise anything
            cause = f"{type(error).__name__}: {error}"
            sys.exit(f"agent.preload: {module} cannot be imported by {sys.executable}: {cause}")
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(
            f"agent.preload={settings['modules']} starts {threads - 1} threads, which a fork "
            "does not have: leave out the module that starts them"
        )
    gc.collect()
    gc.freeze()  # collections in the forks would copy the memory that they share
    return keeper


def serve(settings: dict[str, Any], keeper: Any) -> None:
    """Fork for each sample. Returns in forks only, which have all that is the sample's."""
    channel = socket.socket(fileno=settings["channel"])
    print("imported", flush=True)
    own_id = os.getpid()
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    connections: dict[int, socket.socket] = {}
    while True:
        sources: list[Any] = [channel, ended]
        ready = select.select(sources, [], [])[0]
        if ended in ready:
            os.read(ended, 1 << 16)
            reap(connections)
        if channel not in ready:
            continue
        data, files, _, _ = socket.recv_fds(channel, 1, 4)
        if not data:
            sys.exit()
        connection = socket.socket(fileno=files[0])
        if pid := os.fork():
            connections[pid] = connection
            for file in files[1:]:
                os.close(file)
            continue
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (channel, *connections.values()):
            other.close()
        os.close(ended)
        os.close(wakeup)
        with connection, connection.makefile("rb") as lines:
            connection.sendall(b"%d\n" % os.getpid())
            variables = json.loads(lines.readline())
        for target, file in enumerate(files[1:]):
            os.dup2(file, target)
            os.close(file)
        os.environ.clear()
        os.environ.update(variables)
        keeper.split(own_id, settings["memory_bytes"])
        return


def reap(connections: dict[int, socket.socket]) -> None:
    """Report the forks that have ended."""
    while connections:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with connections.pop(pid) as connection, suppress(OSError):  # nobody waits for it
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def become(words: list[str]) -> None:
    """Run the function, or the file after the name of the interpreter, as that would."""
    if "numpy" in sys.modules:  # `random` does this by itself
        sys.modules["numpy"].random.seed()
    if len(words) == 1:
        from verlite.gateway.function import call

        call(*words[0].rsplit(":", 1))
        return
    sys.argv[:] = words[1:]
    runpy.run_path(words[1], run_name="__main__")


def main() -> None:
    settings = json.loads(sys.argv[1])
    keeper = prepare(settings)
    serve(settings, keeper)
    become(settings["words"])


if __name__ == "__main__":
    main()
