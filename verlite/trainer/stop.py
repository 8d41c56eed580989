"""The process of a run and its control: signals become events, commands end the process. The first
cause is reported, and the exit code decided, before anything is shut down: nothing that happens
afterwards changes them.

`control.patience` has the table of what a signal does. Where SIGHUP is ignored (`nohup`), it stays
ignored. The cause goes to the terminal, to `logs/driver.log` and to `error.json` in the run
directory.

A program that calls verlite as a library (`embedded`) is never ended: Ctrl-C raises
KeyboardInterrupt each time, and nothing limits the time of cleaning up. Otherwise a thread ends the
process when the machine says so, whatever the main thread does. The guardian
(controller/guardian.py) cleans up after a process that was ended in this way.

Commands handle signals before they import anything slow, so this file does not.
"""

import atexit
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from _thread import interrupt_main, start_new_thread
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, Protocol

from verlite.control import exit_codes, limits
from verlite.control.commands import Command, Do, EndProcess, Say, SayNow, WallTimeOver, Warn
from verlite.control.machine import Machine
from verlite.control.patience import INTERRUPT
from verlite.controller import supervisor_file
from verlite.files import FULL, append, replace_file
from verlite.masking import mask_urls
from verlite.terminal import clean, console

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
Event = Callable[Concatenate[Machine, float, P], list[Command]]
"""A method of the machine."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
WAKE = b"\0"
"""What wakes the thread that receives the numbers of signals, once time matters."""
DRIVER_LOG = "driver.log"


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
    with suppress(OSError):
        os.write(2, clean(text).encode(errors="replace"))


def within(seconds: float, function: Callable[[], object]) -> None:
    """Run a function in a thread and wait for it at most so many seconds. It is not run if no
    thread can be started: nothing that it would say may keep a process from ending in time."""
    thread = threading.Thread(target=function, daemon=True)
    with suppress(RuntimeError):
        thread.start()
        thread.join(seconds)


class Stop:
    """The process of a run, as a context manager around the whole program, or around one run in it.

    Python allows signal handlers only in the main thread; in other threads this class handles none.

    Attributes:
        machine: decides. Only `_decide` gives it events.
        embedded: the process belongs to a program that calls verlite as a library.
        screen: where the run prints, once it has begun.
        run_dir: the run directory, once it is locked.
        where: returns what the process is doing, for messages, such as "while starting Ray".
        checkpoint: returns what a message says about the last checkpoint.
        interrupted_at: `where()` at the time of the first request to stop.
    """

    def __init__(self, embedded: bool = False) -> None:
        self.machine = Machine()
        self.embedded = embedded
        self.screen: Screen | None = None
        self.run_dir: Path | None = None
        self.where: Callable[[], str] = lambda: "while starting"
        self.checkpoint: Callable[[], str] = lambda: "Nothing was started."
        self.interrupted_at = ""
        self._reported: BaseException | None = None  # what decided the exit code
        self._lost: Exception | None = None
        self._pid = os.getpid()
        self._handlers_before: dict[int, Any] = {}
        self._turn = threading.RLock()
        self._late: deque[tuple[Callable[..., list[Command]], Any, Any]] = deque()
        self._is_handling = False
        self._wakeup: socket.socket | None = None

    def begin(self, run_dir: Path) -> None:
        """Start the driver's log and run.json in a locked run directory, and remove the error of an
        earlier run."""
        from rich import text, traceback  # noqa: F401  while a file can be opened

        from verlite.trainer import run_record

        self.run_dir = run_dir
        with suppress(OSError):
            (run_dir / "logs").mkdir(exist_ok=True)
            (run_dir / supervisor_file.ERROR_FILE).unlink(missing_ok=True)
        run_record.begin(run_dir)
        self.log(f"started: process {os.getpid()} on {socket.gethostname()}")
        supervisor_file.write(supervisor_file.Report(str(run_dir)))

    # Events and commands

    def tell(self, event: Event[P], *values: P.args, **named: P.kwargs) -> list[Command]:
        """Tell the machine what happened, and do to the process what it says.

        Returns:
            The commands to the loop.

        Raises:
            KeyboardInterrupt: a stop was requested, and nothing has to be saved.
        """
        commands = self._decide(event, *values, **named)
        return [command for command in commands if not self._obey(command)]

    def _decide(self, event: Event[P], *values: P.args, **named: P.kwargs) -> list[Command]:
        """Return what the machine says. Threads take turns."""
        with self._turn:
            if self._is_handling:  # in a signal's handler, which has interrupted the machine
                self._late.append((event, values, named))
                return []
            requested, waits = self.machine.requested, self.machine.patience.waits
            self._is_handling = True
            try:
                commands = event(self.machine, time.monotonic(), *values, **named)
            finally:
                self._is_handling = False
            while self._late:
                late, its_values, its_named = self._late.popleft()
                commands += self._decide(late, *its_values, **its_named)
        if self.machine.requested != requested:
            self.interrupted_at = self.where()
        if self.machine.patience.waits != waits and self._wakeup is not None:
            self._wakeup.send(WAKE)
        return commands

    def _obey(self, command: Command) -> bool:
        """Do what a command to the process says. Returns whether it is one."""
        match command:
            case Say(text):
                if self.screen is not None:
                    self.screen.info(text)
            case Warn(text):
                if self.screen is not None:
                    self.screen.warn(text)
            case Do.INTERRUPT:
                raise KeyboardInterrupt
            case WallTimeOver(key):
                run_dir = str(self.run_dir or "")
                supervisor_file.write(supervisor_file.Report(run_dir, f"{key} is over"))
            case SayNow(text):
                place = {"where": self.where(), "checkpoint": self.last_checkpoint()}
                within(limits.LAST_WORDS_S, lambda: self._say(text.format(**place)))
            case EndProcess():
                self._end(command)
            case _:
                return False
        return True

    # What is said

    def message(self) -> str:
        """Return the line that says what ended the run, where, and the last checkpoint."""
        interrupted = self.machine.requested in (INTERRUPT, None)
        what = "interrupted" if interrupted else f"stopped by {self.machine.requested}"
        return f"{what} {self.interrupted_at}".rstrip() + f". {self.last_checkpoint()}"

    def last_checkpoint(self) -> str:
        """Return what a message says about the last checkpoint, within limits.CHECKPOINT_S. The
        disk may not answer, or fail."""
        found = ["The last checkpoint is not known: the disk of the run directory does not answer."]

        def look() -> None:
            try:
                found.append(self.checkpoint())
            except Exception as error:
                found.append(f"The last checkpoint is not known: {error}.")

        within(limits.CHECKPOINT_S, look)
        return found[-1]

    def log(self, text: str) -> None:
        """Write a line into the run's log, once the run directory is known."""
        if self.run_dir is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            line = f"{stamp} {clean(text.strip())}\n"
            with suppress(OSError):
                append(self.run_dir / "logs" / DRIVER_LOG, line.encode())

    def warn(self, text: str) -> None:
        """Print and log a warning, from any thread."""
        self._say(f"warning: {text}")

    def _say(self, text: str) -> None:
        write_error(f"\n{text}\n")
        self.log(text)

    # The end

    def decide(self, code: int | None, say: Callable[[], None] | None = None) -> int:
        """Decide the exit code. The process then ends with it within a bounded time.

        Args:
            code: None: that of the stop which interrupted the run.
            say: prints why, before anything is written to the disk, which may hang. Called without
                a lock, and only if no code was decided before. It runs in another thread, for
                limits.LAST_WORDS_S: a terminal that is stopped by Ctrl-S does not answer.

        Returns:
            The code that was decided first. Later ones are ignored.
        """
        commands = self._decide(Machine.ended, code)
        decided = self.machine.exit_code
        if commands:
            if say is not None:
                within(limits.LAST_WORDS_S, say)
            self.record_end(decided)
        return decided

    def record_end(self, code: int) -> None:
        """Write the decided exit code into run.json."""
        if self.run_dir is not None:
            from verlite.trainer import run_record

            run_record.end(self.run_dir, code)

    @contextmanager
    def reported_first(self) -> Iterator[None]:
        """Report what ends the block before the contexts around it are closed."""
        from verlite.controller.cluster import lost_ray
        from verlite.trainer.errors import REFUSED, AlreadyComplete, StepAborted

        try:
            yield
        except AlreadyComplete:
            self.decide(exit_codes.DONE)
            raise
        except StepAborted:
            raise
        except KeyboardInterrupt:
            if self.machine.code is None:
                self.decide(None, self._print_stop)
                self.log(self.message())
            raise
        except Exception as error:
            self.report(error if isinstance(error, REFUSED) else lost_ray() or error)
            raise

    def report(self, error: BaseException) -> int:
        """Report an error, unless the run's end is decided already. Returns the exit code."""
        from rich import text, traceback  # noqa: F401  the time to print is too short for it

        return self._report(error, lambda code: self._print_report(error, code))

    def end_at_once(self, error: Exception) -> None:
        """Report an error and end the process, from another thread than the main one.

        For a main thread that may hang. The guardian cleans up. Does nothing if the end is decided.
        An embedded run gets the error in the main thread instead.
        """
        if self.machine.code is not None:
            return
        text = mask_urls(f"\nerror: {error}\n")
        code = self._report(error, lambda code: None if self.embedded else write_error(text))
        if self.embedded:
            self._lost = error
            interrupt_main()
        else:
            os._exit(code)

    def _report(self, error: BaseException, say: Callable[[int], None]) -> int:
        from verlite.trainer.errors import exit_code

        if self.machine.code is not None:
            if error is not self._reported:  # several contexts see the same error
                self.log(mask_urls(f"while ending: {type(error).__name__}: {error}"))
            return self.machine.code
        self._reported = error
        code = exit_code(error)
        decided = self.decide(code, lambda: say(code))
        if self.run_dir is not None:
            self.write_report(self.run_dir, error, decided)
        return decided

    def _print_report(self, error: BaseException, code: int) -> None:
        """Print the error, unless the caller of an embedded run gets it as an exception."""
        if self.embedded:
            return
        with _printing(f"error: {error}"):
            out = console(stderr=True)
            print_error(error, out)
            if self.run_dir is not None and code != exit_codes.REFUSED:
                out.print(self.last_checkpoint(), soft_wrap=True, highlight=False)

    def _print_stop(self) -> None:
        text = self.message()
        with _printing(text):
            console(stderr=True).print(text, soft_wrap=True, highlight=False)

    def write_report(self, run_dir: Path, error: BaseException, code: int) -> None:
        """Write the error to logs/driver.log and error.json."""
        message = mask_urls(str(error))
        trace = "" if is_explained(error) else "".join(traceback.format_exception(error))
        trace = mask_urls(trace)
        content = {
            "time": time.time(),
            "exit_code": code,
            "type": type(error).__name__,
            "message": message,
            "where": self.where(),
            "checkpoint": self.last_checkpoint(),
            "traceback": trace,
        }
        self.log(f"error: {message}\n{trace}".rstrip() + f"\n  {self.where()}; exit code {code}")
        with suppress(OSError):
            replace_file(run_dir / supervisor_file.ERROR_FILE, json.dumps(content, indent=1) + "\n")

    def _end(self, command: EndProcess) -> NoReturn:
        """End the process, after at most limits.LAST_WORDS_S for what is to be said."""

        def last_words() -> None:
            if command.was_decided:
                self._say(f"({command.why})")
            else:
                self._say(f"{self.message()}\n  ({command.why})")
                self.record_end(command.code)

        try:
            within(limits.LAST_WORDS_S, last_words)
        finally:
            os._exit(command.code)

    # Signals

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
        elif self.embedded and number == signal.SIGINT and self.machine.requested is not None:
            raise KeyboardInterrupt
        else:
            for command in self._decide(Machine.asked, signal.Signals(number).name):
                if command is Do.INTERRUPT:
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
            if number is None:
                self.tell(Machine.watched)
            else:
                self.tell(Machine.signal, signal.Signals(number).name)

    def _forget_in_child(self) -> None:
        if self._pid != os.getpid() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.set_wakeup_fd(-1)


def is_explained(error: BaseException) -> bool:
    """Whether the error's message is complete without a traceback. Any other is a bug."""
    from verlite.trainer.errors import FAILED, REFUSED

    return isinstance(error, REFUSED + FAILED) or (
        isinstance(error, OSError) and error.errno in FULL
    )


def print_error(error: BaseException, console: "Console") -> None:
    """Print the error that ended the run, with its traceback unless the message is complete.

    Secrets in URLs are masked.
    """
    from rich.text import Text
    from rich.traceback import Traceback

    if is_explained(error):
        message = Text.assemble(("error: ", "bold red"), mask_urls(str(error)))
        console.print(message, soft_wrap=True)
        return
    environment = Path(__file__).parents[2] / ".venv"
    trace = Traceback.from_exception(
        type(error), error, error.__traceback__, show_locals=False, suppress=[str(environment)]
    )
    for stack in trace.trace.stacks:
        stack.exc_value = mask_urls(stack.exc_value)
        stack.notes = [mask_urls(note) for note in getattr(stack, "notes", [])]
    console.print(trace)


@contextmanager
def _printing(text: str) -> Iterator[None]:
    """Write the bare text if the block cannot print, so that the report reaches the disk. Rich
    raises SystemExit for a closed pipe."""
    try:
        yield
    except (Exception, SystemExit):
        write_error(mask_urls(f"\n{text}\n"))


def leave(code: int) -> NoReturn:
    """End the process with this exit code, whatever `atexit` functions and libraries do."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    within(limits.ATEXIT_S, atexit._run_exitfuncs)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
