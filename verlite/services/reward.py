"""Rewards as an HTTP service with OpenRLHF's wire format: POST /get_reward, GET /health.

The answers of many requests are scored at once, in processes that can be killed.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from verlite.files import kind_of
from verlite.http.server import GONE, application, one_of, parse_object, read_body, wrong
from verlite.rewards.pool import Pool
from verlite.rewards.process import FunctionError
from verlite.rewards.result import RewardItem, RewardResult, failure
from verlite.services.truths import Template, Truths, first_question, question, response
from verlite.threads import cores

# Processes that score

MATH = "verlite.rewards.tagged_math:compute_score"
CHUNK = 8
"""Answers that a process scores before it looks for another request."""
LOAD_S = 120.0
"""Seconds to load the scoring function."""
GONE_CHECK_S = 1.0
"""How often a request looks whether its client has disconnected."""


class Busy(Exception):
    """Too many answers wait already."""


class Scoring:
    """Processes that score. Requests take turns, so a large one does not block small ones.

    Each process works on one chunk at a time, so one slow answer delays the other answers of its
    chunk only.
    """

    def __init__(
        self,
        function: str | None,
        format_weight: float,
        limit_s: float,
        processes: int | None,
        most_waiting: int,
        secret_env_vars: Sequence[str] = (),
    ) -> None:
        """Describe the processes. `start` starts them.

        Args:
            function: the user's, as FILE:NAME; None: mathematics.
            format_weight: of mathematics: the reward of the format.
            limit_s: seconds of one answer.
            processes: how many; None: one per core.
            most_waiting: answers that may wait over all requests.
            secret_env_vars: variables that the processes get although their names look like those
                of secrets.
        """
        self._constants = {"format_weight": format_weight} if function is None else {}
        place, _, name = (function or MATH).rpartition(":")
        if not place:
            place, name = name, "compute_score"
        target = f"{Path(place).expanduser().absolute() if place.endswith('.py') else place}:{name}"
        processes = processes or cores()
        names = [*RewardItem("", "", None).arguments(), *self._constants]
        self.limit_s = limit_s
        self.most_waiting = most_waiting
        self.waiting = 0
        self._pools = [
            Pool(
                target,
                names,
                limit_s,
                share=processes,
                processes=1,
                secret_env_vars=secret_env_vars,
            )
            for _ in range(processes)
        ]
        self._idle = list(self._pools)
        self._turns = asyncio.Semaphore(processes)  # first come, first served
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="scoring")

    def start(self) -> None:
        """Load the function in one process. Raises FunctionError, after `close`."""
        try:
            self._pools[0].start(LOAD_S)
        except FunctionError:
            self.close()
            raise

    @property
    def takes_lists(self) -> bool:
        """Whether the function is OpenRLHF's reward_func(queries, prompts, labels)."""
        return bool(self._pools[0].takes_lists)

    def close(self) -> None:
        """End all threads and processes."""
        for pool in self._pools:
            pool.stop()
        self._threads.shutdown()
        for pool in self._pools:
            pool.close()

    async def score(
        self, calls: Sequence[dict[str, Any]], gone: Callable[[], Awaitable[bool]]
    ) -> list[RewardResult]:
        """Return one result per call, in order.

        Raises:
            Busy: too many answers wait already.
            HTTPException: 499, the client is `gone`. Its other answers are not scored.
        """
        if not calls:
            return []
        if self.waiting + len(calls) > self.most_waiting and self.waiting:
            raise Busy(f"{self.waiting} answers are waiting already; ask again later")
        self.waiting += len(calls)
        chunks: list[asyncio.Task[list[RewardResult]]] = []
        work = asyncio.create_task(self._in_turn(calls, chunks))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=GONE_CHECK_S)
                if not work.done() and await gone():
                    raise GONE
            await work
        finally:
            work.cancel()
            self.waiting -= max(0, len(calls) - CHUNK * len(chunks))
        return [result for chunk in chunks for result in chunk.result()]

    async def _in_turn(
        self, calls: Sequence[dict[str, Any]], chunks: list[asyncio.Task[list[RewardResult]]]
    ) -> None:
        """Score the calls, a chunk whenever it is their turn. Chunks that have begun are scored
        also if this is cancelled."""
        for start in range(0, len(calls), CHUNK):
            await self._turns.acquire()
            chunk = [{**call, **self._constants} for call in calls[start : start + CHUNK]]
            self.waiting -= len(chunk)
            chunks.append(asyncio.create_task(self._scored(chunk)))
        await asyncio.wait(chunks)

    async def _scored(self, calls: list[dict[str, Any]]) -> list[RewardResult]:
        pool = self._idle.pop()
        # The pool enforces the limit of each call. This one is for a process that cannot start.
        limit_s = LOAD_S + self.limit_s * len(calls)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, pool.run, calls, limit_s)
        except Exception as error:  # a changed file, no process: requests must not wait for ever
            return [failure(error)] * len(calls)
        finally:
            self._idle.append(pool)
            self._turns.release()


EXAMPLE = '{"query": ["..."], "prompts": ["..."], "labels": ["..."]}'
MAX_ERROR = 200
"""Characters of an error message in an answer."""


@dataclass(frozen=True)
class Asked:
    """One answer to score."""

    query: str
    """Prompt and response."""
    prompt: Any
    """As in the data set, or after the chat template. "" if the request has none."""
    label: Any
    """Ground truth. "" or None: the data set has it."""


def make_app(
    scorer: Scoring,
    truths: Truths | None,
    template: Template,
    max_body: int = 1 << 26,
    max_answers: int = 4096,
    token: str | None = None,
    needs_truth: bool = True,
) -> FastAPI:
    """Create the service. It closes the scorer when it stops.

    Args:
        scorer: started processes.
        truths: ground truths of requests without labels, if there are any.
        template: finds question and response in text.
        max_body: bytes of one request.
        max_answers: of one request.
        token: clients have to send it.
        needs_truth: an answer without a ground truth has no reward. False: the function gets None.
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
        body = await read_body(request, max_body, "send fewer answers at a time")
        asked = parse(body, max_answers)
        results: list[RewardResult | None] = [None] * len(asked)
        calls = []
        for number, item in enumerate(asked):
            truth = ground_truth(item, truths, template)
            if truth is None and needs_truth:
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


def parse(body: bytes, max_answers: int) -> list[Asked]:
    """Parse {"query" or "queries", "prompts", "labels"}: lists of the same length.

    `prompts` and `labels` may be missing. Other fields are ignored, as in OpenRLHF.

    Raises:
        HTTPException: status 422, with a sentence that names the field.
    """
    value = parse_object(body, EXAMPLE)
    given = one_of(value, ("query", "queries"), f"an example is {EXAMPLE}")
    queries = _texts(value[given], given)
    if len(queries) > max_answers:
        raise wrong(
            f"{given} has {len(queries)} entries, at most {max_answers} may be sent at a time"
        )
    columns = {}
    for name in ("prompts", "labels"):
        column = value.get(name)
        if column is None:
            column = [None] * len(queries)
        elif isinstance(column, str) and isinstance(value[given], str):
            column = [column]
        if not isinstance(column, list):
            raise wrong(f"{name} is {kind_of(column)}, expected a list")
        if len(column) != len(queries):
            raise wrong(f"{name} has {len(column)} entries and {given} has {len(queries)}")
        columns[name] = column
    return [Asked(*row) for row in zip(queries, columns["prompts"], columns["labels"], strict=True)]


def _texts(value: Any, name: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise wrong(f"{name} is {kind_of(value)}, expected a list of texts")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise wrong(f"{name}[{place}] is {kind_of(text)}, expected text")
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
    text = (
        f"no label, and no ground truth in --dataset for the question {asked!r}. A --function that "
        "needs none is called with --no-ground-truth"
    )
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
    text = f"{result.error}: {result.cause}"[:MAX_ERROR]
    return text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is not JSON
