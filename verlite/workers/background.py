"""Coroutines that run on a thread of their own while the worker takes other calls."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, TypeVar

CLOSE_S = 10.0
"""How long `close` waits for the thread, which a job may block."""

T = TypeVar("T")
Jobs = Sequence[Callable[[], Coroutine[Any, Any, T]]]

_log = logging.getLogger(__name__)


class Background(Generic[T]):
    """An event loop in a thread, until `close`.

    The first job that fails ends all others: an engine or a reward function that cannot be used
    fails every sample. Failures of a single sample are part of its result.
    """

    def __init__(self, resources: AbstractAsyncContextManager[Any]) -> None:
        """Start the thread. `resources` are open in its event loop while jobs run."""
        self._resources = resources
        self._results: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._new: asyncio.Queue[Jobs[T]] = asyncio.Queue()
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="verlite-background", daemon=True
        )
        self._thread.start()
        self._loop, self._main = started.result()

    def start(self, jobs: Jobs[T]) -> None:
        """Start jobs together, in one iteration of the event loop. Raises an earlier failure."""
        self._raise_failure()
        with suppress(RuntimeError):  # the loop has just ended; `finished` raises why
            self._loop.call_soon_threadsafe(self._new.put_nowait, jobs)

    def finished(self, wait_s: float) -> list[T]:
        """Return the results since the last call, in the order of completion.

        Waits up to `wait_s` seconds for the first one. If there are none, raises the failure of a
        job.
        """
        results: list[T | None] = []
        with suppress(queue.Empty):
            results.append(self._results.get(timeout=wait_s))
            while True:
                results.append(self._results.get_nowait())
        found = [result for result in results if result is not None]
        if not found:
            self._raise_failure()
        return found

    def close(self) -> None:
        """Cancel all jobs and end the thread.

        A job that blocks the thread, or that ignores its cancellation, is left behind after CLOSE_S
        with a warning. Its result is dropped.
        """
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log.warning("a sample in the background did not end within %g s; left behind", CLOSE_S)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self, started: "Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]]") -> None:
        try:
            asyncio.run(self._serve(started))
        except asyncio.CancelledError:  # `close`
            pass
        except BaseException as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self._failure = error
            self._results.put(None)  # wakes `finished`

    async def _serve(
        self, started: "Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]]"
    ) -> None:
        main = asyncio.current_task()
        assert main is not None
        started.set_result((asyncio.get_running_loop(), main))
        async with self._resources, asyncio.TaskGroup() as tasks:
            while True:
                for job in await self._new.get():
                    tasks.create_task(self._finish(job))

    async def _finish(self, job: Callable[[], Coroutine[Any, Any, T]]) -> None:
        try:
            self._results.put(await job())
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # A task group takes this for a cancellation of its own, and would lose the job.
            raise RuntimeError("a job raised CancelledError, which nobody had requested") from error
