"""Requests that several items share, for services that answer a list per request."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from verlite.http.client import Client, Refused, Retry, Server, Slow

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False)
class Batches(Generic[Item, Result]):
    """Ask a service about items, `size` of them per request.

    A request is sent once `size` items wait, or `window_s` after the first of them. One that failed
    is repeated in two halves, so that an item that the service rejects, crashes on or is slow with
    does not fail the others. `size` is halved after a timeout, and raised by one after each
    success, up to `largest`. With `alone` each item has its own request.
    """

    client: Client
    """Of the service; it must be open when requests are sent."""
    largest: int
    """Items in one request."""
    send: Callable[[Server, Sequence[Item], float], Awaitable[Sequence[Result]]]
    """(server, items, seconds left) -> one result per item, in order."""
    deadline: Callable[[Item], float]
    """Returns when an item must be answered, as a value of time.monotonic()."""
    succeeded: Callable[[Item, Result, int], None]
    """Gets each item, its result, and the number of attempts that failed before."""
    failed: Callable[[Item, Exception], None]
    """Gets each other item and the cause: Refused, Unavailable, or an error of `send` or
    `succeeded`."""
    window_s: float = 0.0
    """How long an item waits for others to share its request."""
    alone: bool = False

    def __post_init__(self) -> None:
        self.size = self.largest
        self._waiting: list[Item] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, item: Item) -> None:
        """Send an item with the next request."""
        self._waiting.append(item)
        if len(self._waiting) >= self.size:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.window_s, self.flush)

    def flush(self) -> None:
        """Send the items that wait for others."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        items, self._waiting = self._waiting, []
        size = 1 if self.alone else self.size
        for start in range(0, len(items), size):
            request = self._answer(items[start : start + size])
            task = asyncio.get_running_loop().create_task(request)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Drop the items that wait, and cancel all requests."""
        if self._timer is not None:
            self._timer.cancel()
        self._waiting, self._timer = [], None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = set()

    async def _answer(self, items: Sequence[Item], tries: int = 0) -> None:
        """Answer the items of one request. `tries` attempts failed before. Never raises."""
        try:
            tries = await self._together(items, tries)
            if tries:
                half = len(items) // 2
                await asyncio.gather(
                    *(self._answer(part, tries) for part in (items[:half], items[half:]))
                )
        except Exception as error:  # any exception must reach those who wait for the items
            for item in items:
                self.failed(item, error)

    async def _together(self, items: Sequence[Item], tries: int) -> int:
        """Return 0 if all items are answered, else the failed attempts: the request is split."""

        def send(server: Server, left_s: float) -> Awaitable[Sequence[Result]]:
            return self.send(server, items, left_s)

        several = len(items) > 1
        try:
            answer = await self.client.call(
                send,
                lambda: max(self.deadline(item) for item in items),
                tries=tries,
                raise_retry=several,
            )
        except Refused as error:
            if several:
                return error.tries
            raise
        except Retry as error:
            # The parts of a split request do not count: one item may have made them slow.
            if error.tries == 1 and isinstance(error, Slow):
                self.size = max(1, len(items) // 2)
            return error.tries
        self.size = min(self.largest, self.size + (not answer.tries))
        for item, result in zip(items, answer.value, strict=True):
            self.succeeded(item, result, answer.tries)
        return 0
