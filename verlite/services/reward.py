"""Rewards as an HTTP service with OpenRLHF's wire format: POST /get_reward, GET /health."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from verlite.http.server import application, parse_object, read_body, wrong
from verlite.rewards.process import FunctionError
from verlite.rewards.result import RewardItem, RewardResult
from verlite.services.scoring import Busy, Scoring
from verlite.services.truths import Template, Truths, first_question, question, response
from verlite.threads import cores

MATH = "verlite.rewards.tagged_math:compute_score"
EXAMPLE = '{"query": ["..."], "prompts": ["..."], "labels": ["..."]}'
MAX_ERROR = 200
"""Characters of an error message in an answer."""


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    body: int = 1 << 26
    """Bytes."""
    answers: int = 4096


@dataclass(frozen=True)
class Asked:
    """One answer to score."""

    query: str
    """Prompt and response."""
    prompt: Any
    """As in the data set, or after the chat template. "" if the request has none."""
    label: Any
    """Ground truth. "" or None: the data set has it."""


def scoring(
    function: str | None,
    format_weight: float,
    item_timeout_s: float,
    processes: int | None,
    max_waiting: int,
    secret_env_vars: Sequence[str] = (),
) -> Scoring:
    """Return started processes that score mathematics, or with the user's FILE:NAME.

    Raises:
        FunctionError: the function cannot be loaded.
    """
    constants = None
    if function is None:
        function, constants = MATH, {"format_weight": format_weight}
    place, _, name = function.rpartition(":")
    if not place:
        place, name = name, "compute_score"
    target = f"{Path(place).expanduser().absolute() if place.endswith('.py') else place}:{name}"
    processes = processes or cores()
    scorer = Scoring(target, item_timeout_s, processes, max_waiting, constants, secret_env_vars)
    try:
        scorer.start()
    except FunctionError:
        scorer.close()
        raise
    return scorer


def make_app(
    scorer: Scoring,
    truths: Truths | None,
    template: Template,
    limits: Limits = Limits(),
    token: str | None = None,
) -> FastAPI:
    """Create the service. It closes the scorer when it stops.

    Args:
        scorer: started processes.
        truths: ground truths of requests without labels, if there are any.
        template: finds question and response in text.
        limits: of one request.
        token: clients have to send it.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        scorer.close()

    app = application("verlite reward", lifespan, token)

    async def health() -> dict[str, Any]:
        return {
            "status": "healthy",
            "ground_truths": len(truths) if truths else 0,
            "waiting": scorer.waiting,
        }

    app.get("/health")(health)
    app.get("/health_check")(health)

    @app.post("/get_reward")
    async def get_reward(request: Request) -> dict[str, Any]:
        asked = parse(await read_body(request, limits.body, "send fewer answers at a time"), limits)
        results: list[RewardResult | None] = [None] * len(asked)
        calls = []
        for number, item in enumerate(asked):
            truth = ground_truth(item, truths, template)
            if truth is None:
                results[number] = _unknown(item, template)
            else:
                calls.append((number, arguments(item, truth, template, scorer.takes_lists)))
        try:
            scored = await scorer.score([call for _, call in calls], request.is_disconnected)
        except Busy as error:
            raise HTTPException(503, str(error), {"Retry-After": "1"}) from None
        for (number, _), result in zip(calls, scored, strict=True):
            results[number] = result
        return answer_of([result for result in results if result is not None])

    return app


def parse(body: bytes, limits: Limits) -> list[Asked]:
    """Parse {"query" or "queries", "prompts", "labels"}: lists of the same length.

    `prompts` and `labels` may be missing. Other fields are ignored, as in OpenRLHF.

    Raises:
        HTTPException: status 422, with a sentence that names the field.
    """
    value = parse_object(body, EXAMPLE)
    given = [name for name in ("query", "queries") if value.get(name) is not None]
    if len(given) != 1:
        raise wrong(
            "the body has both query and queries; keep one"
            if given
            else f"the body has no query; an example is {EXAMPLE}"
        )
    queries = _texts(value[given[0]], given[0])
    if len(queries) > limits.answers:
        raise wrong(
            f"{given[0]} has {len(queries)} entries, at most {limits.answers} may be sent at a time"
        )
    columns = {}
    for name in ("prompts", "labels"):
        column = value.get(name)
        if column is None:
            column = [None] * len(queries)
        elif isinstance(column, str) and isinstance(value[given[0]], str):
            column = [column]
        if not isinstance(column, list):
            raise wrong(f"{name} is a {type(column).__name__}, expected a list")
        if len(column) != len(queries):
            raise wrong(f"{name} has {len(column)} entries and {given[0]} has {len(queries)}")
        columns[name] = column
    return [Asked(*row) for row in zip(queries, columns["prompts"], columns["labels"], strict=True)]


def _texts(value: Any, name: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise wrong(f"{name} is a {type(value).__name__}, expected a list of texts")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise wrong(f"{name}[{place}] is a {type(text).__name__}, expected text")
    return texts


def ground_truth(item: Asked, truths: Truths | None, template: Template) -> Any:
    """Return the label of an answer, else the data set's ground truth; None if there is neither."""
    if item.label not in (None, ""):
        return item.label
    if truths is None:
        return None
    return truths.of(_question(item, template))


def arguments(item: Asked, truth: Any, template: Template, lists: bool) -> dict[str, Any]:
    """Return the keyword arguments of verl's compute_score, or OpenRLHF's `lists` of one entry."""
    if lists:
        return RewardItem("", "", truth, {}, item.prompt or "", item.query).list_arguments()
    text = response(item.query, item.prompt, template)
    return RewardItem("", text, truth, {"prompt": item.prompt}).arguments()


def _question(item: Asked, template: Template) -> str:
    if item.prompt:
        return question(item.prompt, template)
    return first_question(item.query, template)


def _unknown(item: Asked, template: Template) -> RewardResult:
    asked = _question(item, template)[:80]
    text = f"no label, and no ground truth in --dataset for the question {asked!r}"
    return RewardResult(None, error="NoGroundTruth", traceback=text)


def answer_of(results: list[RewardResult]) -> dict[str, Any]:
    """Return {"rewards", "scores", "extra_logs"}, and "errors" if an answer has no reward.

    `scores` is the accuracy, 0 or 1, or the reward if the function returns no `acc`. An answer
    that could not be scored has null in each list, and the reason in `errors`.
    """
    rewards = [result.score for result in results]
    names = {
        name: None
        for result in results
        for name, part in result.parts.items()
        if not isinstance(part, str)
    }
    logs = {name: [_number(result.parts.get(name)) for result in results] for name in names}
    scores = [
        reward if acc is None else acc
        for reward, acc in zip(rewards, logs.get("acc", rewards), strict=True)
    ]
    answer: dict[str, Any] = {"rewards": rewards, "scores": scores, "extra_logs": logs}
    if any(result.error for result in results):
        answer["errors"] = [_reason(result) for result in results]
    return answer


def _number(part: float | str | None) -> float | None:
    finite = isinstance(part, float) and part == part and abs(part) != float("inf")
    return part if finite and not isinstance(part, str) else None


def _reason(result: RewardResult) -> str | None:
    """Return one line without a stack trace."""
    if result.error is None:
        return None
    lines = (result.traceback or "").strip().splitlines()
    last = lines[-1].removeprefix(f"{result.error}: ") if lines else ""
    text = f"{result.error}: {last}"[:MAX_ERROR]
    return text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is not JSON
