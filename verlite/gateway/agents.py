"""Sample with agent programs: a session of the gateway for each sample, and a process, or a place
in that of a verifiers environment.

A session becomes one trajectory, with all its branches one after the other: each token that the
model wrote is trained once.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

from verlite.gateway.forks import Forks
from verlite.gateway.program import ProgramError, run, score_of
from verlite.gateway.server import Gateway, OpenSession
from verlite.gateway.verifiers import Verifiers
from verlite.rewards.result import BadReturn, RewardResult, result_of
from verlite.rollout.types import Completion, Engine, EngineError, Status, Task, Trajectory
from verlite.spec.roles import AgentSpec
from verlite.terminal import clean

REST_S = 30.0
"""How long the address of a closed session is not used again: a late request must not reach the
session of another sample."""
UNASKED = (
    "The model never answered it: its client must use OPENAI_BASE_URL and OPENAI_API_KEY, or "
    "ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, of its environment"
)
"""Remedy of a program that failed without an answer of the model."""


@dataclass(eq=False)
class Agents:
    """Programs that run at the same time, between `async with` and its end, and their gateway."""

    spec: AgentSpec
    """The program and its limits."""
    engine: Engine
    """The model."""
    longest: int
    """Tokens of a context with its answer, at most."""
    template_kwargs: Mapping[str, Any]
    """data.apply_chat_template_kwargs."""
    folder: str | None = None
    """Working directory of the programs."""

    def __post_init__(self) -> None:
        spec = self.spec
        self._gateway = Gateway(self.engine, self.longest, self.template_kwargs)
        self.environment: Verifiers | None = None
        if spec.verifiers is not None:
            self.environment = Verifiers(spec, self.engine.tokenizer.name_or_path, self.folder)
        self._forks: Forks | None = None
        if spec.preload and spec.command is not None:
            self._forks = Forks(spec, self.folder)
        self._places = asyncio.Semaphore(spec.max_processes)
        self._addresses: deque[tuple[float, tuple[str, str]]] = deque()
        """Of sessions that were closed, and when, oldest first. verifiers keeps a client for each
        address that it was given, so addresses are used again, but those of failed samples, which
        something may still use."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._gateway)
        if self.environment is not None:
            await self._stack.enter_async_context(self.environment)
        if self._forks is not None:
            await self._stack.enter_async_context(self._forks)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def sample(
        self, task: Task, waits_for: Callable[[str], None] = lambda what: None
    ) -> Trajectory:
        """Run the program for one sample.

        A program that fails, or that is to score its sample and does not, ends the sample with
        status ERROR. `waits_for(what)` is called before each wait.

        Raises:
            EngineError: the engine cannot generate, so every other sample fails too.
        """
        waits_for("another program to end")
        async with self._places:
            waits_for("the program")
            began = time.monotonic()
            place = None
            if self._addresses and self._addresses[0][0] <= began - REST_S:
                _, place = self._addresses.popleft()
            session = self._gateway.open(task.sampling, waits_for, place)
            score, error, log = None, None, bytearray()
            try:
                score = await self._run(task, session, log)
                if self.environment is not None:
                    self._addresses.append((time.monotonic(), (session.id, session.token)))
            except (ProgramError, BadReturn, RuntimeError) as caught:
                if isinstance(caught, EngineError):
                    raise
                error = caught
            finally:
                self._gateway.close(session)
        trajectory = as_trajectory(session, task.prompt_ids, self.spec.credit)
        trajectory.log = clean(log.decode(errors="replace"))
        trajectory.tool_seconds = max(0.0, time.monotonic() - began - trajectory.gen_seconds)
        needs_remedy = self.environment is None and not getattr(error, "remedy", "")
        if needs_remedy and not trajectory.turns:
            error = ProgramError(str(error or "it ended without an answer of the model"), UNASKED)
        if error is None:
            trajectory.score = score
        else:
            trajectory.fail(error)
        return trajectory

    async def _run(self, task: Task, session: OpenSession, log: bytearray) -> RewardResult | None:
        """Return the program's score, None if another function scores. Raises what `sample` does,
        ProgramError, BadReturn, or RuntimeError: the engine aborted a request. log: see `run`."""
        program = asyncio.ensure_future(self._result(task, session, log))
        try:
            await asyncio.wait((program, session.failed), return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                session.failed.result()
            result = program.result()
        finally:
            if not program.done():
                program.cancel()
                await asyncio.wait((program,))
        if self.spec.reward != "program":
            return None
        return score_of(result) if isinstance(result, str) else result_of(result)

    async def _result(
        self, task: Task, session: OpenSession, log: bytearray
    ) -> str | dict[str, Any]:
        """Return the last line of the program, or score and parts of the environment."""
        if self.environment is not None:
            return await self.environment.run(task.row, session, log)
        place = session.base_url, session.token, self.folder
        return await run(self.spec, task.row, *place, log, self._forks)


def as_trajectory(session: OpenSession, prompt_ids: list[int], credit: str = "graph") -> Trajectory:
    """Return all branches of a session, one after the other.

    What a branch shares with an earlier one is given: the model's tokens have mask 1 once.

    prompt_ids: the prompt if the model was never asked. credit: rule of `Session.credits`.
    """
    branches = session.record.branches()
    credits = session.record.credits(credit)
    trajectory = Trajectory(list(branches[0][0][0].given) if branches else list(prompt_ids))
    for branch, (path, known) in enumerate(branches):
        prompt = path[known].prompt
        if trajectory.branches:
            trajectory.append_observation(prompt)
        begin = len(trajectory.response_ids)
        for node in path[known:]:
            if node is not path[known]:
                trajectory.append_observation(node.given)
            trajectory.append_sampled(
                Completion(node.sampled, node.log_probs, node.finish_reason, node.versions)
            )
            trajectory.infos.append({})
            trajectory.requests.append(
                {
                    "request": node.number,
                    "parent": None if node.parent is None else node.parent.number,
                    "root": None if node.root is None else str(node.root),
                    "branch": branch,
                    "context": len(node.prompt),
                    "given": len(node.given),
                    "sampled": len(node.sampled),
                    "credit": credits[node.number],
                }
            )
        trajectory.branches.append((len(prompt), len(trajectory.response_ids) - begin))
    leaves = session.record.leaves()
    if leaves and leaves[-1].finish_reason == "length":
        trajectory.status = Status.LENGTH
    trajectory.gen_seconds = session.engine_seconds
    trajectory.session = session.ledger()
    return trajectory
