"""A queue of requests in front of a thread that computes, for services."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from verlite.http.server import GONE, LOG

Job = TypeVar("Job")
Answer = TypeVar("Answer")


class Lost(RuntimeError):
    """What computes has failed for good. The service cannot answer any more."""


@dataclass
class _Waiting(Generic[Job, Answer]):
    job: Job
    gone: Callable[[], Awaitable[bool]]
    """Returns whether the client has disconnected."""
    answer: "asyncio.Future[Answer]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(eq=False)
class Desk(Generic[Job, Answer]):
    """A queue in front of what computes. One thread computes, so the event loop is free.

    Waiting jobs are computed together as far as they fit. A job whose client has disconnected is
    dropped.
    """

    compute: Callable[[list[Job]], list[Answer]]
    """Jobs -> their answers, in order. It runs in the thread."""
    size: Callable[[Job], int]
    """Of a job."""
    room: int
    """Jobs of at most this size together are computed together. A larger one is computed alone."""
    kind: Callable[[Job], object] = lambda job: None
    """Only jobs of one kind are computed together."""
    on_lost: Callable[[], None] | None = None
    """An error of `compute` is final, and this is called then. None: it is the error of its jobs,
    and the next ones are computed."""
    lost: bool = False
    """What computes has failed for good."""

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._waiting: deque[_Waiting[Job, Answer]] = deque()
        self._arrival = asyncio.Event()

    @asynccontextmanager
    async def open(self, app: Any = None) -> AsyncIterator[None]:
        """Compute meanwhile: the lifespan of a service."""
        working = asyncio.create_task(self._work())
        yield
        working.cancel()
        self._thread.shutdown(cancel_futures=True)

    async def answer(self, job: Job, gone: Callable[[], Awaitable[bool]]) -> Answer:
        """Return the answer to a job.

        Raises:
            Lost: what computes has failed for good.
            HTTPException: 499, the client is `gone`.
        """
        if self.lost:
            raise Lost
        waiting: _Waiting[Job, Answer] = _Waiting(job, gone)
        self._waiting.append(waiting)
        self._arrival.set()
        return await waiting.answer

    async def _work(self) -> None:
        while not self.lost:
            await self._arrival.wait()
            batch = [waiting for waiting in self._take() if not await _dropped(waiting)]
            if batch:
                await self._answer(batch)

    def _take(self) -> list[_Waiting[Job, Answer]]:
        """Return the first job and those behind it that can be computed together with it."""
        taken = [self._waiting.popleft()]
        kind, room = self.kind(taken[0].job), self.room - self.size(taken[0].job)
        while (
            self._waiting
            and self.size(self._waiting[0].job) <= room
            and self.kind(self._waiting[0].job) == kind
        ):
            taken.append(self._waiting.popleft())
            room -= self.size(taken[-1].job)
        if not self._waiting:
            self._arrival.clear()
        return taken

    async def _answer(self, batch: list[_Waiting[Job, Answer]]) -> None:
        jobs = [waiting.job for waiting in batch]
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, self.compute, jobs)
            for waiting, answer in zip(batch, answers, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)
        except Exception as error:
            self.lost = self.on_lost is not None
            for waiting in [*batch, *self._waiting] if self.lost else batch:
                if not waiting.answer.done():
                    waiting.answer.set_exception(Lost() if self.lost else error)
            if self.on_lost:
                LOG.exception("the model failed; the service stops")
                self.on_lost()


async def _dropped(waiting: _Waiting[Any, Any]) -> bool:
    """Return whether the job is no longer needed. Its waiter gets an exception."""
    is_gone = not waiting.answer.done() and await waiting.gone()
    if is_gone and not waiting.answer.done():  # it may have been cancelled meanwhile
        waiting.answer.set_exception(GONE)
    return waiting.answer.done()
