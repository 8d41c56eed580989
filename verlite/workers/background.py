"""Coroutines that run on a thread of their own while the worker takes other calls."""

import asyncio
import logging
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from verlite.rollout.types import EngineDied

CLOSE_S = 10.0
"""How long `close` waits for the thread, which a job may block."""

A = TypeVar("A")
T = TypeVar("T")
Jobs = Sequence[Callable[[], Coroutine[Any, Any, T]]]

_log = logging.getLogger(__name__)


class SamplesStuck(RuntimeError):
    """Samples wait for something that does not end: an environment, a reward."""


@dataclass
class Waits:
    """What each running sample waits for, and when one of them last went on."""

    limit_s: float
    """`trainer.phase_timeout_s`."""
    running: dict[tuple[str, int], str] = field(default_factory=dict)
    """{(uid, place in the group): "the engine", "env.step", ...}"""
    moved: float = 0.0

    def note(self, sample: tuple[str, int], what: str | None) -> None:
        """Note what a sample waits for from now on. None: it has ended."""
        if what is None:
            del self.running[sample]
        else:
            self.running[sample] = what
        self.moved = time.monotonic()

    def check(self, engine_moved: float, blocked_at: Callable[[], str]) -> None:
        """Check that samples make progress.

        Args:
            engine_moved: when the engine completed its last step, by time.monotonic().
            blocked_at: see `Background.blocked_at`.

        Raises:
            EngineDied: all wait for the engine, which makes no step.
            SamplesStuck: none has gone on within the limit, for another reason.
        """
        waits = Counter(list(self.running.values()))
        still_s = time.monotonic() - max(self.moved, engine_moved)
        if not waits or still_s <= self.limit_s:
            return
        limit = f"for {still_s:.1f} s (trainer.phase_timeout_s={self.limit_s:g})"
        counts = ", ".join(f"{count} wait for {what}" for what, count in waits.most_common())
        stack = blocked_at()
        if set(waits) == {"the engine"} and not stack:
            raise EngineDied(f"the engine hangs: no generation step completed {limit}: {counts}")
        at = f"\nA call that does not return blocks all samples:\n{stack}" if stack else ""
        raise SamplesStuck(
            f"no sample has made progress {limit}: {counts}. Give the calls that do not return a "
            f"time limit of their own; if they only need longer, raise the key{at}"
        )


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
            # After a failure nothing comes any more.
            results.append(self._results.get(timeout=wait_s if self._failure is None else 0))
            while True:
                results.append(self._results.get_nowait())
        found = [result for result in results if result is not None]
        if not found:
            self._raise_failure()
        return found

    def ask(self, question: Callable[[], Coroutine[Any, Any, A]], within_s: float) -> A:
        """Run a coroutine between the jobs, and return its result.

        Raises:
            TimeoutError: a job blocks the thread. RuntimeError: the thread has ended.
        """
        coroutine = question()
        try:
            answer = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise
        return answer.result(within_s)

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

    def blocked_at(self) -> str:
        """Return the stack that keeps the event loop from running, a line per call; "" if the loop
        only waits for something."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame else []
        if not stack or stack[-1].filename.endswith("selectors.py"):
            return ""
        lines = [f"  {call.filename}:{call.lineno} in {call.name}" for call in stack]
        starts = [i for i, call in enumerate(stack) if call.filename.endswith("asyncio/events.py")]
        return "\n".join(lines[max(starts, default=-1) + 1 :])

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
