"""HTTP client of a retriever, for hundreds of concurrent trajectories.

Queries that arrive within milliseconds of each other share one request; equal queries are sent
once. Failures are retried until the query's deadline (`verlite.http.client`); after it they are a
ToolError.

The wire format is Search-R1's: POST {"queries", "topk", "return_scores"}, answered by {"result":
[[passage, ...], ...]}. A server that rejects it gets one {"query"} per request. Passages may have
the forms {"document": {"contents"}}, {"document": text}, {"contents"}, {"title", "text"} or text.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from verlite.envs.search import Found
from verlite.envs.step import ToolError
from verlite.http.batches import Batches
from verlite.http.client import Client, Refused, Retry, Server, Unavailable
from verlite.spec.roles import RetrieverSpec

_MAX_QUERY = 2000
"""Characters of a query. Servers have limits, and a model may repeat words without end."""
_PROBE = "capital of France"


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

    def __init__(self, spec: RetrieverSpec) -> None:
        """Configure the client. Raises TokenError if retriever.token_env is not set."""
        self.spec = spec
        self._client = Client(spec)
        self._batches = Batches(
            self._client,
            spec.batch_size,
            self._ask,
            deadline=lambda question: question.deadline,
            succeeded=lambda question, passages, tries: self._keep(question, passages, tries),
            failed=self._fail,
            window_s=spec.batch_window_ms / 1000,
        )
        self._one_by_one: set[str] = set()
        """Addresses of servers that take one query per request."""
        self._cache: OrderedDict[str, list[str]] = OrderedDict()
        self._asked: dict[str, _Question] = {}

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._batches.close()
        self._asked = {}
        await self._client.__aexit__(*error)

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
            question = self._queue(query)
        # A sample that joins a pending query gets the full time too.
        question.deadline = began + self.spec.deadline_s
        passages, retries = await asyncio.shield(question.answer)
        return Found(passages, time.monotonic() - began, 0 if cached else retries, cached)

    async def check(self) -> str | None:
        """Send a real query to every server. Return a warning about those that fail, or None.

        Raises:
            ToolError: no server answers.
        """
        try:
            return await self._client.check(
                self._negotiate,
                "Start it (verlite serve retriever --corpus FILE), or correct retriever.url",
            )
        except Unavailable as error:
            raise ToolError(str(error)) from error

    async def _negotiate(self, server: Server) -> None:
        """Find out whether a server takes lists of queries."""
        question = _Question(_PROBE, asyncio.get_running_loop().create_future(), 0.0)
        self._one_by_one.discard(server.url)
        try:
            await self._ask(server, [question])
        except Refused:
            self._one_by_one.add(server.url)
            try:
                await self._ask(server, [question])
            except (Retry, Refused):
                self._one_by_one.discard(server.url)
                raise
        finally:
            self._batches.alone = bool(self._one_by_one)

    def _queue(self, query: str) -> _Question:
        """Add a query to the next request."""
        question = _Question(query, asyncio.get_running_loop().create_future(), 0.0)
        self._asked[query] = question
        self._batches.add(question)
        return question

    async def _ask(
        self, server: Server, questions: Sequence[_Question], left_s: float | None = None
    ) -> list[list[str]]:
        """Send one attempt. Raises Retry or Refused."""
        queries = [question.query for question in questions]
        if server.url in self._one_by_one:
            return [
                passages
                for query in queries
                for passages in await self._request(server, {"query": query}, 1, left_s)
            ]
        return await self._request(server, {"queries": queries}, len(queries), left_s)

    async def _request(
        self, server: Server, asked: dict[str, Any], count: int, left_s: float | None
    ) -> list[list[str]]:
        return await self._client.attempt(
            server.url,
            {**asked, "topk": self.spec.topk, "return_scores": True},
            lambda answer: _passages(answer, count, self.spec.topk),
            limit_s=left_s,
            what=f"{count} quer{'y' if count == 1 else 'ies'}",
        )

    def _keep(self, question: _Question, passages: list[str], retries: int) -> None:
        self._asked.pop(question.query, None)
        self._cache[question.query] = passages
        while len(self._cache) > self.spec.cache_size:
            self._cache.popitem(last=False)
        if not question.answer.done():
            question.answer.set_result((passages, retries))

    def _fail(self, question: _Question, error: Exception) -> None:
        self._asked.pop(question.query, None)
        if isinstance(error, Refused):
            why = f"the retriever refuses the query {question.query[:100]!r}: {error}"
        elif isinstance(error, Unavailable):
            why = str(error)
        else:
            why = f"{type(error).__name__}: {error}"
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
