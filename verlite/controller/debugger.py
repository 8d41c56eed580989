"""Stop a worker process at breakpoint() or at a failure, until a debugger lets it continue.

Before it waits, the process writes a line about the stop into its log, where `breakpoints` in the
driver finds it. Both debuggers are Ray's. Ray's own hooks are not used, because they say where they
wait in the worker's log only.
"""

import json
import os
import socket
import sys
import threading
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from verlite.breakpoints import REFUSE, refuse
from verlite.controller import ray_internals
from verlite.controller.cluster import RUN_MARK
from verlite.controller.records import Failed

STOP_MARK = "--- stop "
"""Start of the line in the log. A `Stop` as JSON follows."""

_listening = threading.Lock()
_address = ""
"""host:port where this process listens for debugpy clients."""


@dataclass(frozen=True)
class Stop:
    """One stop of a worker process.

    Attributes:
        run: the run's id; a log may have lines of earlier runs.
        address: host:port where a client of debugpy can attach; "" with the legacy debugger.
        attached: whether a client was attached before the stop.
        method, failure: the call that failed and its failure, for a stop at a failure.
    """

    run: str
    host: str
    pid: int
    file: str
    line: int
    function: str
    address: str
    attached: bool = False
    method: str = ""
    failure: dict[str, Any] | None = None


def read_stop(line: str) -> Stop | None:
    """Return the stop that a line of a log is about, None for other lines."""
    if not line.startswith(STOP_MARK):
        return None
    try:
        return Stop(**json.loads(line.removeprefix(STOP_MARK)))
    except (TypeError, ValueError):  # printed by the user's code
        return None


def set_hook(debugger: str) -> None:
    """Decide what breakpoint() does in this process.

    In processes that it starts breakpoint() raises NoDebugger.

    Args:
        debugger: "debugpy", "legacy" (`ray debug`), or "" to raise NoDebugger.
    """
    os.environ["PYTHONBREAKPOINT"] = REFUSE
    hooks = {"": refuse, "debugpy": debugpy_breakpoint, "legacy": legacy_breakpoint}
    sys.breakpointhook = hooks[debugger]


def debugpy_breakpoint() -> None:
    """Wait until a client of debugpy has attached, and stop in the calling frame."""
    frame = sys._getframe(1)
    _wait_for_client(frame)
    import pydevd  # part of debugpy

    try:
        pydevd.settrace(
            trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame
        )
    finally:
        sys.breakpointhook = debugpy_breakpoint  # debugpy replaces it


def legacy_breakpoint() -> None:
    """Wait until `ray debug` has connected, and stop in the calling frame."""
    frame = sys._getframe(1)
    _announce(frame, "")
    # Called from here, because Ray lists the frame that called this one.
    connect = ray_internals.pdb_connector()
    pdb = connect()
    pdb.nosigint = True  # pdb would replace the handler of Ctrl-C, which is for the driver
    pdb.set_trace(frame=frame)


def stop_at_failure(debugger: str, method: str, failed: Failed, error: BaseException) -> None:
    """Stop where an exception was raised, until the debugger lets the process continue.

    Must be called while the exception is being handled.
    """
    trace = error.__traceback__
    assert trace is not None  # it was raised
    while trace.tb_next is not None:
        trace = trace.tb_next
    failure = asdict(failed) | {"pickled": None}
    if debugger == "legacy":
        _announce(trace.tb_frame, "", method=method, failure=failure)
        ray_internals.pdb_connector()().post_mortem()
        return
    _wait_for_client(trace.tb_frame, method=method, failure=failure)
    import debugpy

    debugpy.trigger_exception_handler(error)


def _wait_for_client(frame: FrameType, **facts: Any) -> None:
    """Announce a stop, and wait until a client of debugpy is attached."""
    import debugpy

    address = _listen()
    _announce(frame, address, attached=debugpy.is_client_connected(), **facts)
    with ray_internals.paused_by_debugger():
        debugpy.wait_for_client()


def _listen() -> str:
    """Return the address where this process listens for clients. The first call opens it."""
    global _address
    import debugpy
    import ray

    with _listening:
        if not _address:
            debugpy.configure(subProcess=False)  # else it changes how processes are started
            untyped_ray: Any = ray
            host, port = debugpy.listen((untyped_ray.util.get_node_ip_address(), 0))
            ray_internals.set_debugger_port(port)
            _address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return _address


def _announce(frame: FrameType, address: str, **facts: Any) -> None:
    """Write a stop at a frame into this process's log."""
    stop = Stop(
        run=os.environ.get(RUN_MARK, "").partition("/")[0],
        host=socket.gethostname(),
        pid=os.getpid(),
        file=frame.f_code.co_filename,
        line=frame.f_lineno,
        function=frame.f_code.co_name,
        address=address,
        **facts,
    )
    # One system call, so that the lines of several threads do not mix.
    os.write(1, (STOP_MARK + json.dumps(asdict(stop)) + "\n").encode())
