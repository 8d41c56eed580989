"""The stacks of a run's processes on all nodes: gathered (`collect`), as text (`render`), and as
the answer to `verlite stacks` (`answer_requests`).

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verlite.controller import node
from verlite.controller.failures import indent
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


def render(answer: dict[str, Any]) -> str:
    """Return the text of an answer: the driver, the calls it waits for, and the workers."""
    driver = answer["driver"]
    parts = [f"driver: process {driver['pid']} on {driver['host']}", *threads(driver["stacks"])]
    for call in answer["calls"]:
        parts.append(
            f"{call['role']}.{call['method']} has run for {call['seconds']:.0f} s; not finished: "
            f"{ranks_text(call['unfinished'])}"
        )
    if not answer["workers"]:
        parts.append("no worker has started")
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for worker in answer["workers"]:
        text = "\n".join(threads(worker["stacks"]))
        state = "" if text else worker["state"]
        groups.setdefault((worker["role"], text, state), []).append(worker)
    for (role, text, state), workers in groups.items():
        ranks = ranks_text(worker["rank"] for worker in workers)
        parts.append(f"{role} {ranks}: {places(workers)}")
        parts.append(text or indent(f"no answer: the process is {state}"))
    return "\n".join(parts)


def threads(stacks: str) -> list[str]:
    """Return the text of each thread in faulthandler's dump, the main thread first."""
    dumps = re.split(r"^(?:Current thread|Thread) 0x.*$", stacks, flags=re.MULTILINE)[1:]
    return [
        f"  {'another' if number else 'main'} thread, the innermost call first\n"
        + indent(dump.strip("\n"))
        for number, dump in enumerate(reversed(dumps))
    ]


def ranks_text(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"


def places(workers: list[dict[str, Any]]) -> str:
    """Return "processes 11, 12 on gpu-0; process 13 on gpu-1"."""
    by_host: dict[str, list[str]] = {}
    for worker in workers:
        by_host.setdefault(worker["host"] or "an unknown node", []).append(str(worker["pid"]))
    return "; ".join(
        f"process{'es' if len(pids) > 1 else ''} {', '.join(pids)} on {host}"
        for host, pids in by_host.items()
    )


REQUESTS = "logs/stacks.request"
"""File in the run directory with the id of the last request."""
REQUEST_ID = re.compile(r"[0-9a-f]{16}")
POLL_S = 1.0
"""How often the driver reads the file."""


def answer_file(run_dir: Path, request_id: str) -> Path:
    """Return the file of an answer. The command creates it empty, the driver fills it."""
    return run_dir / f"logs/stacks.{request_id}.json"


@contextmanager
def answer_requests(run_dir: Path, current: Callable[[], Any]) -> Iterator[None]:
    """Answer requests for stacks until the context ends.

    current: returns the run's `Cluster`, None as long as it has none.
    """
    requests = run_dir / REQUESTS
    requests.parent.mkdir(parents=True, exist_ok=True)
    requests.write_text("")
    ended = threading.Event()
    # A daemon: a request may wait for a node that does not answer.
    thread = threading.Thread(
        target=_serve, args=(run_dir, current, ended), name="stacks", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=POLL_S)
        requests.unlink(missing_ok=True)


def _serve(run_dir: Path, current: Callable[[], Any], ended: threading.Event) -> None:
    answered: set[str] = set()
    while not ended.wait(POLL_S):
        try:
            request_id = (run_dir / REQUESTS).read_text().strip()
            if REQUEST_ID.fullmatch(request_id) and request_id not in answered:
                cluster = current()
                calls = cluster.supervisor if cluster is not None else None
                answer = collect(calls.workers, calls.outstanding) if calls else collect([], [])
                answer_file(run_dir, request_id).write_text(json.dumps(answer))
                answered.add(request_id)
        except Exception:  # such as Ray's, while it starts or ends: try again, and never end a run
            continue
