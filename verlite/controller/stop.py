"""Signals in the driver. SIGTERM and SIGUSR1 request a stop, and Ctrl-C interrupts.

| signal | when | what happens |
|---|---|---|
| SIGTERM, SIGUSR1 | no finished step has to be saved | KeyboardInterrupt in the main thread |
| SIGTERM, SIGUSR1 | a finished step is not saved yet | only noted; the run saves, then ends |
| Ctrl-C | always | KeyboardInterrupt in the main thread |
| a second signal | always | the process ends at once |

If nothing has to be saved, the process ends within END_S seconds, else within SAVED_END_S after it
has saved: a thread ends it if the main thread does not. The guardian (controller/guardian.py) then
cleans up.
"""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
EXIT_STOPPED = 75
"""Stopped by SIGTERM or SIGUSR1; the same command resumes."""
EXIT_INTERRUPTED = 130
END_S = 8.0
"""How long cleaning up may take after a stop when nothing has to be saved."""
SAVED_END_S = 60.0
"""The same after a stop that had to save. Such a run ends as after its last step: workers have 10 s
to close, and each tracker 20 s to send its last metrics."""
REPEAT_S = 1.0
"""A second signal within this time is the first one again: `timeout`, for example, sends it to the
process and then to its group."""


def apply_default_action(number: int) -> None:
    """Handle a signal in a forked child as if the parent had installed no handler for it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class Stop:
    """The driver's answer to signals, as a context manager around the whole program.

    Python allows signal handlers only in the main thread; in other threads this class does nothing.

    Attributes:
        requested: name of the first signal, or None.
        must_save: returns whether a finished step has no checkpoint yet.
        on_defer: called with the signal's name when the run has to save before it ends.
        where: returns what the process is doing, for messages, such as "while starting Ray".
        checkpoint: returns what a message says about the last checkpoint.
        interrupted_at: `where()` at the time of the first signal.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self.must_save: Callable[[], bool] = lambda: False
        self.on_defer: Callable[[str], None] = lambda name: None
        self.where: Callable[[], str] = lambda: "while starting"
        self.checkpoint: Callable[[], str] = lambda: "Nothing was started."
        self.interrupted_at = ""
        self._pid = os.getpid()
        self._handlers_before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """Exit code of a process that a signal ended."""
        return EXIT_STOPPED if self.requested in ("SIGTERM", "SIGUSR1") else EXIT_INTERRUPTED

    def message(self) -> str:
        """Return the line that says which signal ended the run, where, and the last checkpoint."""
        what = f"stopped by {self.requested}"
        if self.exit_code == EXIT_INTERRUPTED:
            what = "interrupted"
        return f"{what} {self.interrupted_at}".rstrip() + f". {self.checkpoint()}"

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            # Python writes the number of each signal here at once, even while the main thread is
            # inside C code and cannot run a handler.
            self._received, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)
            os.register_at_fork(after_in_child=self._forget_in_child)
            signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, name="signals", daemon=True).start()
            for number in SIGNALS:
                self._handlers_before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._handlers_before:
            for number, handler in self._handlers_before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
            self._wakeup.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            apply_default_action(number)
        elif self.requested is None:
            self.requested = signal.Signals(number).name
            self.interrupted_at = self.where()
            if number == signal.SIGINT or not self.must_save():
                raise KeyboardInterrupt
            self.on_defer(self.requested)

    def _watch(self) -> None:
        """End the process at a second signal, or when ending takes too long."""
        first = None
        began = idle_since = 0.0
        limit = END_S
        while True:
            readable, _, _ = select.select([self._received], [], [], None if first is None else 0.2)
            now = time.monotonic()
            data = self._received.recv(64) if readable else b""
            if readable and not data:  # `__exit__` has closed the other end
                return
            number = next((number for number in data if number in SIGNALS), None)
            if number is not None and first is None:
                first, began, idle_since = number, now, now
            elif number is not None and now - began > REPEAT_S:
                name = signal.Signals(number).name
                self._end(first, f"a second signal, {name}, ended the process at once")
            if first not in (None, signal.SIGINT) and self.must_save():
                idle_since = now
                limit = SAVED_END_S
            elif first is not None and now - idle_since > limit:
                self._end(
                    first, f"it did not end within {limit:g} s, so it was ended without cleaning up"
                )

    def _end(self, first: int | None, why: str) -> NoReturn:
        if self.requested is None and first is not None:  # the main thread ran no handler
            self.requested = signal.Signals(first).name
            self.interrupted_at = self.where()
        # sys.stderr may be locked by the main thread.
        os.write(2, f"\n{self.message()}\n  ({why})\n".encode())
        os._exit(self.exit_code)

    def _forget_in_child(self) -> None:
        if self._pid != os.getpid() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.set_wakeup_fd(-1)
