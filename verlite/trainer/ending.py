"""The end of a run: its first cause is reported, and its exit code decided, before anything is shut
down. Nothing that happens afterwards changes them.

The cause goes to the terminal, to `logs/driver.log` and to `error.json` in the run directory.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.text import Text
from rich.traceback import Traceback

from verlite.control import exit_codes
from verlite.controller import supervisor_file
from verlite.controller.cluster import lost_ray
from verlite.controller.stop import SIGNALS, Stop, within, write_error
from verlite.files import FULL, append, replace_file
from verlite.masking import mask_urls
from verlite.terminal import clean, console
from verlite.trainer import run_record
from verlite.trainer.errors import (
    FAILED,
    REFUSED,
    AlreadyComplete,
    StepAborted,
    exit_code,
)

DRIVER_LOG = "driver.log"
ATEXIT_S = 3.0
"""How long functions of `atexit` may run."""


def begin(stop: Stop, run_dir: Path) -> None:
    """Start the driver's log and run.json in a locked run directory, and remove the error of an
    earlier run."""

    def log(text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):
            append(run_dir / "logs" / DRIVER_LOG, f"{stamp} {clean(text.strip())}\n".encode())

    with contextlib.suppress(OSError):
        (run_dir / "logs").mkdir(exist_ok=True)
        (run_dir / supervisor_file.ERROR_FILE).unlink(missing_ok=True)
    stop.log, stop.run_dir = log, run_dir
    stop.on_end = partial(run_record.end, run_dir)
    run_record.begin(run_dir)
    log(f"started: process {os.getpid()} on {socket.gethostname()}")
    supervisor_file.write(supervisor_file.Report(str(run_dir)))


@contextlib.contextmanager
def reported_first(stop: Stop, run_dir: Path) -> Iterator[None]:
    """Report what ends the block before the contexts around it are closed."""
    try:
        yield
    except AlreadyComplete:
        stop.decide(exit_codes.DONE)
        raise
    except StepAborted:
        raise
    except KeyboardInterrupt:
        if stop.code is None:
            stop.decide(None, lambda: _print_stop(stop))
            stop.log(stop.message())
        raise
    except Exception as error:
        report(stop, run_dir, error if isinstance(error, REFUSED) else lost_ray() or error)
        raise


def report(stop: Stop, run_dir: Path | None, error: BaseException) -> int:
    """Report an error, unless the run's end is decided already. Returns the exit code."""
    code = exit_code(error)
    if stop.code is not None:
        if error is not stop.reported:  # several contexts see the same error
            stop.log(mask_urls(f"while ending: {type(error).__name__}: {error}"))
        return stop.code
    stop.reported = error
    code = stop.decide(code, say=lambda: _print_report(stop, run_dir, error, code))
    if run_dir is not None:
        write_report(stop, run_dir, error, code)
    return code


def _print_report(stop: Stop, run_dir: Path | None, error: BaseException, code: int) -> None:
    """Print the error, unless the caller of an embedded run gets it as an exception."""
    if stop.embedded:
        return
    with _printing(f"error: {error}"):
        out = console(stderr=True)
        print_error(error, out)
        if run_dir is not None and code != exit_codes.REFUSED:
            out.print(stop.last_checkpoint(), soft_wrap=True, highlight=False)


def _print_stop(stop: Stop) -> None:
    text = stop.message()
    with _printing(text):
        console(stderr=True).print(text, soft_wrap=True, highlight=False)


def is_explained(error: BaseException) -> bool:
    """Whether the error's message is complete without a traceback. Any other is a bug."""
    return isinstance(error, REFUSED + FAILED) or (
        isinstance(error, OSError) and error.errno in FULL
    )


def print_error(error: BaseException, console: Console) -> None:
    """Print the error that ended the run, with its traceback unless the message is complete.

    Secrets in URLs are masked.
    """
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


@contextlib.contextmanager
def _printing(text: str) -> Iterator[None]:
    """Write the bare text if the block cannot print, so that the report reaches the disk. Rich
    raises SystemExit for a closed pipe."""
    try:
        yield
    except (Exception, SystemExit):
        write_error(mask_urls(f"\n{text}\n"))


def write_report(stop: Stop, run_dir: Path, error: BaseException, code: int) -> None:
    """Write the error to logs/driver.log and error.json."""
    message = mask_urls(str(error))
    trace = "" if is_explained(error) else "".join(traceback.format_exception(error))
    trace = mask_urls(trace)
    content = {
        "time": time.time(),
        "exit_code": code,
        "type": type(error).__name__,
        "message": message,
        "where": stop.where(),
        "checkpoint": stop.last_checkpoint(),
        "traceback": trace,
    }
    stop.log(f"error: {message}\n{trace}".rstrip() + f"\n  {stop.where()}; exit code {code}")
    with contextlib.suppress(OSError):
        replace_file(run_dir / supervisor_file.ERROR_FILE, json.dumps(content, indent=1) + "\n")


def end_at_once(stop: Stop, run_dir: Path, error: Exception) -> None:
    """Report an error and end the process, from another thread than the main one.

    For a main thread that may hang. The guardian cleans up. Does nothing if the end is decided.
    An embedded run gets the error in the main thread instead.
    """
    if stop.code is not None:
        return
    text = mask_urls(f"\nerror: {error}\n")
    code = stop.decide(exit_code(error), say=lambda: None if stop.embedded else write_error(text))
    write_report(stop, run_dir, error, code)
    if stop.embedded:
        stop.raise_in_main(error)
        return
    os._exit(code)


def leave(code: int) -> NoReturn:
    """End the process with this exit code, whatever `atexit` functions and libraries do."""

    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    within(ATEXIT_S, atexit._run_exitfuncs)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
