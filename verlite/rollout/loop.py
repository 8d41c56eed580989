"""Sample with an environment that plays whole samples: it asks the engine by tokens, and says which
of the tokens are trained (`EnvFactory.play`).

Its tokens are compared with those of the engine. Only what the engine sampled, after exactly the
tokens that stand before it, is trained, with the log-probs and the weight version of the engine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from verlite.envs.factory import ContextFull, EnvFactory, Played
from verlite.envs.step import ToolError
from verlite.importing import CODE_ERRORS, SignalExit
from verlite.rewards.result import result_of
from verlite.rollout.types import (
    Completion,
    Engine,
    EngineError,
    Spans,
    Status,
    Task,
    Trajectory,
    extend_spans,
    with_seed,
)


@dataclass(frozen=True)
class Call:
    """A request to the engine: its context and the answer."""

    prompt_ids: Sequence[int]
    answer: Completion


async def run_loop(
    engine: Engine,
    factory: EnvFactory,
    longest: int,
    task: Task,
    waits_for: Callable[[str], None] = lambda what: None,
) -> Trajectory:
    """Play one sample.

    An exception of the environment, or tokens that do not agree with the engine's, end the sample
    with status ERROR. `waits_for(what)` is called before each wait.

    Args:
        engine: the model.
        factory: the environment.
        longest: tokens of a context with its answer, at most.
        task: the sample.

    Raises:
        EngineError: the engine cannot generate, so every other sample fails too.
    """
    calls: list[Call] = []
    broken: list[EngineError] = []
    seconds = 0.0

    async def generate(ids: list[int], limit: int | None, stop: tuple[str, ...]) -> Completion:
        nonlocal seconds
        room = longest - len(ids)
        if room < 1:
            raise ContextFull(
                f"the context has {len(ids)} tokens; {longest} fit with the answer "
                "(data.max_prompt_length + data.max_response_length)"
            )
        allowed = min(limit or task.sampling.max_tokens, room)
        stops = (*task.sampling.stop, *stop)
        sampling = replace(task.sampling, max_tokens=allowed, stop=stops)
        began = time.monotonic()
        waits_for("the engine")
        try:
            answer = await engine.generate(ids, with_seed(sampling, len(calls)))
        except EngineError as error:
            broken.append(error)
            raise
        finally:
            seconds += time.monotonic() - began
            waits_for("the environment")
        if answer.finish_reason == "abort":
            raise RuntimeError("the engine aborted the request")
        calls.append(Call(ids, answer))
        return answer

    began = time.monotonic()
    trajectory = Trajectory(list(task.prompt_ids))
    waits_for("the environment")
    try:
        played = await factory.play(task.row, engine.tokenizer, task.sampling, generate)
        trajectory = as_trajectory(played, calls, longest)
        if played.score is not None:
            trajectory.score = result_of(played.score)
    except SignalExit:
        raise
    except ToolError as error:  # counted, and waited for, as failed tools are
        trajectory.fail(f"{ToolError.__name__}: {type(error).__name__}: {error}")
    except CODE_ERRORS as error:
        trajectory.fail(error)
    if broken:  # even if the environment has caught it
        raise broken[0]
    trajectory.gen_seconds = seconds
    trajectory.tool_seconds = max(0.0, time.monotonic() - began - seconds)
    return trajectory


def as_trajectory(played: Played, calls: Sequence[Call], longest: int) -> Trajectory:
    """Return a played sample with the engine's log-probs and versions.

    Tokens after the first `longest` are left out: status LENGTH.

    Raises:
        ValueError: the mask has another length than the response, the model was never asked, or the
            mask is 1 on a token that the engine did not sample there.
    """
    prompt, response = list(played.prompt_ids), list(played.response_ids)
    if len(played.response_mask) != len(response):
        raise ValueError(
            f"response_mask has {len(played.response_mask)} entries for {len(response)} tokens of "
            "response_ids"
        )
    tokens = (prompt + response)[:longest]
    sampled_by: list[tuple[Completion, int] | None] = [None] * len(tokens)
    for call in calls:
        begin, whole = len(call.prompt_ids), [*call.prompt_ids, *call.answer.ids]
        if begin < len(tokens) and whole[: len(tokens)] == tokens[: len(whole)]:
            end = min(len(whole), len(tokens))
            sampled_by[begin:end] = [(call.answer, place) for place in range(end - begin)]
    first = len(prompt)
    marked = [first + i for i, mask in enumerate(played.response_mask) if mask]
    foreign = [place for place in marked if place < len(tokens) and sampled_by[place] is None]
    if foreign:
        raise ValueError(
            f"response_mask is 1 on {len(foreign)} of {len(marked)} tokens that the engine did not "
            f"sample after the tokens before them, first at {foreign[0] - first} of the response: "
            "append the sampled tokens as they are, and 0 for all others"
        )
    if not marked:
        raise ValueError(f"no token of the model is marked by response_mask ({len(calls)} calls)")
    trajectory = Trajectory(prompt[:longest])
    is_model = set(marked)
    places = range(first, len(tokens))
    authors = [sampled_by[place] if place in is_model else None for place in places]
    last = None
    for owner, part in groupby(zip(places, authors, strict=True), _by_answer):
        group = list(part)
        ids = [tokens[place] for place, _ in group]
        if owner is None:
            trajectory.append_observation(ids)
            continue
        last = next(author[0] for _, author in group if author)
        own = [author[1] for _, author in group if author]
        log_probs = [last.log_probs[place] for place in own]
        trajectory.append_sampled(
            Completion(ids, log_probs, last.finish_reason, _versions(last, own))
        )
        trajectory.infos.append({})
    is_cut = len(tokens) < first + len(response)
    if is_cut or (last and last.finish_reason == "length"):
        trajectory.status = Status.LENGTH
    trajectory.turn_scores = [float(score) for score in played.turn_scores]
    return trajectory


def _by_answer(item: tuple[int, tuple[Completion, int] | None]) -> int | None:
    author = item[1]
    return None if author is None else id(author[0])


def _versions(answer: Completion, places: Sequence[int]) -> Spans:
    """Return the weight versions of some tokens of an answer."""
    each = [version for version, count in answer.weight_versions for _ in range(count)]
    found: Spans = []
    for place in places:
        extend_spans(found, each[place], 1)
    return found
