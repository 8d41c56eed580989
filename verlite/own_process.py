"""A program in a process of its own that serves many samples, with whatever interpreter it needs.

Environments come with dependencies that do not fit those of training, and take seconds to import.
So each rollout worker starts such a program once. It ends with its worker, together with all that
it started (`verlite.keeper`); if it dies, or is ended because it hangs, the next sample starts it
again.

    async def ready(program):
        ...  # wait until it answers

    async with OwnProcess([python, "serve.py"], ready, start_s=9, memory_gb=4) as program:
        await program.running()  # before each sample
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Protocol, Self

from verlite.breakpoints import REFUSE
from verlite.keeper import kill_group, kill_kept
from verlite.masking import without_secrets
from verlite.terminal import clean
from verlite.threads import COUNT

TAIL = 4000
"""Bytes at the end of an output that are kept for messages."""
MAX_LINE = 64 << 20
"""Bytes of one line for `on_line`."""
END_S = 5.0
"""How long to wait for the end of a program that was killed."""
AGAIN_S = 10.0
"""After a start that failed: how long samples fail with its cause before it is tried again."""
_SPLIT = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[3])
from verlite import keeper
keeper.split(int(sys.argv[1]), int(sys.argv[2]))
del sys.argv[1:4]
"""
EXECUTE = """
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error.strerror}")
"""
"""Code for `start_kept` that becomes another program."""


class ProcessEnded(Exception):
    """A program ended, was ended, or cannot be started."""


async def start_kept(
    code: str,
    arguments: Sequence[str],
    memory_gb: float,
    folder: str | None,
    variables: Mapping[str, str],
) -> asyncio.subprocess.Process:
    """Start Python code with a keeper, in a session of its own, and with pipes.

    Args:
        code: such as EXECUTE; sys.argv[1:] are the arguments.
        memory_gb: limit of the memory of each of its processes, in GiB.
        folder: its working directory; None for the current one.
        variables: its environment.

    Raises:
        OSError: there are no more processes, files or memory.
    """
    own = (str(os.getpid()), str(int(memory_gb * (1 << 30))), json.dumps(absolute_path()))
    while True:
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", _SPLIT + code, *own, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=folder,
                env=variables,
                start_new_session=True,
                limit=MAX_LINE,
            )
        except RuntimeError as error:
            # uvloop, the loop of Ray's actors, refuses while another thread's loop starts a
            # process: asynchronous training samples and validates in two loops.
            if not str(error).startswith("Racing"):
                raise
            await asyncio.sleep(0.01)


def absolute_path() -> list[str]:
    """Return sys.path for a process that starts in another folder."""
    return [str(Path(entry or ".").resolve()) for entry in sys.path]


class Kept(Protocol):
    """A process with a keeper, such as that of `start_kept`."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...


async def end_kept(process: Kept) -> None:
    """Kill what `start_kept` started, and all that it started."""
    if process.returncode is None:
        kill_kept(process.pid)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)
    kill_group(process.pid)


def variables_for_programs(allowed: Sequence[str]) -> dict[str, str]:
    """Return this process's environment without secrets, but with those named `allowed`."""
    variables = without_secrets(os.environ, allowed)
    for name in ("NO_PROXY", "no_proxy"):  # what serves them is on this machine
        variables[name] = ",".join(filter(None, (variables.get(name), "127.0.0.1")))
    # It starts often. An image's setting would have it compile all that it imports each time.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables | {COUNT: "1", "PYTHONBREAKPOINT": REFUSE}


def cause_of(code: int, errors: bytes = b"") -> str:
    """Return why a program ended, with the last line of its errors."""
    cause = f"ended with exit code {code}"
    if code < 0:
        cause = f"was killed by {signal.Signals(-code).name}"
        cause += ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
    return cause + last_line(errors, ": ")


def last_line(output: bytes, before: str = "") -> str:
    """Return the last line that is not empty, after `before`; "" if there is none."""
    lines = clean(output.decode(errors="replace")).split("\n")
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return line and before + line


@dataclass(eq=False)
class OwnProcess:
    """A program between `async with` and its end. It starts when it is first needed."""

    words: Sequence[str]
    """The program and its arguments."""
    ready: "Callable[[OwnProcess], Awaitable[object]]"
    """Returns once the program can serve samples. It is called after each start."""
    _: KW_ONLY
    start_s: float
    """Seconds that `ready` may take."""
    memory_gb: float
    """Limit of the memory of each of its processes, in GiB."""
    folder: str | None = None
    """Its working directory; None for the current one."""
    secret_env_vars: Sequence[str] = ()
    """Variables that it gets although their names look like secrets."""
    on_line: Callable[[bytes], None] | None = None
    """Gets each line of its output; None: they go to the log, as do its errors."""
    fill: Callable[[Sequence[str]], Sequence[str]] = lambda words: words
    """Puts into the words what is known at a start only."""
    log: bytearray = field(init=False, default_factory=bytearray)
    """The end of what it prints."""
    starts: int = field(init=False, default=0)
    """How often it was started."""

    def __post_init__(self) -> None:
        self._variables = variables_for_programs(self.secret_env_vars)
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._starting = asyncio.Lock()
        self._ending = asyncio.Lock()
        self._failed: tuple[float, ProcessEnded] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.end("the run needs it no more")

    async def running(self) -> "asyncio.Future[None]":
        """Start the program, or start it again if it has ended. Return what raises ProcessEnded
        when it ends.

        Raises:
            ProcessEnded: it cannot be started, or is not ready within `start_s`.
        """
        async with self._starting:
            if self._ended is not None and not self._ended.done():
                return self._ended
            if self._failed is not None and time.monotonic() < self._failed[0]:
                raise self._failed[1]
            self._failed = None
            try:
                return await self._start()
            except ProcessEnded as error:
                self._failed = (time.monotonic() + AGAIN_S, error)
                raise

    async def send(self, line: bytes) -> None:
        """Write a line to its input. One that has ended does not read it."""
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(line + b"\n")
            await self._process.stdin.drain()

    async def end(self, why: str) -> None:
        """End the program and all that it started. Not one that has started meanwhile."""
        process, watch = self._process, self._watch
        async with self._ending:
            if process is None or watch is None or process is not self._process:
                return
            self._fail(f"was ended: {why}")
            await end_kept(process)
            await asyncio.wait((watch,), timeout=END_S)
            watch.cancel()
            self._process = self._watch = None

    async def _start(self) -> "asyncio.Future[None]":
        await self.end("it is started again")
        self.log.clear()
        self.starts += 1
        ended = self._ended = asyncio.get_running_loop().create_future()
        ended.add_done_callback(lambda done: done.exception())  # no sample need wait for it
        try:
            self._process = await start_kept(
                EXECUTE,
                self.fill(self.words),
                self.memory_gb,
                self.folder,
                self._variables,
            )
        except BaseException as error:
            self._ended = None
            if isinstance(error, OSError):
                raise ProcessEnded(f"{self.words[0]} cannot be started: {error}") from error
            raise
        self._watch = asyncio.ensure_future(self._follow(self._process))
        ready = asyncio.ensure_future(self.ready(self))
        try:
            await asyncio.wait(
                (ready, ended), timeout=self.start_s, return_when=asyncio.FIRST_COMPLETED
            )
            if ended.done():
                ended.result()
            if not ready.done():
                raise ProcessEnded(
                    f"{self.words[0]} was not ready within {self.start_s:g} s"
                    + last_line(bytes(self.log), ": ")
                )
            ready.result()
        except BaseException:
            ready.cancel()
            await self.end("it did not start")
            raise
        return ended

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        """Read the program's output until it has ended."""
        assert process.stdout and process.stderr
        lines = self._read_lines(process.stdout) if self.on_line else self._read(process.stdout)
        try:
            await asyncio.gather(lines, self._read(process.stderr))
            code = await process.wait()
        except Exception as error:  # its output is not what `on_line` understands
            self._fail(f"answered what cannot be read: {error}")
            await end_kept(process)
            return
        self._fail(cause_of(code, bytes(self.log)))

    async def _read_lines(self, pipe: asyncio.StreamReader) -> None:
        assert self.on_line is not None
        while line := await pipe.readline():
            self.on_line(line)

    async def _read(self, pipe: asyncio.StreamReader) -> None:
        while data := await pipe.read(1 << 16):
            self.log += data
            del self.log[:-TAIL]

    def _fail(self, cause: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ProcessEnded(f"{self.words[0]} {cause}"))
