"""Gather the stacks of a run's processes on all nodes."""

import faulthandler
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from verlite.controller import node
from verlite.controller.worker_handle import WorkerHandle, on_nodes, process_infos

NODE_ANSWER_S = 30.0
"""Longest wait for another node. Ray may have to start a process there first."""


def collect(workers: Sequence[WorkerHandle], outstanding: Sequence[Any]) -> dict[str, Any]:
    """Return the stacks of this process and of the workers, as JSON values.

    Args:
        outstanding: the run's unfinished calls (`supervise.Future`).

    Returns:
        driver: host, pid and stacks of this process.
        calls: role, method, seconds and unfinished ranks of each outstanding call.
        workers: role, rank, host, pid, state (see `node.process_state`) and stacks of each worker.
        host and pid are None, if unknown, and stacks are "" for a worker that did not answer.
    """
    calls = [
        {
            "role": future.role,
            "method": future.method,
            "seconds": time.monotonic() - future.started,
            "unfinished": sorted(worker.rank for worker in list(future.pending.values())),
        }
        for future in list(outstanding)
    ]
    driver = {"host": socket.gethostname(), "pid": os.getpid(), "stacks": own_stacks()}
    return {"driver": driver, "calls": calls, "workers": stacks_of(list(workers))}


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
    if not workers:  # Ray may not have started, and asking it would start another one
        return []
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
