"""Ask a running job for the stacks of its processes."""

import fcntl
import json
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

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
