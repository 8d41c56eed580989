"""Answer `verlite stacks`: what every process of a run is doing now.

The command writes a request into a file of the run directory, because any node that shares the
folder can do that, without being a part of the cluster. A thread of the driver reads it, has every
worker write its stacks into its log by a signal, and writes the answer into another file. The
signal handler is faulthandler's, in C, so a worker answers while it waits in native code or in a
collective. The file of requests exists all the time: a file system like NFS shows changes of a file
at once, but a new file late.
"""

import faulthandler
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verlite.controller import node
from verlite.controller.cluster import current
from verlite.controller.worker_handle import WorkerHandle, on_nodes, process_infos

REQUESTS = "logs/stacks.request"
"""File in the run directory with the id of the last request."""
REQUEST_ID = re.compile(r"[0-9a-f]{16}")
POLL_S = 1.0
"""How often the driver reads the file."""
NODE_ANSWER_S = 30.0
"""Longest wait for another node. Ray may have to start a process there first."""


def answer_file(run_dir: Path, request_id: str) -> Path:
    """Return the file of an answer. The command creates it empty, the driver fills it."""
    return run_dir / f"logs/stacks.{request_id}.json"


@contextmanager
def answer_requests(run_dir: Path) -> Iterator[None]:
    """Answer requests for stacks until the context ends."""
    requests = run_dir / REQUESTS
    requests.parent.mkdir(parents=True, exist_ok=True)
    requests.write_text("")
    ended = threading.Event()
    # A daemon: a request may wait for a node that does not answer.
    thread = threading.Thread(target=_serve, args=(run_dir, ended), name="stacks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=POLL_S)
        requests.unlink(missing_ok=True)


def _serve(run_dir: Path, ended: threading.Event) -> None:
    answered: set[str] = set()
    while not ended.wait(POLL_S):
        try:
            request_id = (run_dir / REQUESTS).read_text().strip()
            if REQUEST_ID.fullmatch(request_id) and request_id not in answered:
                answer_file(run_dir, request_id).write_text(json.dumps(collect()))
                answered.add(request_id)
        except Exception:  # such as Ray's, while it starts or ends: try again, and never end a run
            continue


def collect() -> dict[str, Any]:
    """Return the stacks of this process and of all workers of its run, as JSON values.

    driver: host, pid and stacks of this process.
    calls: role, method, seconds and unfinished ranks of each outstanding call.
    workers: role, rank, host, pid, state (see `node.process_state`) and stacks of each worker. host
    and pid are None, if unknown, and stacks are "" for a worker that did not answer.
    """
    driver = {"host": socket.gethostname(), "pid": os.getpid(), "stacks": own_stacks()}
    cluster = current()
    if cluster is None:
        return {"driver": driver, "calls": [], "workers": []}
    calls = [
        {
            "role": future.role,
            "method": future.method,
            "seconds": time.monotonic() - future.started,
            "unfinished": sorted(worker.rank for worker in list(future.pending.values())),
        }
        for future in list(cluster.supervisor.outstanding)
    ]
    workers = stacks_of(list(cluster.supervisor.workers))
    return {"driver": driver, "calls": calls, "workers": workers}


def own_stacks() -> str:
    """Return the stacks of the other threads of this process, as faulthandler writes them."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    threads = text.split("\n\n")
    return "\n\n".join(thread for thread in threads if not thread.startswith("Current thread"))


def stacks_of(workers: list[WorkerHandle]) -> list[dict[str, Any]]:
    """Have workers on any node write their stacks; return them as `collect` describes."""
    by_node: dict[str, list[tuple[str, node.Process]]] = {}
    found: list[dict[str, Any]] = []
    places: list[tuple[dict[str, Any], str, int]] = []
    for worker, info in zip(workers, process_infos(workers), strict=True):
        facts = {"role": worker.role, "rank": worker.rank, "host": None, "pid": None, "stacks": ""}
        found.append(facts | {"state": "not started"})
        if info is not None:
            found[-1] |= {"pid": info.process.pid, "state": "on a node that does not answer"}
            on_same_node = by_node.setdefault(worker.node_id, [])
            places.append((found[-1], worker.node_id, len(on_same_node)))
            on_same_node.append((worker.log, info.process))
    arguments = {node_id: (processes,) for node_id, processes in by_node.items()}
    answers = on_nodes(node.dump_stacks, arguments, NODE_ANSWER_S)
    for facts, node_id, number in places:
        if node_id in answers:
            dump = answers[node_id][number]
            facts |= {"host": dump.host, "state": dump.state, "stacks": dump.stacks}
    return found
