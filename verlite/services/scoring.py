"""Score the answers of many requests at once, in processes that can be killed."""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from verlite.http.server import GONE
from verlite.rewards.pool import Pool
from verlite.rewards.result import RewardItem, RewardResult, failure

CHUNK = 8
"""Answers that a process scores before it looks for another request."""
LOAD_S = 120.0
"""Seconds to load the scoring function."""
GONE_CHECK_S = 1.0
"""How often a request looks whether its client has disconnected."""


class Busy(Exception):
    """Too many answers wait already."""


@dataclass(eq=False)
class _Job:
    """The answers of one request."""

    calls: Sequence[dict[str, Any]]
    done: asyncio.Event
    loop: asyncio.AbstractEventLoop
    results: list[RewardResult | None] = field(default_factory=list)
    next: int = 0
    left: int = 0


class Scoring:
    """Processes that score. Requests take turns, so a large one does not block small ones.

    Each process belongs to one thread, so one slow answer delays the other answers of its chunk
    only.
    """

    def __init__(
        self,
        target: str,
        limit_s: float,
        processes: int,
        most_waiting: int,
        constants: dict[str, Any] | None = None,
        secret_env_vars: Sequence[str] = (),
    ) -> None:
        """Describe the processes. `start` starts them.

        Args:
            target: the function, as `file.py:name` or `package.module:name`.
            limit_s: seconds of one answer.
            processes: how many.
            most_waiting: answers that may wait over all requests.
            constants: keyword arguments that every call gets too.
            secret_env_vars: variables that the processes get although their names look like those
                of secrets.
        """
        self._constants = constants or {}
        names = [*RewardItem("", "", None).arguments(), *self._constants]
        self.limit_s = limit_s
        self.most_waiting = most_waiting
        self.waiting = 0
        self._pools = [
            Pool(
                target,
                names,
                limit_s,
                share=processes,
                processes=1,
                secret_env_vars=secret_env_vars,
            )
            for _ in range(processes)
        ]
        self._jobs: deque[_Job] = deque()
        self._condition = threading.Condition()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, args=[pool], name="scoring", daemon=True)
            for pool in self._pools
        ]

    def start(self) -> None:
        """Load the function in one process and start the threads. Raises FunctionError."""
        self._pools[0].start(LOAD_S)
        for thread in self._threads:
            thread.start()

    @property
    def takes_lists(self) -> bool:
        """Whether the function is OpenRLHF's reward_func(queries, prompts, labels)."""
        return bool(self._pools[0].takes_lists)

    def close(self) -> None:
        """End all threads and processes."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        for pool in self._pools:
            pool.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        for pool in self._pools:
            pool.close()

    async def score(
        self, calls: Sequence[dict[str, Any]], gone: Callable[[], Awaitable[bool]]
    ) -> list[RewardResult]:
        """Return one result per call, in order.

        Raises:
            Busy: too many answers wait already.
            HTTPException: 499, the client is `gone`. Its other answers are not scored.
        """
        if not calls:
            return []
        job = _Job(calls, asyncio.Event(), asyncio.get_running_loop())
        job.results = [None] * len(calls)
        job.left = len(calls)
        with self._condition:
            if self.waiting + len(calls) > self.most_waiting and self.waiting:
                raise Busy(f"{self.waiting} answers are waiting already; ask again later")
            self.waiting += len(calls)
            self._jobs.append(job)
            self._condition.notify_all()
        try:
            while True:
                try:
                    await asyncio.wait_for(job.done.wait(), GONE_CHECK_S)
                    break
                except TimeoutError:
                    if await gone():
                        raise GONE from None
        finally:
            self._drop(job)
        return [result for result in job.results if result is not None]

    def _drop(self, job: _Job) -> None:
        with self._condition:
            if job in self._jobs:
                self._jobs.remove(job)
            self.waiting -= len(job.calls) - job.next
            job.next = len(job.calls)

    def _work(self, pool: Pool) -> None:
        while True:
            with self._condition:
                while not self._jobs and not self._stopped:
                    self._condition.wait()
                if self._stopped:
                    return
                job = self._jobs.popleft()
                start, job.next = job.next, min(job.next + CHUNK, len(job.calls))
                calls = [{**call, **self._constants} for call in job.calls[start : job.next]]
                self.waiting -= len(calls)
                if job.next < len(job.calls):
                    self._jobs.append(job)
            results = self._scored(pool, calls)
            with self._condition:
                job.results[start : start + len(calls)] = results
                job.left -= len(calls)
            if job.left == 0:
                with suppress(RuntimeError):  # the service has stopped
                    job.loop.call_soon_threadsafe(job.done.set)

    def _scored(self, pool: Pool, calls: Sequence[dict[str, Any]]) -> list[RewardResult]:
        try:
            # The pool enforces the limit of each call. This one is for a process that cannot start.
            return pool.run(calls, LOAD_S + self.limit_s * len(calls))
        except Exception as error:  # a changed file, no process: requests must not wait for ever
            return [failure(error)] * len(calls)
