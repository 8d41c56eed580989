"""One sample from prompt to end: the same loop for a single answer and for many turns with an environment.

The context only grows: sampled ids are kept exactly as sampled, observations are tokenised once and appended. The
environment sees text, decoded for it alone.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from verlite.envs.step import EncodeObservation, Env, ToolError, encode_text
from verlite.rollout.types import Engine, EngineError, Sampling, Status, Trajectory, with_seed


@dataclass(frozen=True)
class Request:
    """What to sample. Without `env` it is one answer of at most sampling.max_tokens tokens."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    env: Env | None = None
    max_turns: int = 0
    """Observations the model may get; it speaks at most once more than that."""
    max_response_tokens: int | None = None
    """Tokens of all turns and observations. None: sampling.max_tokens. Each turn also obeys sampling.max_tokens."""
    max_observation_tokens: int = 512
    encode_observation: EncodeObservation | None = None
    """How an observation becomes tokens. None: as plain text (`encode_text`)."""


async def run_trajectory(engine: Engine, request: Request) -> Trajectory:
    """Sample one trajectory.

    Environment exceptions and requests that the engine refuses end it with status ERROR; EngineError is raised, because then
    every other sample fails as well.
    """
    trajectory = Trajectory(list(request.prompt_ids))
    try:
        await _run(engine, request, trajectory)
    except EngineError:
        raise
    except ToolError as error:  # an environment's own kinds of it too
        trajectory.fail(f"{ToolError.__name__}: {error}")
    except Exception as error:
        trajectory.fail(error)
    return trajectory


async def _run(engine: Engine, request: Request, trajectory: Trajectory) -> None:
    env, sampling = request.env, request.sampling
    if env is not None:
        sampling = replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *env.stop))))
    encode = request.encode_observation or encode_text(engine.tokenizer)
    total = request.max_response_tokens or request.sampling.max_tokens
    for turn in range(request.max_turns + 1):
        limited = replace(
            sampling, max_tokens=min(sampling.max_tokens, total - len(trajectory.response_ids))
        )
        began = time.monotonic()
        completion = await engine.generate(
            trajectory.prompt_ids + trajectory.response_ids, with_seed(limited, turn)
        )
        trajectory.gen_seconds += time.monotonic() - began
        trajectory.append_sampled(completion)
        if completion.finish_reason == "abort":
            return trajectory.fail("the engine aborted the request")
        if completion.finish_reason == "length":
            trajectory.status = Status.LENGTH
            return
        if env is None:
            return

        began = time.monotonic()
        last = turn == request.max_turns
        step = await env.step(_text_view(engine.tokenizer, completion.ids, sampling.stop), last)
        trajectory.tool_seconds += time.monotonic() - began
        trajectory.infos.append(step.info)
        trajectory.invalid_turns += not step.valid
        if step.done or last:
            trajectory.status = Status.DONE if step.done else Status.MAX_TURNS
            return

        ids, cut = encode(step, trajectory.response_ids, request.max_observation_tokens)
        if (
            len(trajectory.response_ids) + len(ids) >= total
        ):  # no dangling observation that the model could not answer
            trajectory.status = Status.LENGTH
            return
        trajectory.append_observation(ids)
        trajectory.truncated_observations += cut


def _text_view(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop: tuple[str, ...]) -> str:
    """A turn's text for the environment, cut behind the earliest end of a stop string; the ids stay as they are."""
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    ends = [text.index(string) + len(string) for string in stop if string in text]
    return text[: min(ends)] if ends else text


async def run_all(
    engine: Engine,
    requests: Sequence[Request],
    finished: Callable[[int, Trajectory], None] = lambda number, trajectory: None,
) -> list[Trajectory]:
    """Sample all trajectories at the same time, in the order of `requests`. The engine decides how many run at once.

    `finished` hears of each, with the number of its request, when it has ended and others may not have. A failed sample is a
    trajectory with status ERROR. Raises EngineError, after cancelling the others, when the engine itself cannot go on.
    """

    async def run(number: int, request: Request) -> Trajectory:
        trajectory = await run_trajectory(engine, request)
        finished(number, trajectory)
        return trajectory

    tasks = [asyncio.create_task(run(*numbered)) for numbered in enumerate(requests)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
