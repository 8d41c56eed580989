"""Sample with an environment of the package `verifiers`, which runs in a process of its own
(`verlite.gateway.verifiers_process`) and asks the gateway as if that were its inference server.
"""

import asyncio
import itertools
import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from verlite.gateway.program import ProgramError
from verlite.gateway.server import OpenSession
from verlite.own_process import OwnProcess, ProcessEnded, cause_of, variables_for_programs
from verlite.spec.roles import AgentSpec

SCRIPT = Path(__file__).with_name("verifiers_process.py")
START_S = 300.0
"""How long the environment may take to load. Importing verifiers takes 3 s of CPU time."""
CANCEL_S = 10.0
"""How long a process may take to answer that a sample is cancelled. After that it hangs."""


class EpisodeFailed(ProgramError):
    """verifiers reports that an episode failed. The message begins with the class of its error."""


def words(spec: AgentSpec, tokenizer: str, rows: int | None = None) -> list[str]:
    """Return the command of the process. rows: see `verifiers_process`."""
    settings = {
        "environment": spec.verifiers,
        "config": spec.kwargs,
        "renderer": spec.renderer,
        "tokenizer": tokenizer,
        "rows": rows,
    }
    return [str(spec.python), "-P", str(SCRIPT), json.dumps(settings)]


def tasks(spec: AgentSpec, count: int | None = None) -> list[dict[str, Any]]:
    """Return the first tasks of a taskset as rows of data, all of them without `count`.

    Raises:
        ProgramError: they cannot be read.
    """
    command = words(spec, "", -1 if count is None else count)
    variables = variables_for_programs(spec.secret_env_vars)
    try:
        ended = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, env=variables, check=False
        )
    except OSError as error:
        raise ProgramError(f"{command[0]}: {error.strerror}") from error
    if ended.returncode:
        raise ProgramError(f"{command[0]} {cause_of(ended.returncode, ended.stderr)}")
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    return [
        {
            "data_source": spec.verifiers,
            "prompt": row["prompt"],
            "reward_model": {"style": "verifiers", "ground_truth": ""},
            "extra_info": {"index": index, "task": json.dumps(row["task"])},
        }
        for index, row in enumerate(found)
    ]


def check(spec: AgentSpec, tokenizer: str) -> str:
    """Start and end the process of an environment. Return the version of verifiers.

    Raises:
        ProgramError: it cannot serve the environment.
    """

    async def start() -> str:
        async with Verifiers(spec, tokenizer) as environment:
            await environment.start()
            return environment.version

    return asyncio.run(start())


class Verifiers:
    """The environment, between `async with` and its end. Its process starts with the first sample,
    and again if it has ended."""

    def __init__(self, spec: AgentSpec, tokenizer: str, folder: str | None = None) -> None:
        """Prepare; nothing is started yet.

        Args:
            spec: the environment and its limits.
            tokenizer: folder of the tokenizer for `spec.renderer`.
            folder: working directory of the process, where it also finds tasksets.
        """
        self._timeout_s = spec.timeout_s
        self._numbers = itertools.count()
        self._results: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._cancelling: set[asyncio.Task[None]] = set()
        self._process = OwnProcess(
            words(spec, tokenizer),
            self._ready,
            start_s=START_S,
            memory_gb=spec.memory_gb,
            folder=folder,
            secret_env_vars=spec.secret_env_vars,
            on_line=self._read,
        )
        self.version = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.settled()
        await self._process.__aexit__(*error)

    @property
    def starts(self) -> int:
        """How often the process was started."""
        return self._process.starts

    async def settled(self) -> None:
        """Wait until the samples that were cancelled have ended."""
        if self._cancelling:
            await asyncio.wait(self._cancelling)

    async def start(self) -> "asyncio.Future[None]":
        """Start the process. Return what ends with it.

        Raises:
            ProgramError: it cannot serve the environment.
        """
        try:
            return await self._process.running()
        except ProcessEnded as error:
            raise ProgramError(str(error)) from error

    async def run(
        self, row: Mapping[str, Any], session: OpenSession, log: bytearray
    ) -> dict[str, Any]:
        """Run one episode. Return its `score` and the parts.

        Args:
            row: with the task as JSON in `extra_info`.
            session: which its agents ask.
            log: gets the end of what the process printed if the episode fails.

        Raises:
            EpisodeFailed: the environment says why.
            ProgramError: the process cannot be started, ended, or took longer than `timeout_s`.
        """
        task = (row["extra_info"] or {}).get("task")
        if not isinstance(task, str):
            raise ProgramError("the row has no extra_info.task: `verlite tasks` writes such rows")
        try:
            task = json.loads(task)
        except ValueError as error:
            raise ProgramError(
                f"extra_info.task={task!r:.200} is not JSON: `verlite tasks` writes such rows"
            ) from error
        ended = await self.start()
        number = next(self._numbers)
        result = self._results[number] = asyncio.get_running_loop().create_future()
        address = {"base_url": session.base_url, "key": session.token}
        try:
            with suppress(TimeoutError):  # a process that hangs does not read, either
                async with asyncio.timeout(self._timeout_s):
                    await self._send(run=number, task=task, **address)
                    await asyncio.wait((result, ended), return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return self._checked(result.result())
            if ended.done():
                raise ProgramError(str(ended.exception()))
            raise ProgramError(f"it did not end within agent.timeout_s={self._timeout_s:g}")
        except ProgramError:
            log += self._process.log
            raise
        finally:
            if result.done() or ended.done():
                del self._results[number]
            else:
                cancelling = asyncio.ensure_future(self._cancel(number, result, ended))
                self._cancelling.add(cancelling)
                cancelling.add_done_callback(self._cancelling.discard)

    async def _cancel(
        self, number: int, result: "asyncio.Future[Any]", ended: "asyncio.Future[None]"
    ) -> None:
        """Cancel a sample; end the process if it does not even answer that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await self._send(cancel=number)
                await asyncio.wait((result, ended), return_when=asyncio.FIRST_COMPLETED)
        del self._results[number]
        if not result.done() and not ended.done():
            await self._process.end(f"it hangs: no answer within {CANCEL_S:g} s")

    async def _ready(self, process: OwnProcess) -> None:
        self._started = asyncio.get_running_loop().create_future()
        self.version = await self._started

    async def _send(self, **request: Any) -> None:
        await self._process.send(json.dumps(request).encode())

    def _read(self, line: bytes) -> None:
        event = json.loads(line)
        if "ready" in event:
            self._started.set_result(event["ready"])
            return
        result = self._results.get(event.pop("done"))
        if result is not None and not result.done():
            result.set_result(event)

    def _checked(self, event: dict[str, Any]) -> dict[str, Any]:
        if "error" in event:
            raise EpisodeFailed(event["error"])
        if event["score"] is None:
            raise EpisodeFailed("NoScore: no agent of the episode asked the model")
        return {**event["parts"], "score": event["score"]}
