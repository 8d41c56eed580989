"""The reference model as an HTTP service: POST /log_probs, GET /model, GET /health.

docs/reference_service.md has the wire format.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Protocol

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response

from verlite.engine.reference_wire import Job, ModelInfo, answer, read_request
from verlite.http.desk import Desk, Lost
from verlite.http.server import application, parse_object, read_body, wrong

EXAMPLE = '{"ids": BASE64, "lengths": [5], "scored": [2], "temperature": 1.0}'


class Model(Protocol):
    """What computes log-probs."""

    def log_probs(
        self, sequences: Sequence[np.ndarray], scored: Sequence[int], temperature: float
    ) -> list[np.ndarray]:
        """Return the log-probs of each sequence's last `scored` tokens, float32.

        Requests are checked before, so that any exception means that the model is lost.
        """
        ...


def make_app(
    model: Model,
    info: ModelInfo,
    batch_tokens: int,
    max_body: int = 1 << 26,
    max_sequences: int = 4096,
    token: str | None = None,
    on_lost: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Create the service. app.state.desk.lost says whether it has lost its model.

    Args:
        info: facts about the model, for clients.
        batch_tokens: tokens of requests that are computed together. A larger request is computed
            alone.
        max_body: bytes of one request.
        max_sequences: of one request.
        token: the bearer token that clients have to send, or None.
        on_lost: is called when the model has failed; the service should then end.
    """
    desk: Desk[Job, list[np.ndarray]] = Desk(
        lambda jobs: _log_probs(model, jobs),
        lambda job: job.tokens,
        batch_tokens,
        kind=lambda job: job.temperature,
        on_lost=on_lost,
    )
    app = application("verlite reference", desk.open, token)
    app.state.desk = desk

    @app.get("/health")
    async def health() -> Response:
        if desk.lost:
            raise HTTPException(503, "a process of the model has ended")
        return Response('{"status": "healthy"}', media_type="application/json")

    @app.get("/model")
    async def about() -> dict[str, object]:
        return asdict(info)

    @app.post("/log_probs")
    async def log_probs(request: Request) -> dict[str, str]:
        body = parse_object(await read_body(request, max_body), EXAMPLE)
        try:
            job = read_request(body, info.vocab_size, info.max_length, max_sequences)
        except ValueError as error:
            raise wrong(str(error)) from None
        try:
            values = await desk.answer(job, request.is_disconnected)
        except Lost:
            raise HTTPException(503, "a process of the model has ended") from None
        return answer(values, info.model)

    return app


def _log_probs(model: Model, jobs: Sequence[Job]) -> list[list[np.ndarray]]:
    """Return the log-probs of jobs of one temperature."""
    sequences = [sequence for job in jobs for sequence in job.sequences]
    scored = [last for job in jobs for last in job.scored]
    values = iter(model.log_probs(sequences, scored, jobs[0].temperature))
    return [list(islice(values, len(job.sequences))) for job in jobs]
