"""Where this process is in its work, for the heartbeats of a worker (`controller.heartbeat`).

Code that works in a loop calls `tick` once per turn. It costs less than a microsecond and never
waits. Imports the standard library only, because the engines report here too.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Progress:
    """The position of this process.

    Attributes:
        call: method of the worker that is running; "" between two calls.
        calls: how many calls have begun.
        ticks: how many turns of loops have passed in this call.
        part: position in an outer loop, such as "mini-batch 1 of 4".
        turn: position in the inner loop, such as "micro-batch 2 of 8".
        requests: unfinished requests of the generation engine; None outside of generation.
        waits_for: something outside the run with a time limit of its own, such as "the disk"; "" if
            the process does not wait for such a thing.
        in_group: whether collectives make this process wait for other ranks of its role.
        pending: unfinished requests of the generation engine, also between two calls.
        steps: generation steps and weight loads of the engine since the process started.
    """

    call: str = ""
    calls: int = 0
    ticks: int = 0
    part: str = ""
    turn: str = ""
    requests: int | None = None
    waits_for: str = ""
    in_group: bool = False
    pending: int = 0
    steps: int = 0


here = Progress()
"""The position of this process. The main thread and the engine's thread write it."""


def begin(call: str) -> None:
    """Start a call of the worker."""
    here.call, here.part, here.turn, here.waits_for = call, "", "", ""
    here.requests = None
    here.ticks = 0
    here.calls += 1


def end() -> None:
    """End the call."""
    here.call = ""
    here.requests = None
    here.ticks += 1


def tick(turn: str = "") -> None:
    """Say that a turn of a loop has begun or ended: this process makes progress."""
    here.turn = turn
    here.ticks += 1


def ticking(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, with a tick for each."""
    for item in items:
        tick()
        yield item


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Mark a wait for something with a time limit of its own: no progress is expected meanwhile."""
    before, here.waits_for = here.waits_for, what
    try:
        yield
    finally:
        here.waits_for = before
        here.ticks += 1
