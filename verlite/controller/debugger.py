"""Stop a worker process at breakpoint() or at a failure, until a debugger lets it continue.
The driver's terminal shows where workers have stopped.

Before it waits, the process writes a line about the stop into its log. A thread of the driver reads
the logs. Both debuggers are Ray's. Ray's own hooks are not used, because they say where they wait
in the worker's log only.
"""

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from verlite.breakpoints import REFUSE, refuse
from verlite.controller import ray_internals
from verlite.controller.cluster import RUN_MARK, Cluster
from verlite.controller.failures import cause_of_exception, indent
from verlite.controller.records import Failed
from verlite.controller.worker_handle import WorkerHandle

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


POLL_S = 0.5
"""How often the logs are read."""
TAIL_BYTES = 1 << 20
"""How much of a log is read at first: it may be the long log of an earlier run."""


@contextmanager
def show_stops(cluster: Cluster, show: Callable[[str], None]) -> Iterator[None]:
    """Call `show` with a text for every stop of a worker, until the context ends.

    The logs must be on a folder that the driver sees.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(cluster, show, ended), name="stops")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(cluster: Cluster, show: Callable[[str], None], ended: threading.Event) -> None:
    """Read the logs again and again. Makes the failure of a post-mortem stop known at once."""
    offsets: dict[str, int] = {}
    while not ended.wait(POLL_S):
        for worker in list(cluster.supervisor.workers):
            for stop in new_stops(worker, offsets):
                if stop.run != cluster.run_id:
                    continue
                if stop.failure:
                    cause = cause_of_exception(worker, stop.method, Failed(**stop.failure))
                    cluster.supervisor.stopped_by = cluster.supervisor.stopped_by or cause
                show(stop_text(worker, stop, cluster))


def new_stops(worker: WorkerHandle, offsets: dict[str, int]) -> list[Stop]:
    """Return the stops that the worker's log has since the last call with the same `offsets`."""
    try:
        with Path(worker.log).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(offsets.get(worker.log, max(0, end - TAIL_BYTES)))
            text = file.read(TAIL_BYTES)
            # Later calls read on after the last whole line, or after a very long one.
            complete = text.rpartition(b"\n")[0] if len(text) < TAIL_BYTES else text
            offsets[worker.log] = file.tell() - len(text) + len(complete)
    except OSError:  # the worker has not started, or the folder is not shared
        return []
    lines = complete.decode(errors="replace").splitlines()
    return [stop for line in lines if (stop := read_stop(line))]


def stop_text(worker: WorkerHandle, stop: Stop, cluster: Cluster) -> str:
    """Return what the user has to know about a stop: who, where, and how to go on."""
    who = f"{worker.name} (process {stop.pid} on {stop.host})"
    place = f"{stop.file}:{stop.line} in {stop.function}"
    if stop.attached:
        how = f"the debugger at {stop.address} has it"
    elif stop.address:
        how = f"attach a debugger to {stop.address}"
    else:
        how = f"connect with: {cluster.ray_debug_command}"
    if stop.failure is None:
        return f"{who} waits at a breakpoint: {place}; {how}"
    failure = stop.failure
    return (
        f"error: {worker.name} failed in {stop.method}: "
        f"{failure['type_name']}: {failure['message']}\n{indent(failure['traceback'])}\n"
        f"{who} waits at the failure: {place}; {how}. When it continues, or after Ctrl-C, the "
        "run ends"
    )
