"""Scoring while generation goes on: a thread scores what has been finished, as soon as it is free."""

import queue
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from verlite.rewards.result import RewardItem, RewardResult
from verlite.rewards.scorer import Scorer


class Stream:
    """Scores items in the order in which they come, together with whatever else is waiting then."""

    def __init__(self, scorer: Scorer, timeout_s: float) -> None:
        self._scorer, self._timeout_s = scorer, timeout_s
        self._queue: queue.SimpleQueue[tuple[Any, RewardItem] | None] = queue.SimpleQueue()
        self._ends = float("inf")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._scored = self._thread.submit(self._run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Without results() before it, as after a failure: what is being scored ends by itself, and nothing more is begun."""
        self._ends = min(self._ends, time.monotonic())
        self._queue.put(None)
        self._thread.shutdown(wait=False)

    def add(self, key: Any, item: RewardItem) -> None:
        """Score this item, beside whatever the caller does next. Raises what scoring has raised: nothing will be scored any more."""
        if self._scored.done():
            self._scored.result()
        self._queue.put((key, item))

    def results(self) -> dict[Any, RewardResult]:
        """Results by key, when all that was added is scored, at most timeout_s from now.

        Raises what `Scorer.score` raises.
        """
        self._ends = time.monotonic() + self._timeout_s
        self._queue.put(None)
        return self._scored.result()

    def _run(self) -> dict[Any, RewardResult]:
        results: dict[Any, RewardResult] = {}
        going = True
        while going:
            waiting = [self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get())
            going = None not in waiting
            items = dict(entry for entry in waiting if entry is not None)
            left = min(self._timeout_s, self._ends - time.monotonic())
            results |= zip(items, self._scorer.score(list(items.values()), left), strict=True)
        return results
