"""The driver's process and its control: signals become events, and commands end the process.

`control.patience` has the table of what a signal does. Where SIGHUP is ignored (`nohup`), it stays
ignored.

A program that calls verlite as a library (`embedded`) is never ended: Ctrl-C raises
KeyboardInterrupt each time, and nothing limits the time of cleaning up. Otherwise a thread ends the
process when the machine says so, whatever the main thread does. The guardian
(controller/guardian.py) cleans up after a process that was ended in this way.
"""

import os
import select
import signal
import socket
import threading
import time
from _thread import interrupt_main, start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from verlite.control import events, limits
from verlite.control.machine import Machine
from verlite.control.patience import INTERRUPT
from verlite.controller import supervisor_file
from verlite.terminal import clean

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
LAST_WORDS_S = 2.0
"""How long a message of an ending process may take: a terminal or a disk may not answer."""
CHECKPOINT_S = 1.0
"""How long a message waits for the disk to find the last checkpoint."""
WAKE = b"\0"
"""What wakes the thread that receives the numbers of signals, once time matters."""


class Screen(Protocol):
    """Where a run prints."""

    def info(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


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
    """Run a function in a thread and wait for it at most so many seconds. It is not run if no
    thread can be started: nothing that it would say may keep a process from ending in time."""
    thread = threading.Thread(target=function, daemon=True)
    with suppress(RuntimeError):
        thread.start()
        thread.join(seconds)


def _exit_within(seconds: float, code: int, last_words: Callable[[], None]) -> NoReturn:
    """End the process with this code, after at most so many seconds for `last_words`."""
    try:
        within(seconds, last_words)
    finally:
        os._exit(code)


class Stop:
    """The process of a run, as a context manager around the whole program, or around one run in it.

    Python allows signal handlers only in the main thread; in other threads this class handles none.

    Attributes:
        machine: decides. Only `_decide` gives it events.
        embedded: the process belongs to a program that calls verlite as a library.
        reported: the error that decided the exit code, if one did.
        screen: where the run prints, once it has begun.
        run_dir: the run directory, once it is locked.
        where: returns what the process is doing, for messages, such as "while starting Ray".
        checkpoint: returns what a message says about the last checkpoint.
        log: writes a line into the run's log.
        on_end: called with the exit code once it is decided.
        interrupted_at: `where()` at the time of the first request to stop.
    """

    def __init__(self, embedded: bool = False) -> None:
        self.machine = Machine()
        self.embedded = embedded
        self.reported: BaseException | None = None
        self.screen: Screen | None = None
        self.run_dir = Path()
        self.where: Callable[[], str] = lambda: "while starting"
        self.checkpoint: Callable[[], str] = lambda: "Nothing was started."
        self.log: Callable[[str], None] = lambda text: None
        self.on_end: Callable[[int], None] = lambda code: None
        self.interrupted_at = ""
        self._lost: Exception | None = None
        self._pid = os.getpid()
        self._handlers_before: dict[int, Any] = {}
        self._turn = threading.RLock()
        self._late: deque[events.Event] = deque()
        self._is_handling = False
        self._wakeup: socket.socket | None = None

    @property
    def requested(self) -> str | None:
        """Name of the first signal, or what else asked for the stop, or None."""
        return self.machine.requested

    @property
    def code(self) -> int | None:
        """The exit code once it is decided, else None."""
        return self.machine.code

    @property
    def exit_code(self) -> int:
        """The decided exit code, or that of a process that was asked to stop."""
        return self.machine.exit_code

    def tell(self, event: events.Event) -> list[events.Command]:
        """Tell the machine what happened, and do to the process what it says.

        Returns:
            The commands to the loop.

        Raises:
            KeyboardInterrupt: a stop was requested, and nothing has to be saved.
        """
        return [command for command in self._decide(event) if not self._obey(command)]

    def _decide(self, event: events.Event) -> list[events.Command]:
        """Return what the machine says. Threads take turns."""
        with self._turn:
            if self._is_handling:  # in a signal's handler, which has interrupted the machine
                self._late.append(event)
                return []
            requested, waits = self.machine.requested, self.machine.patience.waits
            self._is_handling = True
            try:
                commands = self.machine.handle(event, time.monotonic())
            finally:
                self._is_handling = False
            while self._late:
                commands += self._decide(self._late.popleft())
        if self.machine.requested != requested:
            self.interrupted_at = self.where()
        if self.machine.patience.waits != waits and self._wakeup is not None:
            self._wakeup.send(WAKE)
        return commands

    def _obey(self, command: events.Command) -> bool:
        """Do what a command to the process says. Returns whether it is one."""
        match command:
            case events.Say(text):
                if self.screen is not None:
                    self.screen.info(text)
            case events.Warn(text):
                if self.screen is not None:
                    self.screen.warn(text)
            case events.Interrupt():
                raise KeyboardInterrupt
            case events.WallTimeOver(key):
                supervisor_file.write(supervisor_file.Report(str(self.run_dir), f"{key} is over"))
            case events.NotSaved(another):
                grace = f"{self.machine.policy.stop_grace_s:g}"
                more = f"; another signal gives it {grace} s more" if another else ""
                text = (
                    f"{self.requested}: not saved within trainer.stop_grace_s={grace}, "
                    f"{self.where()}. The run still saves and then ends{more}. "
                    f"{self.last_checkpoint()}"
                )
                within(LAST_WORDS_S, lambda: self._say(text))
            case events.SaveLimited():
                grace = f"{self.machine.policy.stop_grace_s:g}"
                within(LAST_WORDS_S, lambda: self._say(f"a second signal: the save has {grace} s"))
            case events.EndProcess():
                self._end(command)
            case _:
                return False
        return True

    def message(self) -> str:
        """Return the line that says what ended the run, where, and the last checkpoint."""
        interrupted = self.requested in (INTERRUPT, None)
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

    def decide(self, code: int | None, say: Callable[[], None] | None = None) -> int:
        """Decide the exit code. The process then ends with it within a bounded time.

        Args:
            code: None: that of the stop which interrupted the run.
            say: prints why, before anything is written to the disk, which may hang. Called without
                a lock, and only if no code was decided before. It runs in another thread, for
                LAST_WORDS_S: a terminal that is stopped by Ctrl-S does not answer.

        Returns:
            The code that was decided first. Later ones are ignored.
        """
        commands = self._decide(events.Ended(code))
        decided = self.exit_code
        if commands:
            if say is not None:
                within(LAST_WORDS_S, say)
            self.on_end(decided)
        return decided

    def raise_in_main(self, error: Exception) -> None:
        """Raise an error in the main thread, from another thread of an embedded run."""
        self._lost = error
        interrupt_main()

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
            if self._wakeup is not None:
                signal.set_wakeup_fd(-1)
                self._wakeup.close()
                self._wakeup = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            apply_default_action(number)
        elif self._lost is not None:
            error, self._lost = self._lost, None
            raise error
        elif self.embedded and number == signal.SIGINT and self.requested is not None:
            raise KeyboardInterrupt
        else:
            for command in self._decide(events.Asked(signal.Signals(number).name)):
                if isinstance(command, events.Interrupt):
                    raise KeyboardInterrupt
                # What the main thread prints may be unfinished, so another thread says it.
                with suppress(RuntimeError):  # no thread can be started; the request is noted
                    start_new_thread(self._obey, (command,))

    def _watch(self) -> None:
        """Tell the machine of signals and of time, in a thread of its own."""
        while True:
            waits = limits.WATCH_S if self.machine.patience.waits else None
            readable, _, _ = select.select([self._received], [], [], waits)
            data = self._received.recv(64) if readable else b""
            if readable and not data:  # `__exit__` has closed the other end
                return
            number = next((number for number in data if number in SIGNALS), None)
            name = None if number is None else signal.Signals(number).name
            self.tell(events.Signal(name) if name else events.Watched())

    def warn(self, text: str) -> None:
        """Print and log a warning, from any thread."""
        self._say(f"warning: {text}")

    def _say(self, text: str) -> None:
        write_error(f"\n{text}\n")
        self.log(text)

    def _end(self, command: events.EndProcess) -> NoReturn:
        def last_words() -> None:
            if command.was_decided:
                self._say(f"({command.why})")
            else:
                self._say(f"{self.message()}\n  ({command.why})")
                self.on_end(command.code)

        _exit_within(LAST_WORDS_S, command.code, last_words)

    def _forget_in_child(self) -> None:
        if self._pid != os.getpid() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.set_wakeup_fd(-1)
