"""Errors about failed or stuck workers, and how the root cause is found among several failures."""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from verlite.controller.node import SIGTERM_LINE, Diagnosis
from verlite.controller.records import Failed
from verlite.controller.worker_handle import WorkerHandle

LOG_LINES = 30
"""Lines of a worker's log in an error message."""
KINDS = {
    "OutOfMemoryError": "out of device memory",
    "MemoryError": "out of host memory",
    "Sigterm": "killed by SIGTERM",
    "EngineDied": "the engine died",
}
"""Kinds of failure by exception class; every other exception is of the kind "exception". After one
of these the process cannot be used any more."""
FROZEN = "frozen"
STUCK = "no progress"
KIND_OF = {**KINDS, "SamplesStuck": STUCK}
"""The same, and classes after which the process could go on."""
PASSING = (KINDS["MemoryError"], KINDS["Sigterm"], KINDS["EngineDied"], FROZEN, STUCK)
"""Kinds after which the same command may succeed: others may have used the memory, and an engine's
error may have been one of the device or of a server."""
DISK_FULL = "a full disk"
DIED = "died"
"""Kind of a worker that died, until its node has been asked for the reason."""
NODE_LOST = "node lost"
FATAL_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating": "SIGFPE",
    "Illegal": "SIGILL",
}
"""Text that faulthandler writes for each fatal signal."""
LOST_PEER = re.compile(
    r"onnection (closed|reset|refused|was closed)|broken pipe|socket|gloo|nccl|peer|TCPStore"
    r"|timed? ?out",
    re.IGNORECASE,
)
"""Messages of a RuntimeError that a collective raises when another rank has failed."""
CONSEQUENCES = ("WorkerNotBuilt", "OwnerDiedError", "ObjectLostError", "TransportError")
"""Exceptions that only follow from another worker's failure."""
ACTOR_FILE = "verlite/controller/worker_actor.py"
"""Stack frames outside the worker's own code start in this file."""


class WorkerError(RuntimeError):
    """A worker failed, and all workers were stopped.

    If the worker's own exception could be pickled, it is the __cause__.

    Attributes:
        role, rank, method: the worker and the call that failed.
        kind: "exception", "out of device memory", "killed by SIGKILL ...", "node lost" and so on.
        exception_type: class name of the worker's exception, None if the process died.
        may_pass: whether the same command may succeed: the process or its node died, or a
            connection broke, or the host's memory was full. False for other exceptions, also for
            full device memory: the step would be repeated with the same samples.
    """

    def __init__(
        self,
        text: str,
        role: str,
        rank: int,
        method: str,
        kind: str,
        exception_type: str | None = None,
        may_pass: bool = False,
    ) -> None:
        super().__init__(text)
        self.role = role
        self.rank = rank
        self.method = method
        self.kind = kind
        self.exception_type = exception_type
        self.may_pass = may_pass


class RayLost(RuntimeError):
    """A process of Ray on this machine has ended or does not run, so no worker can be reached."""


class RankDied(WorkerError):
    """Workers of a role that can be restarted died. The other workers go on.

    Attributes:
        error: the first death, without the call, which may hold a batch.
        workers: the dead ones.
        call: the call that was waited for, a `supervise.Future`.
    """

    call: Any

    def __init__(self, error: WorkerError, workers: list[WorkerHandle]) -> None:
        RuntimeError.__init__(self, str(error))
        vars(self).update(vars(error))
        self.error = error
        self.workers = workers


class NodeLost(RuntimeError):
    """A node, or the head of the cluster, cannot be reached any more. All workers were stopped."""


class StuckError(RuntimeError):
    """A call exceeded its time limit, and all workers were stopped.

    Attributes:
        finished, unfinished: ranks that had answered, and ranks that had not.
    """

    def __init__(
        self, text: str, role: str, method: str, finished: list[int], unfinished: list[int]
    ) -> None:
        super().__init__(text)
        self.role = role
        self.method = method
        self.finished = finished
        self.unfinished = unfinished


@dataclass(frozen=True)
class Cause:
    """The failure of one worker.

    Attributes:
        method: the call that failed.
        type_name: class name of the exception, None if the process died.
        when: time of the exception, or of its discovery, in seconds since the epoch.
        pickled: the exception itself, if it could be pickled.
    """

    worker: WorkerHandle
    method: str
    kind: str
    type_name: str | None
    message: str
    traceback: str
    when: float
    pickled: bytes | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether another worker's failure explains this one.

        Examples: a collective lost its peer; the trainer stopped sending weights; the worker that
        stored a column has died.
        """
        name = self.type_name or ""
        if name == "WeightSyncError":
            return "TransportError" in self.message
        if name == "RuntimeError":
            return LOST_PEER.search(self.message) is not None
        return name.startswith("Dist") or name in CONSEQUENCES

    @property
    def ended(self) -> bool:
        """Whether the worker's process has ended or cannot be used any more."""
        return self.type_name is None or self.type_name in KINDS

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sort key: causes before consequences, deaths before exceptions, early before late."""
        return self.is_consequence, self.type_name is not None, self.when


def cause_of_exception(worker: WorkerHandle, method: str, failed: Failed) -> Cause:
    """Return the cause for an exception that the worker reported."""
    return Cause(
        worker=worker,
        method=method,
        kind=KIND_OF.get(failed.type_name, "exception"),
        type_name=failed.type_name,
        message=failed.message,
        traceback=failed.traceback,
        when=failed.when,
        pickled=failed.pickled,
    )


def cause_of_ray_error(worker: WorkerHandle, method: str, error: Exception) -> Cause:
    """Return the cause for a worker that did not answer. The reason for a death is found later."""
    import ray

    type_name = None
    traceback = ""
    if isinstance(error, ray.exceptions.RayTaskError):
        # Raised outside the worker's method, for example when an argument cannot be unpickled.
        kind = "exception"
        type_name = type(error.cause).__qualname__
        message = str(error.cause)
        traceback = str(error)
    elif isinstance(error, ray.exceptions.OutOfMemoryError):
        kind = KINDS["MemoryError"]
        message = "Ray's memory monitor killed it: " + str(error).splitlines()[0]
    elif "because its node has died" in str(error):
        kind = NODE_LOST
        message = "its node left the cluster"
    else:
        kind = DIED
        message = exit_detail(error)
    return Cause(worker, method, kind, type_name, message, traceback, time.time())


def exit_detail(error: Exception) -> str:
    """Return Ray's description of a death on one line, without its boilerplate."""
    match = re.search(
        r"Worker exit detail: (.*?)(?: There are some potential root causes|$)",
        str(error),
        re.DOTALL,
    )
    text = match.group(1) if match else str(error)
    return " ".join(text.split())[:300]


def reason_for_death(log: str, more_oom_kills: bool, full_disks: str = "") -> tuple[str, str]:
    """Return (kind, explanation) of a death, from the worker's log, the kernel's counters and the
    disks of its machine."""
    for text, name in FATAL_SIGNALS.items():
        if f"Fatal Python error: {text}" in log:
            return f"killed by {name}", "the process crashed in native code"
    if SIGTERM_LINE in log:
        return KINDS["Sigterm"], "something outside the run sent SIGTERM to the process"
    if more_oom_kills:
        explanation = "the kernel killed a process of its machine for lack of memory"
        return KINDS["MemoryError"], explanation
    if full_disks:
        return DISK_FULL, f"the process ended, and disks of its machine are full: {full_disks}"
    if "No space left on device" in log:
        return DISK_FULL, 'the process ended, and its log says "No space left on device"'
    return (
        "killed by SIGKILL or os._exit",
        "the process ended without a message. Often the kernel's out-of-memory killer ended it "
        "(see `dmesg`): use smaller micro-batches, or fewer workers per machine",
    )


def worker_error(
    causes: list[Cause], diagnosis: Diagnosis | None, oom_kills_at_start: int | None
) -> WorkerError:
    """Return the error for sorted causes: the first in full, each other worker's on one line.

    Args:
        diagnosis: of the first cause's worker; None if its node does not answer.
        oom_kills_at_start: its node's count when the worker started; None if it never started.
    """
    first = causes[0]
    worker = first.worker
    kind = first.kind
    what = f"{first.type_name}: {first.message}" if first.type_name else first.message
    log = diagnosis.log if diagnosis else ""
    if kind == DIED and diagnosis is None:
        kind = NODE_LOST
        what = "its node does not answer"
    elif kind == DIED and diagnosis and oom_kills_at_start is not None:
        more_oom_kills = diagnosis.oom_kills > oom_kills_at_start
        kind, what = reason_for_death(log, more_oom_kills, diagnosis.full_disks)
    lines = [
        f"{worker.name} failed in {first.method} ({kind}): {what}",
        f"  process {worker.pid} on node {worker.node}, log: {worker.log}",
    ]
    if first.traceback:
        lines += ["  its traceback:", indent(first.traceback)]
    elif log:
        lines += ["  end of its log:", indent("\n".join(log.splitlines()[-LOG_LINES:]))]
    for cause in causes[1:]:
        if cause.worker is not worker:
            message = " ".join(cause.message.split())[:200]
            what = cause.type_name or cause.kind
            lines.append(f"  then {cause.worker.name} in {cause.method}: {what}: {message}")
    text = "\n".join(lines)
    may_pass = first.type_name is None or first.is_consequence or kind in PASSING
    return WorkerError(
        text, worker.role, worker.rank, first.method, kind, first.type_name, may_pass
    )


def node_lost(name: str, reason: str, workers: list[WorkerHandle]) -> NodeLost:
    """Return the error for a lost node, or for the lost head.

    Args:
        name: of the node, or of the head.
        reason: why no connection could be opened.
        workers: those on that node.
    """
    lines = [f"{name} is lost: no connection to Ray there ({reason})"]
    if workers:
        lines.append("  its workers: " + ", ".join(worker.name for worker in workers))
        lines.append(f"  logs: {workers[0].log} and the files beside it")
    lines.append(
        "  Check the machine and its network. Once the cluster is complete again, the same "
        "command resumes from the last checkpoint."
    )
    return NodeLost("\n".join(lines))


def unresponsive(worker: WorkerHandle, method: str, kind: str, why: str) -> Cause:
    """Return the cause for a worker whose process exists but does nothing, FROZEN or STUCK. As
    after a death, its process cannot be used any more."""
    return Cause(worker, method, kind, None, why, "", time.time())


def stuck_error(
    role: str,
    method: str,
    timeout_s: float,
    finished: list[int],
    unfinished: list[tuple[WorkerHandle, Diagnosis | None]],
    why: str = "",
) -> StuckError:
    """Return the error for a call that exceeded its limit, with the stacks of unfinished ranks.

    why: which ranks the others wait for, if that is known.
    """
    ranks = [worker.rank for worker, _ in unfinished]
    lines = [
        f"{role}.{method} made no progress for {timeout_s:g} s",
        *([f"  {why}"] if why else []),
        f"  finished: {format_ranks(finished)}; not finished: {format_ranks(ranks)}",
    ]
    for worker, diagnosis in unfinished:
        state = diagnosis.state if diagnosis else "on a node that does not answer"
        lines.append(
            f"  rank {worker.rank}: process {worker.pid} is {state}; stacks in {worker.log}"
        )
        frames = main_thread_frames(diagnosis.log) if diagnosis else ""
        if frames:
            lines.append(indent(frames))
    return StuckError("\n".join(lines), role, method, finished, ranks)


def main_thread_frames(log: str) -> str:
    """Return the innermost frames of the main thread in faulthandler's last dump, else ""."""
    dumps = re.split(r"^(?:Current thread|Thread) 0x.*$", log, flags=re.MULTILINE)
    if len(dumps) < 2:
        return ""
    frames = [line.strip() for line in dumps[-1].splitlines() if line.startswith("  File")]
    own = []
    for frame in frames:
        if ACTOR_FILE in frame:
            break
        own.append(frame)
    return "\n".join(own or frames[:3])


def indent(text: str) -> str:
    """Indent every line by four spaces."""
    return "\n".join("    " + line for line in text.rstrip().splitlines())


def format_ranks(ranks: Iterable[int]) -> str:
    """Return "0, 1", or "none"."""
    return ", ".join(str(rank) for rank in ranks) or "none"
