"""Start agent programs as forks of a process that has imported what they import (agent.preload).

Imports are most of a short program's CPU time. The process, `fork_process.py`, starts with the
first sample, and again if it has ended. Everything else is as for programs without it
(`verlite.gateway.program`).
"""

import asyncio
import json
import os
import shlex
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from verlite.importing import is_function
from verlite.own_process import OwnProcess, ProcessEnded, absolute_path
from verlite.spec.roles import AgentSpec

SCRIPT = Path(__file__).with_name("fork_process.py")
START_S = 300.0
"""How long the imports may take."""
SAY_S = 5.0
"""After this time `check` says what it waits for."""
WAIT_S = 0.01


class Fork:
    """A program that is a fork, with what asyncio's Process has. `close` it at its end."""

    def __init__(
        self,
        pid: int,
        connection: asyncio.StreamReader,
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
        ends: ExitStack,
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.close = ends.close
        self._ended = asyncio.ensure_future(self._end(connection))

    async def wait(self) -> int:
        """Return the exit code, negative for a signal, once the program has ended."""
        return await asyncio.shield(self._ended)

    async def _end(self, connection: asyncio.StreamReader) -> int:
        # If the process is killed, its forks are, too, and nothing says so.
        try:
            self.returncode = int(await connection.readline() or -signal.SIGKILL)
        except ConnectionError:
            self.returncode = -signal.SIGKILL
        return self.returncode


class Forks:
    """The process, between `async with` and its end."""

    def __init__(self, spec: AgentSpec, folder: str | None) -> None:
        """Prepare; nothing is started yet. folder: working directory of the programs."""
        assert spec.command is not None
        words = shlex.split(spec.command)
        self.modules = list(spec.preload)
        settings = {
            "words": words,
            "modules": self.modules,
            "memory_bytes": int(spec.memory_gb * (1 << 30)),
            "root": str(SCRIPT.parents[2]),
            "path": absolute_path() if is_function(words) else None,
            "worker": os.getpid(),
        }
        self.python = sys.executable if is_function(words) else words[0]
        self._process = OwnProcess(
            [self.python, "-P", str(SCRIPT), json.dumps(settings)],
            self._imported,
            start_s=START_S,
            memory_gb=spec.memory_gb,
            folder=folder,
            secret_env_vars=spec.secret_env_vars,
            on_line=lambda line: self._ready.set_result(line),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._process.__aexit__(*error)

    async def ready(self) -> "asyncio.Future[None]":
        """Start the process unless it runs. Return what raises ProcessEnded when it ends.

        Raises:
            ProcessEnded: the modules cannot be imported, or not within START_S.
        """
        try:
            return await self._process.running()
        except ProcessEnded as error:
            raise ProcessEnded(f"agent.preload={self.modules}: {error}") from error

    async def start(self, variables: Mapping[str, str]) -> Fork:
        """Start the program of a sample, with these variables as its environment.

        Raises:
            ProcessEnded: the modules cannot be imported, or the process has ended twice.
            OSError: there are no more processes, files or memory.
        """
        is_second = False
        while True:
            ended = await self.ready()
            try:
                return await self._fork(variables)
            except ConnectionError:  # the process has ended, perhaps before this sample
                try:
                    await asyncio.shield(ended)
                except ProcessEnded:
                    if is_second:
                        raise
            is_second = True

    async def _fork(self, variables: Mapping[str, str]) -> Fork:
        with ExitStack() as ours, ExitStack() as theirs:
            to_stdin, stdin = socket.socketpair()
            theirs.enter_context(stdin)
            writer = (await _streams(to_stdin, ours))[1]
            stdout, stdout_file = await _pipe(ours, theirs)
            stderr, stderr_file = await _pipe(ours, theirs)
            connection = ours.enter_context(socket.socket(socket.AF_UNIX))
            await _connect(connection, self._address)
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("3i", peer)[1] != os.getuid():
                raise ConnectionResetError  # the process has ended, and another took its address
            reader, to_fork = await _streams(connection, ours)
            said = (await reader.readline()).decode()
            if not said:
                raise ConnectionResetError
            name, _, pid = said.partition(" ")
            if name != "pid":
                raise OSError(said.strip())
            # The fork waits for this, and ends if the connection is closed before.
            with suppress(ConnectionError):  # it has ended already, which `Fork` notices
                socket.send_fds(connection, [b"\0"], [stdin.fileno(), stdout_file, stderr_file])
            to_fork.write(json.dumps(dict(variables)).encode() + b"\n")
            return Fork(int(pid), reader, writer, stdout, stderr, ours.pop_all())

    async def _imported(self, process: OwnProcess) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        self._address = b"\0" + (await self._ready).strip()


def check(spec: AgentSpec, say: Callable[[str], None] = print) -> str:
    """Start the process as a run does, in this folder, and end it. Return what it imported.

    say: gets what it waits for.

    Raises:
        ProcessEnded: as `Forks.ready` does.
    """

    async def start() -> str:
        async with Forks(spec, None) as forks:
            began = time.monotonic()
            ready = asyncio.ensure_future(forks.ready())
            if not (await asyncio.wait((ready,), timeout=SAY_S))[0]:
                say(f"agent.preload={forks.modules}: {forks.python} is still importing them")
            await ready
            took = time.monotonic() - began
            return f"agent.preload={forks.modules}: imported by {forks.python} in {took:.1f} s"

    return asyncio.run(start())


async def _connect(connection: socket.socket, address: bytes) -> None:
    connection.setblocking(False)
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError:  # as many samples as fit wait for the process
            await asyncio.sleep(WAIT_S)


async def _streams(
    end: socket.socket, ours: ExitStack
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(sock=end)
    ours.callback(lambda: writer.transport.abort())  # a writer that is deleted closes it
    return reader, writer


async def _pipe(ours: ExitStack, theirs: ExitStack) -> tuple[asyncio.StreamReader, int]:
    end, file = os.pipe()
    theirs.callback(os.close, file)
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(end, "rb", 0)
    )
    ours.callback(transport.close)  # uvloop does not at the end of the stream
    return stream, file
