"""HTTP client of a retriever, for hundreds of concurrent trajectories.

Queries that arrive within milliseconds of each other share one request; equal queries are sent
once. Failures are retried with exponential, jittered backoff until the query's deadline, on another
server if there are several; after the deadline they are a ToolError. A server that keeps failing is
paused, and gets a single request before it gets full traffic again.

The wire format is Search-R1's: POST {"queries", "topk", "return_scores"}, answered by {"result":
[[passage, ...], ...]}. A server that rejects it gets one {"query"} per request. Passages may have
the forms {"document": {"contents"}}, {"document": text}, {"contents"}, {"title", "text"} or text.
"""

import asyncio
import json
import random
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx

from verlite.config.plan import files_of
from verlite.config.problems import display
from verlite.config.schema import RetrieverConfig
from verlite.envs.search import Found
from verlite.envs.step import ToolError

_CONNECT_S = 2.0
_FIRST_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 8.0
_PAUSE_AFTER = 5
"""Failures in a row after which a server is paused."""
_PAUSE_S = 2.0
"""Seconds of that pause."""
_MAX_QUERY = 2000
"""Characters of a query. Servers have limits, and a model may repeat words without end."""
_PROBE = "capital of France"


class _Retry(Exception):
    """This attempt failed; another one may succeed."""


class _Down(_Retry):
    """Nothing answered at the address, so no query is the cause."""


class _Slow(_Retry):
    """No answer within the time limit."""


class _Refused(Exception):
    """The server rejected the request with a client error."""


@dataclass
class _Server:
    url: str
    one_by_one: bool = False
    in_flight: int = 0
    failures: int = 0
    """Failures in a row."""
    paused_until: float = 0.0

    def __str__(self) -> str:
        return display("retriever.url", self.url, known=True)

    def free(self, now: float, limit: int) -> bool:
        """Return whether the server may get a request. After a pause it gets one at a time."""
        return now >= self.paused_until and self.in_flight < (
            1 if self.failures >= _PAUSE_AFTER else limit
        )


@dataclass
class _Question:
    query: str
    answer: "asyncio.Future[tuple[list[str], int]]"
    """Passages, and the number of failed attempts before."""
    deadline: float


class RetrieverClient:
    """A client for one process. Use it as `async with client:` in one event loop at a time.

    The cache survives the event loop.
    """

    def __init__(self, config: RetrieverConfig) -> None:
        self.config = config
        self._servers = [_Server(str(url)) for url in files_of(config.url)]
        self._cache: OrderedDict[str, list[str]] = OrderedDict()
        self._asked: dict[str, _Question] = {}
        self._waiting: list[_Question] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        # Queries per request: halved after a timeout, and raised by one after each success.
        self._size = config.batch_size
        self._changed: asyncio.Condition | None = None
        self._http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        # A retriever is an internal service, so proxies and .netrc do not apply.
        self._http = httpx.AsyncClient(
            trust_env=False, timeout=httpx.Timeout(self.config.timeout_s, connect=_CONNECT_S)
        )
        self._changed = asyncio.Condition()
        for server in self._servers:
            server.in_flight = 0
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._timer:
            self._timer.cancel()
        self._waiting, self._asked, self._tasks, self._timer = [], {}, set(), None
        assert self._http
        await self._http.aclose()
        self._http = None

    async def search(self, query: str) -> Found:
        """Return passages for a query, best first.

        Raises:
            ToolError: no server answered within retriever.deadline_s.
        """
        began = time.monotonic()
        query = query[:_MAX_QUERY]
        if query in self._cache:
            self._cache.move_to_end(query)
            return Found(self._cache[query], cached=True)
        question = self._asked.get(query)
        cached = question is not None
        if question is None:
            question = self._ask(query)
        # A sample that joins a pending query gets the full time too.
        question.deadline = began + self.config.deadline_s
        passages, retries = await asyncio.shield(question.answer)
        return Found(passages, time.monotonic() - began, 0 if cached else retries, cached)

    async def check(self) -> str | None:
        """Send a real query to every server. Return a warning about those that fail, or None.

        Raises:
            ToolError: no server answers.
        """
        if self._http is None:
            async with self:
                return await self.check()
        silent = []
        for server in self._servers:
            try:
                await self._negotiate(server)
            except (_Retry, _Refused) as error:
                silent.append(f"the retriever at {server} does not answer: {error}")
                server.failures = _PAUSE_AFTER
            else:
                server.failures = 0
                server.paused_until = 0.0
        if len(silent) == len(self._servers):
            raise ToolError(
                f"{'; '.join(silent)}. Start it (verlite serve retriever --corpus FILE), "
                "or correct retriever.url"
            )
        return "; ".join(silent) or None

    async def _negotiate(self, server: _Server) -> None:
        server.one_by_one = False
        try:
            await self._post(server, [_PROBE])
        except _Refused:
            server.one_by_one = True
            try:
                await self._post(server, [_PROBE])
            except (_Retry, _Refused):
                server.one_by_one = False
                raise

    def _ask(self, query: str) -> _Question:
        """Add a query to the next request."""
        loop = asyncio.get_running_loop()
        question = _Question(query, loop.create_future(), 0.0)
        self._asked[query] = question
        self._waiting.append(question)
        if len(self._waiting) >= self._size:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self.config.batch_window_ms / 1000, self._send)
        return question

    def _send(self) -> None:
        """Send the waiting queries."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        questions, self._waiting = self._waiting, []
        together = 1 if any(server.one_by_one for server in self._servers) else self._size
        for start in range(0, len(questions), together):
            task = asyncio.get_running_loop().create_task(
                self._answer(questions[start : start + together])
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, questions: list[_Question], tries: int = 0) -> None:
        """Answer all questions of a request, or fail each of them.

        A request that failed is repeated in two halves, so that a query that the server rejects,
        crashes on or is slow with does not fail the others.
        """
        try:
            tries = await self._answer_together(questions, tries)
            if tries:
                half = len(questions) // 2
                await asyncio.gather(
                    *(self._answer(part, tries) for part in (questions[:half], questions[half:]))
                )
        except _Refused as error:
            self._fail(
                questions[0],
                f"the retriever refuses the query {questions[0].query[:100]!r}: {error}",
            )
        except Exception as error:  # any exception must reach the samples, which wait for it
            for question in questions:
                self._fail(
                    question,
                    str(error)
                    if isinstance(error, ToolError)
                    else f"{type(error).__name__}: {error}",
                )

    async def _answer_together(self, questions: list[_Question], tries: int) -> int:
        """Return 0 if all questions are answered, else the number of attempts so far.

        In that case the request should be split. `tries` attempts failed before.
        """
        last = "every server is busy or paused"
        while True:
            deadline = max(question.deadline for question in questions)
            left = deadline - time.monotonic()
            server = await self._server(left) if left > 0 else None
            if server is None:
                raise ToolError(
                    f"no answer within retriever.deadline_s={self.config.deadline_s:g} "
                    f"after {tries} tries; the last: {last}"
                )
            allowed = deadline - time.monotonic()
            try:
                answers = await self._post(
                    server, [question.query for question in questions], allowed
                )
            except _Refused:
                if len(questions) == 1:
                    raise
                return tries + 1
            except _Retry as error:
                server.failures += 1
                if server.failures >= _PAUSE_AFTER:
                    server.paused_until = time.monotonic() + _PAUSE_S
                # A last attempt with little time left does not show the cause.
                if not tries or allowed > self.config.timeout_s / 10:
                    last = f"{server}: {error}"
                # The parts of a split request do not count: one query may have made it small.
                if not tries and isinstance(error, _Slow):
                    self._size = max(1, len(questions) // 2)
                tries += 1
                if len(questions) > 1 and not isinstance(error, _Down):
                    return tries
            else:
                server.failures = 0
                self._size = min(self.config.batch_size, self._size + (not tries))
                for question, passages in zip(questions, answers, strict=True):
                    self._keep(question, passages, tries)
                return 0
            finally:
                await self._release(server)
            if any(other.failures == 0 for other in self._servers):
                continue
            backoff_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (tries - 1))
            backoff_s *= random.uniform(0.5, 1.5)
            await asyncio.sleep(max(0.0, min(backoff_s, deadline - time.monotonic())))

    async def _server(self, wait_s: float) -> _Server | None:
        """Reserve the least busy server that is free. None if none is free for `wait_s` seconds."""
        assert self._changed
        end = time.monotonic() + wait_s
        async with self._changed:
            while True:
                now = time.monotonic()
                free = [
                    server
                    for server in self._servers
                    if server.free(now, self.config.max_in_flight)
                ]
                if free:
                    chosen = min(free, key=lambda server: (server.failures, server.in_flight))
                    chosen.in_flight += 1
                    return chosen
                if now >= end:
                    return None
                wakes = [
                    server.paused_until for server in self._servers if server.paused_until > now
                ]
                try:
                    await asyncio.wait_for(
                        self._changed.wait(), max(0.001, min([end, *wakes]) - now)
                    )
                except TimeoutError:
                    pass

    async def _release(self, server: _Server) -> None:
        assert self._changed
        async with self._changed:
            server.in_flight -= 1
            self._changed.notify_all()

    async def _post(
        self, server: _Server, queries: list[str], limit_s: float | None = None
    ) -> list[list[str]]:
        """Send one attempt. Raises _Retry or _Refused."""
        if server.one_by_one:
            return [
                passages
                for query in queries
                for passages in await self._request(server, {"query": query}, 1, limit_s)
            ]
        return await self._request(server, {"queries": queries}, len(queries), limit_s)

    async def _request(
        self, server: _Server, asked: dict[str, Any], count: int, limit_s: float | None
    ) -> list[list[str]]:
        assert self._http
        limit = (
            self.config.timeout_s
            if limit_s is None
            else max(0.001, min(self.config.timeout_s, limit_s))
        )
        body = {**asked, "topk": self.config.topk, "return_scores": True}
        try:
            # httpx limits each read but not their sum.
            response = await asyncio.wait_for(self._http.post(server.url, json=body), limit)
        except (TimeoutError, httpx.ReadTimeout) as error:
            raise _Slow(
                f"no answer to {count} quer{'y' if count == 1 else 'ies'} within {limit:.3g} s"
            ) from error
        except httpx.HTTPError as error:
            raise _Down(
                f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            ) from error
        if response.status_code == 429 or response.status_code >= 500:
            raise _Retry(f"HTTP {response.status_code}: {response.text[:200]}")
        if response.status_code != 200:
            raise _Refused(f"HTTP {response.status_code}: {response.text[:200]}")
        try:
            return _passages(json.loads(response.content), count, self.config.topk)
        except (ValueError, RecursionError) as error:
            raise _Retry(f"an answer that is not in the retriever's format: {error}") from error

    def _keep(self, question: _Question, passages: list[str], retries: int) -> None:
        self._asked.pop(question.query, None)
        self._cache[question.query] = passages
        while len(self._cache) > self.config.cache_size:
            self._cache.popitem(last=False)
        if not question.answer.done():
            question.answer.set_result((passages, retries))

    def _fail(self, question: _Question, why: str) -> None:
        self._asked.pop(question.query, None)
        if not question.answer.done():
            question.answer.set_exception(ToolError(why))
            question.answer.exception()  # marks it as retrieved, since no sample may be waiting


def _passages(answer: Any, count: int, topk: int) -> list[list[str]]:
    """Return the texts of an answer to `count` queries. Raises ValueError for another format."""
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list):
        raise ValueError('the list "result" is missing')
    if len(result) != count:
        raise ValueError(f"{len(result)} results for {count} queries")
    if not all(isinstance(found, Sequence) and not isinstance(found, str) for found in result):
        raise ValueError('an entry of "result" is not a list of passages')
    return [[_contents(item) for item in found[:topk]] for found in result]


def _contents(item: Any) -> str:
    document = item.get("document", item) if isinstance(item, dict) else item
    if isinstance(document, dict):
        if isinstance(document.get("contents"), str):
            return str(document["contents"])
        if isinstance(document.get("text"), str):
            return f"{document.get('title', '')}\n{document['text']}"
    if isinstance(document, str):
        return document
    raise ValueError(f'a passage is not {{"document": {{"contents": text}}}} but {str(item)[:100]}')
