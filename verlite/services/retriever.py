"""The retriever as an HTTP service with Search-R1's wire format: POST /retrieve, GET /health."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response

from verlite.config.show import console
from verlite.http.server import GONE, LOG, application, parse_object, read_body, wrong
from verlite.services.corpus import Corpus, Track
from verlite.services.index import Hit, Index

MAX_TOPK = 100


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    body: int = 1 << 20
    """Bytes."""
    queries: int = 1024
    query: int = 8192
    """Characters of one query."""


def make_app(
    corpus: Corpus,
    index: Index,
    topk: int = 3,
    max_batch: int = 32,
    limits: Limits = Limits(),
    token: str | None = None,
) -> FastAPI:
    """Create the service over a loaded index.

    `topk` is the default number of passages. At most `max_batch` queries are searched at once.
    With a token, clients have to send it.
    """
    desk = Desk(corpus, index, max_batch)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        working = asyncio.create_task(desk.work())
        yield
        working.cancel()
        desk.thread.shutdown(cancel_futures=True)

    app = application("verlite retriever", lifespan, token)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "documents": len(corpus), "retriever": index.name, "topk": topk}

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        asked = parse(
            await read_body(request, limits.body, "send fewer queries at a time"), topk, limits
        )
        try:
            texts = await desk.answer(asked, request.is_disconnected)
        except HTTPException:
            raise
        except Exception as error:  # uvicorn would close the connection without an answer
            LOG.exception("the search failed")
            raise HTTPException(
                500, f"the search failed: {type(error).__name__}: {error}"
            ) from None
        return Response(f'{{"result": [{", ".join(texts)}]}}', media_type="application/json")

    return app


@dataclass(frozen=True)
class Asked:
    """A parsed request."""

    queries: list[str]
    topk: int
    scores: bool


def parse(body: bytes, topk: int, limits: Limits) -> Asked:
    """Parse {"queries", "topk", "return_scores"}, or {"query"} for a single one.

    Other fields are ignored, as in Search-R1.

    Raises:
        HTTPException: status 422, with a sentence that names the field.
    """
    value = parse_object(body, '{"queries": ["..."], "topk": 3}')
    given = [name for name in ("queries", "query") if value.get(name) is not None]
    if len(given) != 1:
        raise wrong(
            "the body has both queries and query; keep one"
            if given
            else "the body has no queries; give a list of texts"
        )
    queries = value["queries"] if given == ["queries"] else [value["query"]]
    if not isinstance(queries, list):
        raise wrong(f"queries is a {type(queries).__name__}, expected a list of texts")
    if len(queries) > limits.queries:
        raise wrong(
            f"queries has {len(queries)} entries, at most {limits.queries} may be asked at a time"
        )
    for place, query in enumerate(queries):
        name = f"queries[{place}]" if given == ["queries"] else "query"
        if not isinstance(query, str):
            raise wrong(f"{name} is a {type(query).__name__}, expected text")
        if len(query) > limits.query:
            raise wrong(f"{name} has {len(query)} characters, at most {limits.query} are allowed")
        try:
            query.encode()
        except UnicodeEncodeError:
            raise wrong(f"{name} has an unpaired surrogate, which is not a character") from None
    wanted, scores = value.get("topk"), value.get("return_scores")
    if wanted is not None and (type(wanted) is not int or not 1 <= wanted <= MAX_TOPK):
        raise wrong(
            f"topk is {json.dumps(wanted)[:40]}, expected a whole number from 1 to {MAX_TOPK}"
        )
    if scores is not None and not isinstance(scores, bool):
        raise wrong(f"return_scores is {json.dumps(scores)[:40]}, expected true or false")
    return Asked(queries, topk if wanted is None else wanted, bool(scores))


@dataclass
class Share:
    """The part of a request that is searched at once."""

    asked: Asked
    gone: Callable[[], Awaitable[bool]]
    """Returns whether the client has disconnected."""
    texts: asyncio.Future[list[str]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Desk:
    """A queue of requests in front of the index. One thread searches, so the event loop is free.

    A request queues `max_batch` of its queries at a time, so a large one does not block small ones.
    Waiting queries of several requests are searched together, which makes a dense encoder faster.
    """

    def __init__(self, corpus: Corpus, index: Index, max_batch: int) -> None:
        self.corpus = corpus
        self.index = index
        self.max_batch = max_batch
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._waiting: deque[Share] = deque()
        self._arrival = asyncio.Event()

    async def answer(self, asked: Asked, gone: Callable[[], Awaitable[bool]]) -> list[str]:
        """Return the hits of each query as JSON, in order. Stop early if the client is `gone`."""
        texts: list[str] = []
        for start in range(0, len(asked.queries), self.max_batch):
            share = Share(
                Asked(asked.queries[start : start + self.max_batch], asked.topk, asked.scores), gone
            )
            self._waiting.append(share)
            self._arrival.set()
            texts += await share.texts
        return texts

    async def work(self) -> None:
        """Search for waiting requests, forever."""
        while True:
            await self._arrival.wait()
            shares = [share for share in self._take() if not await _dropped(share)]
            if not shares:
                continue
            loop, batch = asyncio.get_running_loop(), [share.asked for share in shares]
            try:
                answers = await loop.run_in_executor(self.thread, self._search, batch)
                for share, texts in zip(shares, answers, strict=True):
                    if not share.texts.cancelled():
                        share.texts.set_result(texts)
            except Exception as error:
                for share in shares:
                    if not share.texts.done():
                        share.texts.set_exception(error)

    def _take(self) -> list[Share]:
        shares = [self._waiting.popleft()]
        room = self.max_batch - len(shares[0].asked.queries)
        while self._waiting and len(self._waiting[0].asked.queries) <= room:
            shares.append(self._waiting.popleft())
            room -= len(shares[-1].asked.queries)
        if not self._waiting:
            self._arrival.clear()
        return shares

    def _search(self, batch: list[Asked]) -> list[list[str]]:
        """Search in the thread. Hits are encoded one query at a time to free the event loop."""
        hits = iter(
            self.index.search(
                [query for asked in batch for query in asked.queries],
                max(asked.topk for asked in batch),
            )
        )
        return [
            [self._text(next(hits)[: asked.topk], asked.scores) for _ in asked.queries]
            for asked in batch
        ]

    def _text(self, hits: list[Hit], scores: bool) -> str:
        documents = [(self.corpus[row], score) for row, score in hits]
        items = [
            {"document": document, "score": score} if scores else document
            for document, score in documents
        ]
        return json.dumps(items, ensure_ascii=False, allow_nan=False)


async def _dropped(share: Share) -> bool:
    """Return whether the share is no longer needed. Its waiter gets an exception."""
    if not share.texts.done() and await share.gone():
        share.texts.set_exception(GONE)
    return share.texts.done()


@contextmanager
def progress() -> Iterator[Track]:
    """Show the progress of an index on standard error, if that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    out = console(stderr=True)
    with Progress(*columns, console=out, disable=not out.is_terminal) as bars:

        def track(items: Any, description: str, total: int | None) -> Any:
            return bars.track(items, total=total, description=description)

        yield track
