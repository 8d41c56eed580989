"""Answer `verlite stacks`: what every process of a run is doing now.

The command writes a request into a file of the run directory, because any node that shares the
folder can do that, without being a part of the cluster. A thread of the driver reads it, has every
worker write its stacks into its log by a signal, and writes the answer into another file. The
signal handler is faulthandler's, in C, so a worker answers while it waits in native code or in a
collective. The file of requests exists all the time: a file system like NFS shows changes of a file
at once, but a new file late.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verlite.controller import stack_dump
from verlite.controller.cluster import current

REQUESTS = "logs/stacks.request"
"""File in the run directory with the id of the last request."""
REQUEST_ID = re.compile(r"[0-9a-f]{16}")
POLL_S = 1.0
"""How often the driver reads the file."""


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
    """Return the stacks of this process and of its run's workers; see `stack_dump.collect`."""
    cluster = current()
    if cluster is None:
        return stack_dump.collect([], [])
    return stack_dump.collect(cluster.supervisor.workers, cluster.supervisor.outstanding)
