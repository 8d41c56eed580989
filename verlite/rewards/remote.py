"""Rewards from a service in OpenRLHF's wire format, asked while samples are still generated.

POST {"query", "prompts", "labels"}, lists of texts, is answered by {"rewards": [number, ...]} and,
in newer versions, "scores" and "extra_logs". An answer that the service could not score is null or
NaN there, and a failed reward here; so is one that the service does not answer in time. A failure
never becomes a score of 0.
"""

import asyncio
import json
import math
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

from verlite.http.batches import Batches
from verlite.http.client import Client, Refused, Server, Unavailable
from verlite.rewards.result import MAX_CHARACTERS, MAX_PARTS, RewardItem, RewardResult
from verlite.spec.roles import RewardServiceSpec

UNAVAILABLE = "ServiceUnavailable"
"""Error of a reward that no server answered in time."""
_PATH = "/get_reward"
_NO_ROUTE = (404, 405, 501)
"""Statuses of a server without a health route. It is running."""

T = TypeVar("T")


@dataclass(eq=False)
class _Question:
    item: RewardItem
    deadline: float
    """Value of time.monotonic()."""
    result: "Future[RewardResult]" = field(default_factory=Future)


class RemoteScorer:
    """The client of a reward service. Its event loop runs in a thread."""

    def __init__(self, spec: RewardServiceSpec) -> None:
        """Configure the client; nothing is connected yet. Raises TokenError."""
        self.spec = spec
        self._client = Client(replace(spec, url=[_with_path(url) for url in spec.url]))
        self._batches = Batches(
            self._client,
            spec.batch_size,
            self._ask,
            deadline=lambda question: question.deadline,
            succeeded=_succeeded,
            failed=_failed,
            window_s=spec.batch_window_ms / 1000,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def check(self) -> str | None:
        """Ask every server for its health. Return a warning about those that fail, or None.

        A server without a health route passes, because OpenRLHF's own servers have none.

        Raises:
            Unavailable: no server answers.
        """
        return self._run(
            self._client.check(
                self._probe,
                "Start it (verlite serve reward --dataset FILE), or correct reward.remote.url",
            )
        )

    async def _probe(self, server: Server) -> None:
        scheme, place, path, query, _ = urlsplit(server.url)
        health = urlunsplit((scheme, place, path.rpartition("/")[0] + "/health", query, ""))
        try:
            await self._client.ping(health)
        except Refused as error:
            if error.status not in _NO_ROUTE:
                raise

    def stream(self, timeout_s: float) -> "RemoteStream":
        """Return a stream of samples; `RemoteStream.results` waits at most `timeout_s`."""
        return RemoteStream(self, timeout_s)

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self._loop is None or self._thread is None:
            return
        self._run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    def ask(self, item: RewardItem, limit_s: float) -> _Question:
        """Add an item to the next request. It must be answered within `limit_s`."""
        limit_s = min(limit_s, self.spec.deadline_s)
        question = _Question(item, time.monotonic() + limit_s)
        self._started().call_soon_threadsafe(self._batches.add, question)
        return question

    def flush(self) -> None:
        """Send the items that wait for others."""
        self._started().call_soon_threadsafe(self._batches.flush)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="reward-service", daemon=True
            )
            self._thread.start()
            self._run(self._client.__aenter__())
        return self._loop

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._started()).result()

    async def _shut(self) -> None:
        await self._batches.close()
        await self._client.__aexit__()

    async def _ask(
        self, server: Server, questions: Sequence[_Question], left_s: float
    ) -> list[RewardResult]:
        """Send one attempt. Raises Retry or Refused."""
        items = [question.item for question in questions]
        return await self._client.attempt(
            server.url,
            request_of(items),
            lambda answer: results_of(answer, len(items)),
            limit_s=left_s,
            what=f"{len(items)} sample{'s' if len(items) > 1 else ''}",
        )


class RemoteStream:
    """Score samples while others are still generated. See `verlite.rewards.scorer.Stream`."""

    def __init__(self, scorer: RemoteScorer, timeout_s: float) -> None:
        self._scorer = scorer
        self._timeout_s = timeout_s
        self._asked: dict[Any, _Question] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for question in self._asked.values():
            question.deadline = 0.0  # no further attempts

    def score(self, item: RewardItem) -> "Future[RewardResult]":
        """Send an item with the next request."""
        return self._scorer.ask(item, float("inf")).result

    def add(self, key: Any, item: RewardItem) -> None:
        """Send an item with the next request, for `results`."""
        self._asked[key] = self._scorer.ask(item, float("inf"))

    def results(self) -> dict[Any, RewardResult]:
        """Return what `add` got by key, at most `timeout_s` from now. Later rewards failed."""
        if not self._asked:
            return {}
        self._scorer.flush()
        wait([question.result for question in self._asked.values()], self._timeout_s)
        return {key: self._result(question) for key, question in self._asked.items()}

    def _result(self, question: _Question) -> RewardResult:
        if question.result.done():
            return question.result.result()
        return RewardResult(
            None,
            error=UNAVAILABLE,
            traceback=f"the reward service gave no answer within {self._timeout_s:g} s after the "
            "step's last sample",
        )


def request_of(items: Sequence[RewardItem]) -> dict[str, list[str]]:
    """Return the body of a request.

    `query` is prompt and response with special tokens. A ground truth that is not text is sent as
    JSON, and "" is none.
    """
    return {
        "query": [item.query for item in items],
        "prompts": [item.prompt for item in items],
        "labels": [_label(item.ground_truth) for item in items],
    }


def _label(truth: Any) -> str:
    if truth is None:
        return ""
    return truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)


def results_of(answer: Any, count: int) -> list[RewardResult]:
    """Return the results in an answer about `count` items.

    Numbers in `extra_logs`, and in other lists of the same length, become parts under their names.
    `scores` becomes the part `acc`, unless there is one.

    Raises:
        ValueError: there is not one reward per item, or there are too many parts.
    """
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if isinstance(rewards, int | float) and count == 1:
        rewards = [rewards]
    if not isinstance(rewards, list):
        raise ValueError('the list "rewards" is missing')
    if len(rewards) != count:
        raise ValueError(f"{len(rewards)} rewards for {count} sample{'s' if count > 1 else ''}")
    logs = answer.get("extra_logs")
    columns = {name: values for name, values in answer.items() if name not in _NO_PARTS}
    columns |= logs if isinstance(logs, dict) else {}
    if "scores" in answer:
        columns.setdefault("acc", answer["scores"])
    columns = {
        str(name): values
        for name, values in columns.items()
        if isinstance(values, list) and len(values) == count
    }
    if len(columns) > MAX_PARTS or sum(map(len, columns)) > MAX_CHARACTERS:
        raise ValueError(
            f"{len(columns):,} parts beside the rewards; expected at most {MAX_PARTS}, whose names "
            f"have at most {MAX_CHARACTERS:,} characters together"
        )
    errors = answer.get("errors")
    reasons = errors if isinstance(errors, list) and len(errors) == count else [None] * count
    return [
        _result(
            rewards[row],
            {
                name: number
                for name in columns
                if (number := _number(columns[name][row])) is not None
            },
            reasons[row],
        )
        for row in range(count)
    ]


_NO_PARTS = ("rewards", "scores", "extra_logs", "errors")


def _result(reward: Any, parts: dict[str, float | str], reason: Any) -> RewardResult:
    score = _number(reward)
    if score is not None:
        return RewardResult(score, parts)
    if reason:
        name = str(reason).partition(":")[0]
        return RewardResult(None, error=name[:80], traceback=f"the reward service: {reason}"[:1000])
    text = f"the reward service gave {json.dumps(reward)[:80]} where a number is expected"
    return RewardResult(None, error="BadReturn", traceback=text)


def _number(value: Any) -> float | None:
    """Return a finite number, also as the only entry of a list; None for anything else."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int | float):
        return None
    with suppress(OverflowError):
        if math.isfinite(value):
            return float(value)
    return None


def _succeeded(question: _Question, result: RewardResult, tries: int) -> None:
    question.result.set_result(result)


def _failed(question: _Question, error: Exception) -> None:
    if question.result.done():
        return
    if isinstance(error, Unavailable):
        name, text = UNAVAILABLE, f"the reward service: {error}"
    elif isinstance(error, Refused):
        name, text = "Refused", f"the reward service refuses this sample: {error}"
    else:
        name, text = type(error).__name__, f"{type(error).__name__}: {error}"
    question.result.set_result(RewardResult(None, error=name, traceback=text))


def _with_path(url: str) -> str:
    """Return the address with /get_reward, if it has no path."""
    scheme, place, path, query, fragment = urlsplit(url)
    return urlunsplit((scheme, place, path if path.strip("/") else _PATH, query, fragment))
