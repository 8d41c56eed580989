"""A driver that also writes a line for each phase that it enters, so that faults can aim at one.

    python -m tests.chaos.driver TRACE key=value ...

It runs `verlite.main_ppo` with the same arguments. A line of the file TRACE has the time, the
process id, the number of finished steps and the phase.
"""

import os
import runpy
import sys
import time
from typing import Any

from verlite.trainer.stop import Stop

CHECKING, STARTING_RAY = "checking", "starting Ray"
"""Phases before the display exists. The others have the names that the display shows."""


def trace_phases(path: str) -> None:
    """Write phases from the moment on at which the program has its signal handlers."""
    trace = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    enter = Stop.__enter__

    def write(phase: str, finished: int = 0) -> None:
        os.write(trace, f"{time.time():.3f} {os.getpid()} {finished} {phase}\n".encode())

    def enter_traced(stop: Stop) -> Stop:
        enter(stop)
        write(CHECKING)
        # Imported only now: before, a signal would meet no handler for longer than in a real run.
        from verlite.controller import cluster
        from verlite.trainer.display import Display

        start, show = cluster._start_local, Display._show

        def start_local(*options: Any) -> None:
            write(STARTING_RAY)
            start(*options)

        def show_phase(display: Display, phase: str) -> None:
            show(display, phase)
            if phase:
                write(phase, display.done)

        setattr(cluster, "_start_local", start_local)  # noqa: B010
        setattr(Display, "_show", show_phase)  # noqa: B010
        return stop

    setattr(Stop, "__enter__", enter_traced)  # noqa: B010


if __name__ == "__main__":
    trace_phases(sys.argv.pop(1))
    runpy.run_module("verlite.main_ppo", run_name="__main__", alter_sys=True)
