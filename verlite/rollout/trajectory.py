"""The sampling loop of one trajectory, for a single answer and for many turns with an environment.

The context only grows: sampled ids are kept exactly as sampled, and observations are tokenized once
and appended. The environment receives decoded text; that text is never tokenized again.
"""

import asyncio
import functools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from verlite.envs.step import EncodeObservation, Env, Step, ToolError, encode_text
from verlite.importing import CODE_ERRORS, SignalExit
from verlite.rollout.types import (
    Completion,
    Engine,
    EngineError,
    Sampling,
    Status,
    Trajectory,
    with_seed,
)


@dataclass(frozen=True)
class Request:
    """What to sample. Without `env`: one answer of at most sampling.max_tokens tokens."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    """`max_tokens` limits each turn."""
    env: Env | None = None
    max_turns: int = 0
    """Maximum number of observations. The model generates at most max_turns + 1 times."""
    max_response_tokens: int | None = None
    """Token limit over all turns and observations. None means sampling.max_tokens."""
    max_observation_tokens: int = 512
    """Token limit of one observation."""
    encode_observation: EncodeObservation | None = None
    """Converts an observation into tokens. None encodes it as plain text (`encode_text`)."""


@dataclass
class Sample:
    """A sample that can be interrupted: what it has so far, and goes on with.

    name: under which the engine knows its requests, with the number of the turn.
    so_far: tokens of the turn that the engine generates.
    """

    name: Any
    trajectory: Trajectory
    so_far: Completion | None = None


async def run_trajectory(
    engine: Engine,
    request: Request,
    waits_for: Callable[[str], None] = lambda what: None,
    sample: Sample | None = None,
) -> Trajectory:
    """Sample one trajectory, or go on with `sample`.

    An exception of the environment, or a request the engine rejects, ends the trajectory with
    status ERROR. `waits_for(what)` is called before each wait, for "the engine" or "env.step".

    Raises:
        EngineError: the engine cannot generate, so every other sample fails too.
    """
    sample = sample or Sample(None, Trajectory(list(request.prompt_ids)))
    trajectory = sample.trajectory
    try:
        await _run(engine, request, sample, waits_for)
    except EngineError:
        raise
    except ToolError as error:
        # Subclasses defined by an environment are reported under the base class's name.
        trajectory.fail(f"{ToolError.__name__}: {error}")
    except SignalExit:
        raise
    except CODE_ERRORS as error:
        trajectory.fail(error)
    return trajectory


def goes_on(request: Request, trajectory: Trajectory) -> bool:
    """Return whether a sample can be continued elsewhere: its environment has answered no turn, or
    can be brought into the state of having answered them (`Env.resume`)."""
    return not trajectory.turn_scores or hasattr(request.env, "resume")


async def _run(
    engine: Engine, request: Request, sample: Sample, waits_for: Callable[[str], None]
) -> None:
    env, trajectory = request.env, sample.trajectory
    sampling = request.sampling
    if env is not None:
        sampling = replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *env.stop))))
    encode = request.encode_observation or encode_text(engine.tokenizer)
    token_limit = request.max_response_tokens or request.sampling.max_tokens
    answered = len(trajectory.turn_scores)
    if answered:  # by the environment of an interrupted process
        texts = [_text_view(engine.tokenizer, ids, sampling.stop) for ids in _turns(trajectory)]
        await env.resume(texts[:answered])  # type: ignore[union-attr]  # `goes_on`
    for turn in range(answered, request.max_turns + 1):
        if turn == trajectory.turns:  # otherwise the environment was interrupted
            remaining = token_limit - len(trajectory.response_ids)
            limited = replace(sampling, max_tokens=min(sampling.max_tokens, remaining))
            waits_for("the engine")
            completion = await _generate(engine, sample, with_seed(limited, turn))
            if completion.finish_reason == "abort":
                trajectory.fail("the engine aborted the request")
                return
            if completion.finish_reason == "length":
                trajectory.status = Status.LENGTH
                return
            if env is None:
                return

        assert env is not None
        is_last = turn == request.max_turns
        text = _text_view(engine.tokenizer, _turns(trajectory)[-1], sampling.stop)
        waits_for("env.step")
        step = await _step_env(env, trajectory, text, is_last)
        if step.done or is_last:
            trajectory.status = Status.DONE if step.done else Status.MAX_TURNS
            return

        ids, is_truncated = encode(step, trajectory.response_ids, request.max_observation_tokens)
        if len(trajectory.response_ids) + len(ids) >= token_limit:
            # The model could not answer this observation, so it is not added.
            trajectory.status = Status.LENGTH
            return
        trajectory.append_observation(ids)
        trajectory.truncated_observations += is_truncated


def _turns(trajectory: Trajectory) -> list[list[int]]:
    """Return the tokens of each of the model's turns."""
    ids = iter(trajectory.response_ids)
    parts = [(author, list(islice(ids, count))) for author, count in trajectory.segments]
    return [part for author, part in parts if author == "model"]


async def _generate(engine: Engine, sample: Sample, sampling: Sampling) -> Completion:
    """Generate one turn and append it."""
    started_at = time.monotonic()
    trajectory = sample.trajectory
    context = trajectory.prompt_ids + trajectory.response_ids
    name = None if sample.name is None else (sample.name, trajectory.turns)
    completion = await engine.generate(context, sampling, sample.so_far, name)
    sample.so_far = None
    trajectory.gen_seconds += time.monotonic() - started_at
    trajectory.append_sampled(completion)
    return completion


async def _step_env(env: Env, trajectory: Trajectory, text: str, is_last: bool) -> Step:
    """Give one turn's text to the environment and record what it reports."""
    started_at = time.monotonic()
    step = await env.step(text, is_last)
    trajectory.tool_seconds += time.monotonic() - started_at
    reward = _finite(step.reward)
    trajectory.turn_scores.append(reward)
    trajectory.infos.append({**step.info, "reward": reward} if reward else step.info)
    trajectory.invalid_turns += not step.valid
    return step


def _finite(reward: float) -> float:
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"the environment's reward of a turn is {value}, not a finite number")
    return value


def _text_view(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop: tuple[str, ...]) -> str:
    """Return one turn's text for the environment, truncated after the earliest stop string. The ids
    do not change."""
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    ends = [text.index(string) + len(string) for string in stop if string in text]
    return text[: min(ends)] if ends else text


async def run_all(
    engine: Engine,
    requests: Sequence[Any],
    finished: Callable[[int, Trajectory], None] = lambda number, trajectory: None,
    sample: Callable[[Any], Awaitable[Trajectory]] | None = None,
) -> list[Trajectory]:
    """Sample all trajectories concurrently. The engine decides how many run at once.

    Args:
        engine: the engine to sample from.
        requests: what to sample.
        finished: `finished(i, trajectory)` is called when trajectory i completes, while others may
            still run.
        sample: samples the trajectory of a request. None: `run_trajectory`.

    Returns:
        One trajectory per request, in the order of `requests`. Failed samples have status ERROR.

    Raises:
        EngineError: the engine cannot generate. The other trajectories are cancelled.
    """

    sample = sample or functools.partial(run_trajectory, engine)

    async def run(number: int, request: Any) -> Trajectory:
        trajectory = await sample(request)
        finished(number, trajectory)
        return trajectory

    tasks = [asyncio.create_task(run(i, request)) for i, request in enumerate(requests)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
