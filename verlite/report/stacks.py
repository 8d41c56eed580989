"""Ask a running job for the stacks of its processes, and show equal ones once."""

import fcntl
import json
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from verlite.controller.failures import indent
from verlite.controller.stacks import REQUESTS, answer_file

ASK_AGAIN_S = 5.0
"""Two commands at the same time may overwrite each other's request."""


class StacksError(ValueError):
    """The run does not answer. The message says why and what to do."""


def ask(run_dir: Path, wait_s: float) -> dict[str, Any]:
    """Return the answer of the job's driver; `controller.stacks.collect` describes it.

    Raises:
        StacksError: no job runs in the folder, or its driver did not answer in time.
    """
    requests = run_dir / REQUESTS
    if not is_running(run_dir):
        raise StacksError(
            f"no job is running in {run_dir}. Give the run directory "
            "(trainer.default_local_dir) of one that is"
        )
    request_id = secrets.token_hex(8)
    answer = answer_file(run_dir, request_id)
    answer.touch(mode=0o600)
    try:
        return wait_for_answer(requests, request_id, answer, wait_s)
    finally:
        answer.unlink(missing_ok=True)


def wait_for_answer(requests: Path, request_id: str, answer: Path, wait_s: float) -> dict[str, Any]:
    """Write the request, again if it was overwritten, until the answer is complete.

    Raises:
        StacksError: the job has ended meanwhile, or its driver did not answer in time.
    """
    run_dir = requests.parents[1]
    deadline = time.monotonic() + wait_s
    asked = float("-inf")
    while time.monotonic() < deadline:
        if not is_running(run_dir):
            raise StacksError(f"the job in {run_dir} has ended before it answered")
        if time.monotonic() - asked > ASK_AGAIN_S:
            asked = time.monotonic()
            _write(requests, request_id)
        time.sleep(0.2)
        try:
            found: dict[str, Any] = json.loads(answer.read_text())
            return found
        except (OSError, ValueError):  # not there yet, or not complete
            continue
    owner = (run_dir / ".lock").read_text().strip()
    raise StacksError(
        f"the driver (process {owner}) did not answer within {wait_s:g} s. It may be stopped, or "
        f"hang in native code: `py-spy dump --pid {owner}` on its machine shows it. The stacks of "
        "workers are written into their logs by `kill -USR1 PID`"
    )


def _write(requests: Path, request_id: str) -> None:
    """Write the request. A file that the job has removed at its end is not created again."""
    with suppress(FileNotFoundError), requests.open("r+") as file:
        file.write(request_id)  # ids have one length


def is_running(run_dir: Path) -> bool:
    """Return whether a job runs there that answers requests."""
    return (run_dir / REQUESTS).is_file() and is_locked(run_dir / ".lock")


def is_locked(path: Path) -> bool:
    """Return whether a running job holds the lock of a run directory; True if unknown."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return path.exists()
    return False


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
