"""One line that says what a run waits for."""

import sys
import time
from typing import Any

PRINT_EVERY_S = 30.0


class Countdown:
    """A line that is updated in place on a terminal. Elsewhere it is printed every 30 s."""

    def __enter__(self) -> "Countdown":
        self._status: Any = None
        self._last_print: float | None = None
        return self

    def show(self, text: str) -> None:
        """Update the line."""
        now = time.monotonic()
        if sys.stderr.isatty():
            from verlite.terminal import console

            if self._status is None:
                self._status = console(stderr=True).status(text)
                self._status.start()
            self._status.update(text)
        elif self._last_print is None or now - self._last_print > PRINT_EVERY_S:
            self._last_print = now
            print(text, file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()
