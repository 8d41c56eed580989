"""Waiting for workers without ever waiting in vain: first causes, time limits, stacks of the stuck, an end for all.

A run has one Supervisor. Every call to workers is a Future that it watches until it is complete, so a worker that fails in
one call is noticed while the driver waits for another. On the first failure it looks around for a moment (a collective that
lost its peer fails too, often sooner than the death itself is known), picks the cause, ends all workers and raises one error.
"""

import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Generic, NoReturn, TypeVar

from verlite.controller import node
from verlite.controller.host import Failed, ProcessInfo

T = TypeVar("T")

SLICE_S = 0.2
"""Longest single wait inside Ray: Python sees signals in between."""
LOOK_AROUND_S = 3.0
"""After a failure that may be a consequence, wait this long for its cause to show."""
NODE_S = 10.0
"""Longest visit to another node while reporting."""
LOG_LINES = 30
KINDS = {
    "OutOfMemoryError": "out of device memory",
    "MemoryError": "out of host memory",
    "Sigterm": "killed by SIGTERM",
}
"""What some exceptions of workers mean."""
DIED = "died"
"""Kind of a death before it is known why."""
UNREACHABLE = "on a node that does not answer"


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. A KeyboardInterrupt, so that what cleans up after Ctrl-C cleans up after it too."""


class WorkerError(RuntimeError):
    """A worker failed, and all were stopped.

    role, rank, method: where. kind: exception, out of memory, killed by ..., node lost. exception_type: class name, or None for a death.
    The worker's own exception is the __cause__ where it could be brought here.
    """

    def __init__(
        self,
        text: str,
        role: str,
        rank: int,
        method: str,
        kind: str,
        exception_type: str | None = None,
    ) -> None:
        super().__init__(text)
        self.role, self.rank, self.method, self.kind, self.exception_type = (
            role,
            rank,
            method,
            kind,
            exception_type,
        )


class StuckError(RuntimeError):
    """A call took longer than allowed, and all workers were stopped. finished, unfinished: ranks."""

    def __init__(
        self, text: str, role: str, method: str, finished: list[int], unfinished: list[int]
    ) -> None:
        super().__init__(text)
        self.role, self.method, self.finished, self.unfinished = role, method, finished, unfinished


_terminated: list[str] = []


def terminate(reason: str) -> None:
    """Raise Terminated from a signal handler. Ray turns what a handler raises inside its waits into a bare KeyboardInterrupt, so
    the reason is kept for `_wait`."""
    _terminated.append(reason)
    raise Terminated(reason)


def die_of(number: int) -> None:
    """What a process does that was forked off and got its handlers from us: the signal's ordinary effect."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _wait(refs: list[Any], num_returns: int, timeout_s: float) -> tuple[list[Any], list[Any]]:
    import ray

    try:
        return ray.wait(refs, num_returns=num_returns, timeout=timeout_s)
    except KeyboardInterrupt:
        if _terminated:
            raise Terminated(_terminated.pop()) from None
        raise


@dataclass(eq=False)
class WorkerHandle:
    """One worker as the driver knows it. presence is a reference to a ProcessInfo."""

    handle: Any
    role: str
    rank: int
    node_id: str
    log: str
    presence: Any

    @property
    def name(self) -> str:
        return f"{self.role} rank {self.rank}"

    @property
    def pid(self) -> str:
        known = presences([self])[0]
        return str(known.process.pid) if known else "that never started"


def presences(members: list[WorkerHandle]) -> list[ProcessInfo | None]:
    """The processes of workers, None for one that never got that far."""
    import ray

    refs = [member.presence for member in members]
    known = set(_wait(refs, len(refs), 1.0)[0]) if refs else set()
    found: list[ProcessInfo | None] = []
    for ref in refs:
        try:
            found.append(ray.get(ref) if ref in known else None)
        except ray.exceptions.RayError:
            found.append(None)
    return found


@dataclass(eq=False)
class Future(Generic[T]):
    """The answer of a call that workers are still busy with."""

    supervisor: "Supervisor"
    role: str
    method: str
    pending: dict[Any, WorkerHandle]
    assemble: Callable[[list[Any]], T]
    values: dict[int, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for all ranks. timeout_s counts from the call; None is the run's limit. Raises WorkerError or StuckError."""
        self.supervisor.wait(
            self, self.supervisor.call_timeout_s if timeout_s is None else timeout_s
        )
        return self.assemble([self.values[rank] for rank in sorted(self.values)])

    def done(self) -> bool:
        """Whether result() would return, or raise, at once."""
        self.supervisor.poll(0.0)
        return not self.pending or self.supervisor.failure is not None


@dataclass(frozen=True)
class Cause:
    """One rank's failure. when: time of the exception, or of its discovery."""

    member: WorkerHandle
    method: str
    kind: str
    type_name: str | None
    message: str
    traceback: str
    when: float
    pickled: bytes | None = None

    @property
    def consequence(self) -> bool:
        """Whether this is how a rank fails when another one has: its collective lost a peer, or the owner of its rows' columns died."""
        if self.type_name is None:
            return False
        lost_peer = r"onnection (closed|reset|refused|was closed)|broken pipe|socket|gloo|nccl|peer|TCPStore|timed? ?out"
        return (
            self.type_name in ("WorkerNotBuilt", "OwnerDiedError", "ObjectLostError")
            or self.type_name.startswith("Dist")
            or (
                self.type_name == "RuntimeError"
                and re.search(lost_peer, self.message, re.IGNORECASE) is not None
            )
        )

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sort key: causes before consequences, deaths before exceptions, early before late."""
        return self.consequence, self.type_name is not None, self.when


class Supervisor:
    """Watches the calls and processes of one run."""

    def __init__(self, call_timeout_s: float) -> None:
        self.call_timeout_s = call_timeout_s
        self.members: list[WorkerHandle] = []
        self.outstanding: list[Future[Any]] = []
        self.failure: Exception | None = None

    def watch(self, future: Future[T]) -> Future[T]:
        self.outstanding.append(future)
        return future

    def wait(self, future: Future[Any], timeout_s: float) -> None:
        """Return when every rank of `future` has answered."""
        while future.pending and self.failure is None:
            self.poll(SLICE_S)
            if (
                future.pending
                and self.failure is None
                and time.monotonic() - future.started > timeout_s
            ):
                self._stuck(future, timeout_s)
        if self.failure is not None and future.pending:
            raise RuntimeError(
                f"{future.role}.{future.method}: the workers were stopped after an earlier failure"
            ) from self.failure

    def poll(self, timeout_s: float) -> None:
        """Take in what has arrived for any call, waiting at most timeout_s. Raises WorkerError on the first failure."""
        causes = self._take(timeout_s)
        if not causes or self.failure is not None:
            return
        deadline = time.monotonic() + LOOK_AROUND_S
        while (
            all(cause.consequence for cause in causes)
            and self.outstanding
            and time.monotonic() < deadline
        ):
            causes += self._take(SLICE_S)
        causes += self._take(0.0)
        if all(cause.consequence for cause in causes):
            causes += self._dead()
        self._fail(causes)

    def look_for_dead(self) -> None:
        """Raise WorkerError if a worker has died between two calls, which nobody was waiting for."""
        if causes := self._dead():
            self._fail(causes)

    def _fail(self, causes: list[Cause]) -> NoReturn:
        """End all workers, and raise the first cause."""
        causes.sort(key=lambda cause: cause.order)
        self.failure = error = self._report(causes)
        try:
            cause = pickle.loads(causes[0].pickled) if causes[0].pickled is not None else None
        finally:
            self.end_all()
        raise error from cause

    def _take(self, timeout_s: float) -> list[Cause]:
        import ray

        owners = {ref: future for future in self.outstanding for ref in future.pending}
        if not owners:
            return []
        ready, rest = _wait(list(owners), 1, timeout_s)
        if ready and rest:
            ready += _wait(rest, len(rest), 0)[0]
        causes = []
        for ref in ready:
            future = owners[ref]
            member = future.pending.pop(ref)
            try:
                value = ray.get(ref)
            except ray.exceptions.RayError as error:
                causes.append(_died(member, future.method, error))
                continue
            if isinstance(value, Failed):
                kind = KINDS.get(value.type_name, "exception")
                text = value.message, value.traceback, value.when
                causes.append(
                    Cause(member, future.method, kind, value.type_name, *text, value.pickled)
                )
            else:
                future.values[member.rank] = value
        self.outstanding = [future for future in self.outstanding if future.pending]
        return causes

    def _dead(self) -> list[Cause]:
        """Workers that died between two calls."""
        import ray

        asked = {member.handle.presence.remote(): member for member in self.members}
        causes = []
        for ref in _wait(list(asked), len(asked), LOOK_AROUND_S)[0] if asked else ():
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                causes.append(_died(asked[ref], "no call", error))
        return causes

    def _report(self, causes: list[Cause]) -> WorkerError:
        """The first cause in full, the others in a line each."""
        first, member = causes[0], causes[0].member
        log, state, oom_kills = _visit([member])[0]
        kind, what = (
            first.kind,
            f"{first.type_name}: {first.message}" if first.type_name else first.message,
        )
        if kind == DIED and state == UNREACHABLE:
            kind, what = "node lost", "its node does not answer any more"
        elif kind == DIED and (known := presences([member])[0]):
            kind, what = _kind_of_death(log, oom_kills > known.oom_kills)
        lines = [f"{member.name} failed in {first.method} ({kind}): {what}"]
        lines.append(f"  process {member.pid} on node {member.node_id[:8]}, log: {member.log}")
        if first.traceback:
            lines += ["  its traceback:", _indent(first.traceback)]
        elif log:
            lines += ["  end of its log:", _indent("\n".join(log.splitlines()[-LOG_LINES:]))]
        others = [cause for cause in causes[1:] if cause.member is not member]
        lines += [
            f"  then {c.member.name} in {c.method}: {c.type_name or c.kind}: {' '.join(c.message.split())[:200]}"
            for c in others
        ]
        return WorkerError(
            "\n".join(lines), member.role, member.rank, first.method, kind, first.type_name
        )

    def _stuck(self, future: Future[Any], timeout_s: float) -> None:
        """Have every rank write its stacks into its log, end all, and say who had finished."""
        _signal(self.members, signal.SIGUSR1)
        time.sleep(1.0)  # faulthandler writes within the signal handler
        finished, unfinished = (
            sorted(future.values),
            sorted(future.pending.values(), key=lambda member: member.rank),
        )
        lines = [f"{future.role}.{future.method} did not finish within {timeout_s:g} s"]
        lines.append(
            f"  finished: {_ranks(finished)}; not finished: {_ranks(member.rank for member in unfinished)}"
        )
        for member, (log, state, _) in zip(unfinished, _visit(unfinished), strict=True):
            lines.append(
                f"  rank {member.rank}: process {member.pid} is {state}; stacks in {member.log}"
            )
            if frames := _main_thread(log):
                lines.append(_indent(frames))
        ranks = [member.rank for member in unfinished]
        self.failure = error = StuckError(
            "\n".join(lines), future.role, future.method, finished, ranks
        )
        self.end_all()
        raise error

    def end_all(self) -> None:
        """Kill every worker, also one that is stopped or busy. Does not wait for them to go."""
        import ray

        self.outstanding.clear()
        members, self.members = self.members, []
        for member in members:
            ray.kill(member.handle, no_restart=True)
        _signal(members, signal.SIGKILL)  # Ray only asks; a process that is stopped does not listen


def _signal(members: list[WorkerHandle], number: int) -> None:
    """Send a signal to the workers' processes, wherever they are."""
    by_node: dict[str, list[node.Process]] = {}
    for member, known in zip(members, presences(members), strict=True):
        if known is not None:
            by_node.setdefault(member.node_id, []).append(known.process)
    on_nodes(
        node.send_signal, {node_id: (processes, number) for node_id, processes in by_node.items()}
    )


def _visit(members: list[WorkerHandle]) -> list[tuple[str, str, int]]:
    """For each: (what its process wrote into its log, the process's state, its node's count of out-of-memory kills)."""
    by_node: dict[str, list[tuple[str, node.Process | None]]] = {}
    places = []
    for member, known in zip(members, presences(members), strict=True):
        here = by_node.setdefault(member.node_id, [])
        places.append((member.node_id, len(here)))
        here.append((member.log, known.process if known else None))
    found = on_nodes(node.diagnose, {node_id: (workers,) for node_id, workers in by_node.items()})
    return [
        found[node_id][i] if node_id in found else ("", UNREACHABLE, 0) for node_id, i in places
    ]


def on_nodes(function: Callable[..., T], arguments: dict[str, tuple[Any, ...]]) -> dict[str, T]:
    """Run a function of `node` on several nodes at once; nodes that do not answer within NODE_S are left out of the result."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here, task = (
        ray.get_runtime_context().get_node_id(),
        ray.remote(num_cpus=0, max_retries=0)(function),
    )
    refs = {
        task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(*args): node_id
        for node_id, args in arguments.items()
        if node_id != here
    }
    results = {here: function(*arguments[here])} if here in arguments else {}
    for ref in _wait(list(refs), len(refs), NODE_S)[0] if refs else ():
        try:
            results[refs[ref]] = ray.get(ref)
        except ray.exceptions.RayError:
            continue
    return results


class StopRequest:
    """Turn the first SIGTERM or SIGUSR1 into a flag that a loop reads where it can stop well.

        with StopRequest() as stop:
            for step in ...:
                ...
                if stop.requested:
                    save(); break

    requested: name of the signal, or None. A second SIGTERM raises Terminated at once; Ctrl-C always raises KeyboardInterrupt.
    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self, on_request: Callable[[str], None] = lambda name: None) -> None:
        self.requested: str | None = None
        self.on_request = on_request
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._handle)
                for number in (signal.SIGTERM, signal.SIGUSR1)
            }
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            die_of(number)
        elif self.requested is None:
            self.requested = signal.Signals(number).name
            self.on_request(self.requested)
        elif number == signal.SIGTERM:
            terminate("second SIGTERM")


def _died(member: WorkerHandle, method: str, error: Exception) -> Cause:
    """A worker that gave no answer. Ray says that it is gone; why is found out later."""
    import ray

    now = time.time()
    if isinstance(
        error, ray.exceptions.RayTaskError
    ):  # raised outside the worker's method, as when an argument cannot be unpickled
        return Cause(
            member,
            method,
            "exception",
            type(error.cause).__qualname__,
            str(error.cause),
            str(error),
            now,
        )
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return Cause(
            member,
            method,
            "out of host memory",
            None,
            "Ray's memory monitor killed it: " + str(error).splitlines()[0],
            "",
            now,
        )
    if "because its node has died" in str(error):
        return Cause(member, method, "node lost", None, "its node left the cluster", "", now)
    return Cause(member, method, DIED, None, _one_line(error), "", now)


def _kind_of_death(log: str, more_oom_kills: bool) -> tuple[str, str]:
    """(kind, what is known of it), as far as the worker's log and the kernel's counters tell."""
    fatal = {
        "Segmentation fault": "SIGSEGV",
        "Aborted": "SIGABRT",
        "Bus error": "SIGBUS",
        "Floating": "SIGFPE",
        "Illegal": "SIGILL",
    }
    for text, name in fatal.items():
        if f"Fatal Python error: {text}" in log:
            return f"killed by {name}", "the process crashed in native code"
    if more_oom_kills:
        return "out of host memory", "the kernel killed a process of its machine for lack of memory"
    return "killed by SIGKILL or os._exit", "the process ended without a word"


def _one_line(error: Exception) -> str:
    """Ray's description of a death without its fixed parts."""
    match = re.search(
        r"Worker exit detail: (.*?)(?: There are some potential root causes|$)",
        str(error),
        re.DOTALL,
    )
    text = match.group(1) if match else str(error)
    return " ".join(text.split())[:300]


def _main_thread(log: str) -> str:
    """The innermost frames of the main thread in the last dump that faulthandler wrote."""
    dumps = re.split(r"^(?:Current thread|Thread) 0x.*$", log, flags=re.MULTILINE)
    if len(dumps) < 2:
        return ""
    frames = [line.strip() for line in dumps[-1].splitlines() if line.startswith("  File")]
    ours = next(
        (i for i, frame in enumerate(frames) if "verlite/controller/host.py" in frame), len(frames)
    )
    return "\n".join(frames[:ours] or frames[:3])


def _indent(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in ranks) or "none"
