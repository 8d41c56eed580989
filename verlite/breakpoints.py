"""`breakpoint()` in a process without a debugger, and how long to wait in one with it.

Imports the standard library only, because reward processes import this module.
"""

import sys
from typing import NoReturn

REFUSE = "verlite.breakpoints.refuse"
"""Value of PYTHONBREAKPOINT with which `breakpoint()` raises NoDebugger."""

NO_LIMIT_S = 14 * 86400.0
"""Two weeks, in place of each time limit of a run with a debugger. In milliseconds they still fit
into 32 bits."""


class NoDebugger(RuntimeError):
    """`breakpoint()` was called in a process that no debugger can reach."""


def refuse(*args: object, **kwargs: object) -> NoReturn:
    """Raise NoDebugger. This is `breakpoint()` without trainer.debug.

    Without an error the process would wait for input that it cannot get.
    """
    frame = sys._getframe(1)
    raise NoDebugger(
        f"breakpoint() at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}, "
        "but the run has no debugger. To stop there, add trainer.debug=true (needs the package "
        "debugpy) to the command, or RAY_DEBUG=legacy to its environment (docs/cluster.md, "
        '"Debugging in a worker"). Otherwise remove the call'
    )
