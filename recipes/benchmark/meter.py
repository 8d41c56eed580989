"""The CPU time of heartbeats and watchers, for watchers.py. Imports nothing heavy: every process of
a run imports it.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COST = "WATCHERS_COST"
"""Variable with the path of a folder: a file per process and thread has its nanoseconds."""


def note(owner: Any, name: str, thread: str = "") -> None:
    """Note the CPU time of all calls of a function, and of the whole thread of this name."""
    original: Callable[..., Any] = getattr(owner, name)
    spent = 0

    def noting(*values: Any, **named: Any) -> Any:
        nonlocal spent
        own = threading.current_thread().name == thread
        began = time.thread_time_ns()
        try:
            return original(*values, **named)
        finally:
            if own:
                _write(thread, time.thread_time_ns())
            else:
                spent += time.thread_time_ns() - began
                _write(name, spent)

    setattr(owner, name, noting)


def noted(folder: Path) -> int:
    """Return the nanoseconds of all processes so far."""
    return sum(int(path.read_text() or 0) for path in folder.iterdir())


def _write(name: str, nanoseconds: int) -> None:
    # Of one length, so that a reader sees a whole number.
    path = os.path.join(os.environ[COST], f"{os.getpid()}-{name}")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT), "w") as file:
        file.write(f"{nanoseconds:20d}")


def install_in_worker() -> None:
    """Note the heartbeats of this process."""
    from verlite.controller.heartbeat import Sender

    note(Sender, "send", "heartbeat")
