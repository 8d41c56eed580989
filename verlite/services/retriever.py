"""The retriever as an HTTP service with Search-R1's wire format: POST /retrieve, GET /health."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response

from verlite.files import kind_of
from verlite.http.desk import Desk
from verlite.http.server import LOG, application, one_of, parse_object, read_body, wrong
from verlite.services.index import Corpus, Hit, Index, Track
from verlite.terminal import console

MAX_TOPK = 100
MAX_QUERY = 8192
"""Characters of one query."""


def make_app(
    corpus: Corpus,
    index: Index,
    topk: int = 3,
    max_batch: int = 32,
    max_body: int = 1 << 20,
    max_queries: int = 1024,
    token: str | None = None,
) -> FastAPI:
    """Create the service over a loaded index.

    Args:
        topk: passages per query, if the request does not say it.
        max_batch: queries that are searched at once.
        max_body: bytes of one request.
        max_queries: of one request.
        token: clients have to send it.
    """
    desk: Desk[Queries, list[str]] = Desk(
        lambda batch: _search(corpus, index, batch), lambda asked: len(asked.queries), max_batch
    )
    app = application("verlite retriever", desk.open, token)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "documents": len(corpus), "retriever": index.name, "topk": topk}

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        body = await read_body(request, max_body, "send fewer queries at a time")
        asked = parse(body, topk, max_queries)
        try:
            # A large request waits with a part at a time, so it does not block small ones.
            texts = [
                text
                for start in range(0, len(asked.queries), max_batch)
                for text in await desk.answer(
                    replace(asked, queries=asked.queries[start : start + max_batch]),
                    request.is_disconnected,
                )
            ]
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
class Queries:
    """A parsed request."""

    queries: list[str]
    topk: int
    scores: bool


def parse(body: bytes, topk: int, max_queries: int) -> Queries:
    """Parse {"queries", "topk", "return_scores"}, or {"query"} for a single one.

    Other fields are ignored, as in Search-R1.

    Raises:
        HTTPException: status 422, with a sentence that names the field.
    """
    value = parse_object(body, '{"queries": ["..."], "topk": 3}')
    is_list = one_of(value, ("queries", "query"), "give a list of texts") == "queries"
    queries = value["queries"] if is_list else [value["query"]]
    if not isinstance(queries, list):
        raise wrong(f"queries is {kind_of(queries)}, expected a list of texts")
    if len(queries) > max_queries:
        raise wrong(
            f"queries has {len(queries)} entries, at most {max_queries} may be asked at a time"
        )
    for place, query in enumerate(queries):
        name = f"queries[{place}]" if is_list else "query"
        if not isinstance(query, str):
            raise wrong(f"{name} is {kind_of(query)}, expected text")
        if len(query) > MAX_QUERY:
            raise wrong(f"{name} has {len(query)} characters, at most {MAX_QUERY} are allowed")
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
    return Queries(queries, topk if wanted is None else wanted, bool(scores))


def _search(corpus: Corpus, index: Index, batch: list[Queries]) -> list[list[str]]:
    """Return the hits of each query as JSON. Several requests are searched together, which makes a
    dense encoder faster."""
    queries = [query for asked in batch for query in asked.queries]
    hits = iter(index.search(queries, max(asked.topk for asked in batch)))
    return [
        [_text(corpus, next(hits)[: asked.topk], asked.scores) for _ in asked.queries]
        for asked in batch
    ]


def _text(corpus: Corpus, hits: list[Hit], scores: bool) -> str:
    documents = [(corpus[row], score) for row, score in hits]
    items = [
        {"document": document, "score": score} if scores else document
        for document, score in documents
    ]
    return json.dumps(items, ensure_ascii=False, allow_nan=False)


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
