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
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from verlite.own_process import OwnProcess, absolute_path
from verlite.spec.roles import AgentSpec

SCRIPT = Path(__file__).with_name("fork_process.py")
START_S = 300.0
"""How long the imports may take."""


class Fork:
    """A program that is a fork, with what asyncio's Process has."""

    def __init__(
        self,
        pid: int,
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self._ended = asyncio.ensure_future(self._end(*connection))

    async def wait(self) -> int:
        """Return the exit code, negative for a signal, once the program has ended."""
        return await asyncio.shield(self._ended)

    async def _end(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        # If the process is killed, its forks are, too, and nothing says so.
        self.returncode = int(await reader.readline() or -signal.SIGKILL)
        writer.close()
        return self.returncode


class Forks:
    """The process, between `async with` and its end."""

    def __init__(self, spec: AgentSpec, folder: str | None) -> None:
        """Prepare; nothing is started yet. folder: working directory of the programs."""
        assert spec.command is not None
        words = shlex.split(spec.command)
        is_function = len(words) == 1
        self._channel, self._far = socket.socketpair()
        settings = {
            "words": words,
            "modules": list(spec.preload),
            "memory_bytes": int(spec.memory_gb * (1 << 30)),
            "root": str(SCRIPT.parents[2]),
            "path": absolute_path() if is_function else None,
            "channel": self._far.fileno(),
        }
        python = sys.executable if is_function else words[0]
        self._process = OwnProcess(
            lambda: [python, "-P", str(SCRIPT), json.dumps(settings)],
            self._imported,
            start_s=START_S,
            memory_gb=spec.memory_gb,
            folder=folder,
            secret_env_vars=spec.secret_env_vars,
            on_line=lambda line: self._ready.set_result(None),
            descriptors=(self._far.fileno(),),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._process.__aexit__(*error)
        self._channel.close()
        self._far.close()

    async def start(self, variables: Mapping[str, str]) -> Fork:
        """Start the program of a sample, with these variables as its environment.

        Raises:
            ProcessEnded: the modules cannot be imported.
            OSError: the process has ended, or there are no more files.
        """
        for _ in range(2):  # it may have ended without notice yet
            ended = await self._process.running()
            fork = await self._fork(variables, ended)
            if fork is not None:
                return fork
        raise OSError("the process that imports agent.preload has ended")

    async def _fork(
        self, variables: Mapping[str, str], ended: "asyncio.Future[None]"
    ) -> Fork | None:
        with ExitStack() as theirs:
            connection, stdin = _pair(theirs), _pair(theirs)
            stdout, stderr = _pipe(theirs), _pipe(theirs)
            files = [connection[1].fileno(), stdin[1].fileno(), stdout[1], stderr[1]]
            socket.send_fds(self._channel, [b"\0"], files)
            streams = [await _reader(end) for end, _ in (stdout, stderr)]
            _, to_stdin = await asyncio.open_unix_connection(sock=stdin[0])
            reader, writer = await asyncio.open_unix_connection(sock=connection[0])
        writer.write(json.dumps(dict(variables)).encode() + b"\n")
        forked = asyncio.ensure_future(reader.readline())
        try:
            await asyncio.wait((forked, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not forked.done():  # nobody may read the message
                forked.cancel()
                writer.close()
        if not forked.done() or not forked.result():
            return None
        return Fork(int(forked.result()), (reader, writer), to_stdin, *streams)

    async def _imported(self, process: OwnProcess) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        await self._ready


def _pair(theirs: ExitStack) -> tuple[socket.socket, socket.socket]:
    ours, far = socket.socketpair()
    theirs.enter_context(far)
    return ours, far


def _pipe(theirs: ExitStack) -> tuple[int, int]:
    ours, far = os.pipe()
    theirs.callback(os.close, far)
    return ours, far


async def _reader(descriptor: int) -> asyncio.StreamReader:
    stream = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", 0)
    )
    return stream
