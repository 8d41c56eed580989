"""`verlite serve`: run a service that training calls over HTTP."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from verlite.cli.common import fail

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run a service that training calls over HTTP.",
)


class Retriever(StrEnum):
    """Search methods."""

    bm25 = "bm25"
    dense = "dense"


class FaissIndex(StrEnum):
    """Index types, by their FAISS names."""

    Flat = "Flat"
    HNSW64 = "HNSW64"


@app.command()
def retriever(
    corpus: Annotated[
        str,
        typer.Option(help="Passages, .jsonl or .jsonl.gz: id and contents, or id, title and text."),
    ],
    index: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Build the index here once, then load it from here."),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build the index again and replace the old one.")
    ] = False,
    retriever: Annotated[
        Retriever, typer.Option(help="dense needs pip install 'verlite[dense]'.")
    ] = Retriever.bm25,
    topk: Annotated[
        int,
        typer.Option(min=1, max=100, help="Passages per query, if the request has no topk."),
    ] = 3,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on. By default only this machine can connect."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    k1: Annotated[float, typer.Option(min=0, help="bm25: weight of repeated words.")] = 0.9,
    b: Annotated[
        float, typer.Option(min=0, max=1, help="bm25: strength of length normalization.")
    ] = 0.4,
    model: Annotated[
        str, typer.Option(help="dense: encoder, a sentence-transformers name or folder.")
    ] = "intfloat/e5-base-v2",
    faiss_index: Annotated[
        FaissIndex, typer.Option(help="dense: Flat is exact; HNSW64 is faster on large corpora.")
    ] = FaissIndex.Flat,
    query_prefix: Annotated[str, typer.Option(help="dense: text before each query.")] = "query: ",
    passage_prefix: Annotated[
        str, typer.Option(help="dense: text before each passage.")
    ] = "passage: ",
    max_batch: Annotated[int, typer.Option(min=1, help="Queries per search batch.")] = 32,
    max_queries: Annotated[int, typer.Option(min=1, help="Queries per request.")] = 1024,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes per request.")] = 1 << 20,
) -> None:
    """Serve search over a corpus: POST /retrieve in Search-R1's wire format.

    docs/retriever.md describes the format.
    """
    from verlite.services.corpus import ServiceError
    from verlite.services.index import BM25, Index, open_index
    from verlite.services.retriever import Limits, bind, make_app, progress, run, url

    try:
        bound = bind(host, port)
    except ServiceError as error:
        fail(error, code=1)
    try:
        if rebuild and index is None:
            raise ServiceError("--rebuild has no effect without --index DIR")
        if retriever == Retriever.dense:
            from verlite.services.dense import Dense

            finder: Index = Dense(model, faiss_index, query_prefix, passage_prefix)
        else:
            finder = BM25(k1, b)
        folder = Path(index) if index else None
        with progress() as track:
            passages = open_index(Path(corpus), finder, folder, rebuild, track)
    except (ServiceError, OSError) as error:
        fail(error)
    limits = Limits(body=max_body, queries=max_queries)
    service = make_app(passages, finder, topk, max_batch, limits)
    run(service, bound, f"serving {len(passages)} documents ({finder.name}) at {url(bound)}")
