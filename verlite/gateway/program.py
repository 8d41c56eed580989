"""Run an agent program for one sample, in a process of its own with limits.

The program gets its task as JSON in VERLITE_TASK and on its input, and the address and key of its
session in the variables that OpenAI's and Anthropic's clients read. `verlite.keeper`
watches over it, as over reward functions: it ends with this process, and everything that it started
ends with it.
"""

import asyncio
import json
import os
import shlex
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from verlite.gateway.forks import Fork, Forks
from verlite.importing import is_function
from verlite.keeper import kill_marked
from verlite.own_process import (
    EXECUTE,
    TAIL,
    ProcessEnded,
    cause_of,
    end_kept,
    last_line,
    start_kept,
    variables_for_programs,
)
from verlite.rewards.result import BadReturn, RewardResult, result_of
from verlite.spec.roles import AgentSpec

MAX_OUTPUT = 16 << 20
"""Bytes that a program may print."""
MAX_LINE = 1 << 20
"""Bytes of the last line of output."""
MAX_VARIABLE = 100_000
"""Bytes of the task in an environment variable; Linux allows 128 KiB. A longer task is only on the
input."""

_CALL = """
from verlite.gateway.function import call
call(*sys.argv[1].rsplit(":", 1))
"""


class ProgramError(Exception):
    """A program gave no result: it failed, was killed, took too long, or printed too much."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(f"{cause.rstrip('.')}. {remedy}" if remedy else cause)
        self.remedy = remedy


async def run(
    spec: AgentSpec,
    task: Mapping[str, Any],
    base_url: str,
    token: str,
    folder: str | None = None,
    log: bytearray | None = None,
    forks: Forks | None = None,
) -> str:
    """Run a program until it ends. Return the last line of its output, "" if it printed none.

    Args:
        spec: the command, as words in a shell, which is not used; or one word FILE.py:NAME or
            package.module:NAME, for a function (`verlite.gateway.function`). Imports that it shares
            do not count in `timeout_s`.
        task: JSON values.
        base_url: of its session.
        token: of its session.
        folder: its working directory; None for the current one.
        log: gets the end of what it prints, both streams, also if it fails.
        forks: which start it, if it shares imports with other samples.

    Raises:
        ProgramError: it cannot be started, ended with another exit code than 0 or by a signal, took
            too long, or printed more than MAX_OUTPUT.
    """
    log = bytearray() if log is None else log
    text = json.dumps(task, default=str)
    assert spec.command is not None
    words = shlex.split(spec.command)
    code = _CALL if is_function(words) else EXECUTE
    variables = _variables(text, base_url, token, spec.secret_env_vars)
    process: asyncio.subprocess.Process | Fork | None = None
    try:
        async with asyncio.timeout(spec.timeout_s) as limit:
            try:
                if forks is None:
                    process = await start_kept(code, words, spec.memory_gb, folder, variables)
                else:
                    limit.reschedule(None)
                    await forks.ready()
                    limit.reschedule(asyncio.get_running_loop().time() + spec.timeout_s)
                    process = await forks.start(variables)
            except (OSError, ProcessEnded) as error:  # no more processes, files or memory
                raise ProgramError(f"it cannot be started: {error}") from error
            assert process.stdin and process.stdout and process.stderr  # all are pipes
            _, output, errors, exit_code = await asyncio.gather(
                _write(process.stdin, text.encode()),
                _read(process.stdout, MAX_LINE, log),
                _read(process.stderr, TAIL, log),
                process.wait(),
            )
    except TimeoutError:
        late = (
            f": that of agent.preload={forks.modules} did not fork" if forks and not process else ""
        )
        limit_s = f"agent.timeout_s={spec.timeout_s:g}"
        raise ProgramError(f"it did not end within {limit_s}{late}") from None
    finally:
        if process is not None:
            await _end(process, token)
    if exit_code:
        cause = f"it {cause_of(exit_code, errors)}"
        raise ProgramError(cause, _remedy(cause, os.environ.keys() - variables.keys()))
    return last_line(output)


def score_of(line: str) -> RewardResult:
    """Return the score in the last line of a program: a number, or a JSON object with "score" as a
    reward function may return it.

    Raises:
        BadReturn: it is neither.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, bool) or not isinstance(value, int | float | dict):
        said = f"the last line of its output is {line!r:.200}" if line else "it printed nothing"
        said = "the function returned None, or it printed null" if line == "null" else said
        raise BadReturn(
            f'{said}; expected a number, or a JSON object with one under "score" as its last line '
            "(agent.reward=program; with function the reward function scores)"
        )
    return result_of(value)


def _variables(task: str, base_url: str, token: str, allowed: Sequence[str]) -> dict[str, str]:
    own = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": token,
    }
    if len(task.encode()) <= MAX_VARIABLE:
        own["VERLITE_TASK"] = task
    return variables_for_programs(allowed) | own


async def _write(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # it does not read its input
        pipe.write(data)
        await pipe.drain()
        pipe.close()
        await pipe.wait_closed()


async def _read(pipe: asyncio.StreamReader, kept: int, log: bytearray) -> bytes:
    """Return the last `kept` bytes until the pipe ends; add to `log`. Raises ProgramError: there
    are too many."""
    tail, count = b"", 0
    while data := await pipe.read(1 << 16):
        log += data
        del log[:-TAIL]
        tail, count = (tail + data)[-kept:], count + len(data)
        if count > MAX_OUTPUT:
            raise ProgramError(f"it printed more than {MAX_OUTPUT >> 20} MiB")
    return tail


async def _end(process: asyncio.subprocess.Process | Fork, token: str) -> None:
    """Kill what is left of a program, which has the token of its session in its environment."""
    try:
        await end_kept(process)
    finally:
        if isinstance(process, Fork):
            process.close()
    if token and process.returncode in (None, -signal.SIGKILL):
        kill_marked(token.encode())  # perhaps the program killed its keeper


def _remedy(cause: str, withheld: Iterable[str]) -> str:
    """Return what helps a program that ended so, "" if that is unknown. withheld: variables that it
    did not get."""
    if "ModuleNotFoundError: " in cause:
        return "Name a Python that has it: agent.command='/path/to/venv/bin/python my_agent.py'"
    name = next((name for name in withheld if name in cause), None)
    return f"The program gets this variable with agent.secret_env_vars=[{name}]" if name else ""
