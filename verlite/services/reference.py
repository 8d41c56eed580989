"""The reference model as an HTTP service: POST /log_probs, GET /model, GET /health.

docs/reference_service.md has the wire format.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response

from verlite.http.server import GONE, LOG, application, parse_object, read_body, wrong
from verlite.services.reference_wire import Job, ModelInfo, answer, read_request

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


class ModelLost(RuntimeError):
    """A process of the model has ended. The service cannot answer any more."""


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    body: int = 1 << 26
    """Bytes."""
    sequences: int = 4096


def make_app(
    model: Model,
    info: ModelInfo,
    batch_tokens: int,
    limits: Limits = Limits(),
    token: str | None = None,
    on_lost: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Create the service. app.state.desk.lost says whether it has lost its model.

    Args:
        info: facts about the model, for clients.
        batch_tokens: tokens of requests that are computed together. A larger request is computed
            alone.
        token: the bearer token that clients have to send, or None.
        on_lost: is called when the model has failed; the service should then end.
    """
    desk = Desk(model, batch_tokens, on_lost)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        working = asyncio.create_task(desk.work())
        yield
        working.cancel()
        desk.thread.shutdown(cancel_futures=True)

    app = application("verlite reference", lifespan, token)
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
        body = parse_object(await read_body(request, limits.body), EXAMPLE)
        try:
            job = read_request(body, info.vocab_size, info.max_length, limits.sequences)
        except ValueError as error:
            raise wrong(str(error)) from None
        try:
            values = await desk.answer(job, request.is_disconnected)
        except ModelLost:
            raise HTTPException(503, "a process of the model has ended") from None
        return answer(values, info.model)

    return app


@dataclass
class Waiting:
    """A request that waits to be computed."""

    job: Job
    gone: Callable[[], Awaitable[bool]]
    """Returns whether the client has disconnected."""
    values: asyncio.Future[list[np.ndarray]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Desk:
    """A queue of requests in front of the model. One thread waits for the model.

    Waiting requests with the same temperature are computed together.

    lost: the model has failed; nothing is computed any more.
    """

    def __init__(self, model: Model, batch_tokens: int, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self.lost = False
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._model = model
        self._batch_tokens = batch_tokens
        self._waiting: deque[Waiting] = deque()
        self._arrival = asyncio.Event()

    async def answer(self, job: Job, gone: Callable[[], Awaitable[bool]]) -> list[np.ndarray]:
        """Return the log-probs of a job. Raises ModelLost."""
        if self.lost:
            raise ModelLost
        waiting = Waiting(job, gone)
        self._waiting.append(waiting)
        self._arrival.set()
        return await waiting.values

    async def work(self) -> None:
        """Compute waiting requests, forever."""
        while True:
            await self._arrival.wait()
            batch = [waiting for waiting in self._take() if not await _dropped(waiting)]
            if not batch:
                continue
            jobs = [waiting.job for waiting in batch]
            sequences = [sequence for job in jobs for sequence in job.sequences]
            scored = [last for job in jobs for last in job.scored]
            temperature = jobs[0].temperature
            try:
                values = await asyncio.get_running_loop().run_in_executor(
                    self.thread, self._model.log_probs, sequences, scored, temperature
                )
            except Exception:
                LOG.exception("the model failed; the service stops")
                for waiting in [*batch, *self._waiting]:
                    if not waiting.values.done():
                        waiting.values.set_exception(ModelLost())
                self.lost = True
                self._on_lost()
                return
            start = 0
            for waiting in batch:
                end = start + len(waiting.job.sequences)
                if not waiting.values.done():
                    waiting.values.set_result(values[start:end])
                start = end

    def _take(self) -> list[Waiting]:
        """Return the first request and those behind it that can be computed together with it."""
        taken = [self._waiting.popleft()]
        room = self._batch_tokens - taken[0].job.tokens
        while (
            self._waiting
            and self._waiting[0].job.tokens <= room
            and self._waiting[0].job.temperature == taken[0].job.temperature
        ):
            room -= self._waiting[0].job.tokens
            taken.append(self._waiting.popleft())
        if not self._waiting:
            self._arrival.clear()
        return taken


async def _dropped(waiting: Waiting) -> bool:
    """Return whether the request is no longer needed. Its waiter gets an exception."""
    if not waiting.values.done() and await waiting.gone():
        waiting.values.set_exception(GONE)
    return waiting.values.done()
