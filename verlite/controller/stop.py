"""How the driver ends: by signals, and within a bounded time.

| signal | when | what happens |
|---|---|---|
| SIGTERM, SIGUSR1, SIGHUP | no finished step has to be saved | KeyboardInterrupt (main thread) |
| SIGTERM, SIGUSR1, SIGHUP | a finished step is not saved yet | noted; the run saves, then ends |
| Ctrl-C | always | KeyboardInterrupt in the main thread |
| a second signal | a finished step is not saved yet | the save has another `grace_s` seconds |
| a second signal | otherwise | the process ends at once |
| a third signal | always | the process ends at once |

A closed terminal sends SIGHUP, often twice: from the kernel and from the shell. After another
signal it is not counted. Where it is ignored (`nohup`), it stays ignored.

A program that calls verlite as a library (`embedded`) is never ended: Ctrl-C raises
KeyboardInterrupt each time, and nothing limits the time of cleaning up. Otherwise:

If nothing has to be saved, the process ends within END_S seconds: a thread ends it if the main
thread does not. `Stop.decide` fixes the exit code, and the process then ends within LEAVE_S. The
guardian (controller/guardian.py) cleans up after a process that was ended in this way.
"""

import os
import select
import signal
import socket
import threading
import time
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from verlite.controller.exit_codes import INTERRUPTED, STOPPED
from verlite.terminal import clean

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
END_S = 8.0
"""How long cleaning up may take after a stop when nothing has to be saved."""
LEAVE_S = 20.0
"""How long the process may live after its exit code is decided: trackers send their last metrics,
workers close, Ray ends."""
LAST_WORDS_S = 2.0
"""How long a message of an ending process may take: a terminal or a disk may not answer."""
CHECKPOINT_S = 1.0
"""How long a message waits for the disk to find the last checkpoint."""
REQUEST = b"\0"
"""What `Stop.request` sends to the thread that receives the numbers of signals."""
REPEAT_S = 1.0
"""A second signal within this time is the first one again: `timeout`, for example, sends it to the
process and then to its group."""


def apply_default_action(number: int) -> None:
    """Handle a signal in a forked child as if the parent had installed no handler for it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def write_error(text: str) -> None:
    """Write to standard error. sys.stderr may be locked by another thread."""
    try:
        os.write(2, clean(text).encode(errors="replace"))
    except OSError:
        pass


def within(seconds: float, function: Callable[[], None]) -> None:
    """Run a function in a thread and wait for it at most so many seconds."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def _exit_within(seconds: float, code: int, last_words: Callable[[], None]) -> NoReturn:
    """End the process with this code, after at most so many seconds for `last_words`."""
    try:
        within(seconds, last_words)
    finally:
        os._exit(code)


class Stop:
    """How the driver ends, as a context manager around the whole program, or around one run in it.

    Python allows signal handlers only in the main thread; in other threads this class handles none.

    Attributes:
        embedded: the process belongs to a program that calls verlite as a library.
        requested: name of the first signal, or what else asked for the stop, or None.
        code: the exit code once it is decided, else None.
        reported: the error that decided it, if one did.
        grace_s: how long the first signal waits for a save before a message says that it waits, and
            how long a second signal waits.
        must_save: returns whether a finished step has no checkpoint yet.
        on_defer: called with the signal's name when the run has to save before it ends. In another
            thread if a signal's handler found that: what the main thread prints may be unfinished.
        where: returns what the process is doing, for messages, such as "while starting Ray".
        checkpoint: returns what a message says about the last checkpoint.
        log: writes a line into the run's log.
        on_end: called with the exit code once it is decided.
        interrupted_at: `where()` at the time of the first signal.
    """

    def __init__(self, embedded: bool = False) -> None:
        self.embedded = embedded
        self.requested: str | None = None
        self.code: int | None = None
        self.reported: BaseException | None = None
        self.grace_s = 30.0
        self.must_save: Callable[[], bool] = lambda: False
        self.on_defer: Callable[[str], None] = lambda name: None
        self.where: Callable[[], str] = lambda: "while starting"
        self.checkpoint: Callable[[], str] = lambda: "Nothing was started."
        self.log: Callable[[str], None] = lambda text: None
        self.on_end: Callable[[int], None] = lambda code: None
        self.interrupted_at = ""
        self._lost: Exception | None = None
        self._pid = os.getpid()
        self._handlers_before: dict[int, Any] = {}
        self._timer: threading.Timer | None = None
        self._deciding = threading.Lock()

    @property
    def exit_code(self) -> int:
        """The decided exit code, or that of a process that was asked to stop."""
        if self.code is not None:
            return self.code
        return INTERRUPTED if self.requested in ("SIGINT", None) else STOPPED

    def message(self) -> str:
        """Return the line that says what ended the run, where, and the last checkpoint."""
        interrupted = self.requested in ("SIGINT", None)
        what = "interrupted" if interrupted else f"stopped by {self.requested}"
        return f"{what} {self.interrupted_at}".rstrip() + f". {self.last_checkpoint()}"

    def last_checkpoint(self) -> str:
        """Return what a message says about the last checkpoint, within CHECKPOINT_S. The disk may
        not answer, or fail."""
        found = ["The last checkpoint is not known: the disk of the run directory does not answer."]

        def look() -> None:
            try:
                found.append(self.checkpoint())
            except Exception as error:
                found.append(f"The last checkpoint is not known: {error}.")

        within(CHECKPOINT_S, look)
        return found[-1]

    def decide(
        self,
        code: int,
        limit_s: float | None = None,
        say: Callable[[], None] | None = None,
    ) -> int:
        """Decide the exit code. The process then ends with it within limit_s (default LEAVE_S).

        Args:
            say: prints why, before anything is written to the disk, which may hang. Called without
                a lock, and only if no code was decided before. It runs in another thread, for
                LAST_WORDS_S: a terminal that is stopped by Ctrl-S does not answer.

        Returns:
            The code that was decided first. Later ones are ignored.
        """
        limit_s = LEAVE_S if limit_s is None else limit_s
        with self._deciding:
            if self.code is not None:
                return self.code
            self.code = code
            if not self.embedded:
                self._timer = threading.Timer(limit_s, self._leave, [limit_s])
                self._timer.daemon = True
                self._timer.start()
        if say is not None:
            within(LAST_WORDS_S, say)
        self.on_end(code)
        return code

    def request(self, name: str) -> None:
        """Stop as at SIGUSR1, for another reason. Call it in the main thread.

        It is not counted as a signal: one that follows, such as Slurm's at the end of an
        allocation, does not limit the time of the save.

        Raises:
            KeyboardInterrupt: no finished step has to be saved.
        """
        if self._handlers_before and not self.embedded:
            self._wakeup.send(REQUEST)
        if self._obey(name):
            self.on_defer(name)

    def raise_in_main(self, error: Exception) -> None:
        """Raise an error in the main thread, from another thread of an embedded run."""
        self._lost = error
        interrupt_main()

    def _obey(self, name: str) -> bool:
        """Note the first request to stop. Returns whether the run saves before it ends.

        Raises:
            KeyboardInterrupt: nothing has to be saved.
        """
        if self.requested is not None or self.code is not None:
            return False
        self.requested = name
        self.interrupted_at = self.where()
        if name == "SIGINT" or not self.must_save():
            raise KeyboardInterrupt
        return True

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            if not self.embedded:
                self._watch_signals()
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._handlers_before[number] = signal.signal(number, self._handle)
        return self

    def _watch_signals(self) -> None:
        """Start the thread that ends the process at further signals."""
        # Python writes the number of each signal here at once, even while the main thread is
        # inside C code and cannot run a handler.
        self._received, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        os.register_at_fork(after_in_child=self._forget_in_child)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def __exit__(self, *exc: object) -> None:
        if self._handlers_before:
            for number, handler in self._handlers_before.items():
                signal.signal(number, handler)
            if not self.embedded:
                signal.set_wakeup_fd(-1)
                self._wakeup.close()
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            apply_default_action(number)
        elif self._lost is not None:
            error, self._lost = self._lost, None
            raise error
        elif self.embedded and number == signal.SIGINT and self.requested is not None:
            raise KeyboardInterrupt
        else:
            name = signal.Signals(number).name
            if self._obey(name):
                with suppress(RuntimeError):  # no thread can be started; the request is noted
                    start_new_thread(self.on_defer, (name,))

    def _watch(self) -> None:
        """End the process at further signals, or when ending takes too long."""
        first: int | None = None
        signals = 0
        last = idle_since = give_up_at = 0.0
        limit = END_S
        waits_since: float | None = None
        while True:
            readable, _, _ = select.select([self._received], [], [], None if first is None else 0.2)
            now = time.monotonic()
            data = self._received.recv(64) if readable else b""
            if readable and not data:  # `__exit__` has closed the other end
                return
            number = next((number for number in data if number in SIGNALS), None)
            if first is None and REQUEST in data:
                first, idle_since = signal.SIGUSR1, now
            if number == signal.SIGHUP and first is not None:
                number = None
            if number is not None and (first is None or now - last > REPEAT_S):
                signals += 1
                last = now
                if first is None:
                    first, idle_since = number, now
            if first is None:
                continue
            saves = self.code is None and first != signal.SIGINT and self.must_save()
            if number is not None and (signals > 2 or (signals == 2 and not saves)):
                count = "a second" if signals == 2 else "a third"
                name = signal.Signals(number).name
                self._end(first, f"{count} signal, {name}, ended the process at once")
            if saves:
                idle_since = now
                limit = LEAVE_S
                if waits_since is None:
                    waits_since = now
                    give_up_at = now + self.grace_s
                if signals == 2 and last == now:
                    give_up_at = now + self.grace_s
                    self._say(f"a second signal: the save has {self.grace_s:g} s")
                elif now > give_up_at and signals > 1:
                    self._end(first, f"not saved within {self.grace_s:g} s of the second signal")
                elif now > give_up_at:
                    give_up_at = float("inf")
                    more = f"; another signal gives it {self.grace_s:g} s more" if signals else ""
                    self._say(
                        f"{self.requested}: not saved within trainer.stop_grace_s={self.grace_s:g}"
                        f", {self.where()}. The run still saves and then ends{more}. "
                        f"{self.last_checkpoint()}"
                    )
            elif self.code is None and now - idle_since > limit:
                self._end(
                    first, f"it did not end within {limit:g} s, so it was ended without cleaning up"
                )

    def warn(self, text: str) -> None:
        """Print and log a warning, from any thread."""
        self._say(f"warning: {text}")

    def _say(self, text: str) -> None:
        write_error(f"\n{text}\n")
        self.log(text)

    def _end(self, first: int | None, why: str) -> NoReturn:
        if self.requested is None and first is not None:  # the main thread ran no handler
            self.requested = signal.Signals(first).name
            self.interrupted_at = self.where()
        with self._deciding:
            is_decided = self.code is not None
            self.code = code = self.exit_code

        def last_words() -> None:
            if is_decided:
                self._say(f"({why})")
            else:
                self._say(f"{self.message()}\n  ({why})")
                self.on_end(code)

        _exit_within(LAST_WORDS_S, code, last_words)

    def _leave(self, limit_s: float) -> None:
        text = f"(cleaning up took longer than {limit_s:g} s, so the process was ended)"
        _exit_within(LAST_WORDS_S, self.exit_code, lambda: self._say(text))

    def _forget_in_child(self) -> None:
        if self._pid != os.getpid() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.set_wakeup_fd(-1)
