"""Show on the driver's terminal where workers have stopped for a debugger.

A stopped worker writes a line into its log (`debugger`). A thread of the driver reads the logs.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from verlite.controller.cluster import Cluster
from verlite.controller.debugger import Stop, read_stop
from verlite.controller.failures import cause_of_exception, indent
from verlite.controller.records import Failed
from verlite.controller.worker_handle import WorkerHandle

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
