"""Signals in the driver: stop after the current step at the first, terminate at the second."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. A KeyboardInterrupt, so that cleanup for Ctrl-C also runs for SIGTERM."""


_pending: list[str] = []


def terminate(reason: str) -> NoReturn:
    """Raise Terminated from a signal handler.

    Ray replaces an exception that a handler raises during one of its waits with a bare
    KeyboardInterrupt. The reason is stored, so that `wait_for_refs` can raise Terminated again.
    """
    _pending.append(reason)
    raise Terminated(reason)


def wait_for_refs(
    refs: list[Any], num_returns: int, timeout_s: float
) -> tuple[list[Any], list[Any]]:
    """Return (ready, not ready) like `ray.wait`.

    Raises:
        Terminated: if SIGTERM interrupted the wait.
    """
    import ray

    try:
        ready, rest = ray.wait(refs, num_returns=num_returns, timeout=timeout_s)
    except KeyboardInterrupt:
        if _pending:
            raise Terminated(_pending.pop()) from None
        raise
    return ready, rest


def apply_default_action(number: int) -> None:
    """Handle a signal in a forked child as if the parent had installed no handler for it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class StopRequest:
    """Turn the first SIGTERM or SIGUSR1 into a flag that a loop checks between steps.

        with StopRequest() as stop:
            for step in ...:
                ...
                if stop.requested:
                    save()
                    break

    A second SIGTERM raises Terminated at once. Ctrl-C always raises KeyboardInterrupt. Python
    allows signal handlers only in the main thread; in other threads this class does nothing.

    Attributes:
        requested: name of the signal, or None.
    """

    def __init__(self, on_request: Callable[[str], None] = lambda name: None) -> None:
        """Create a request. `on_request` is called with the name of the first signal."""
        self.requested: str | None = None
        self.on_request = on_request
        self._previous_handlers: dict[int, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            apply_default_action(number)
        elif self.requested is None:
            self.requested = signal.Signals(number).name
            self.on_request(self.requested)
        elif number == signal.SIGTERM:
            terminate("second SIGTERM")
