"""Wait for worker calls with timeouts, report the root cause, clean up.

A run has one Supervisor. It watches every outstanding call, so a worker that fails in one call is
noticed while the driver waits for another. A collective that lost a rank often fails before the
death of that rank is known. The supervisor therefore waits a moment after the first failure, picks
the root cause, stops all workers and raises one error.
"""

import logging
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

from verlite.control import limits
from verlite.control.causes import Failures, Settling, dead_workers
from verlite.control.watch import Rank, Watch, still_ranks
from verlite.controller.failures import (
    NODE_LOST,
    Cause,
    RankDied,
    cause_of_exception,
    cause_of_ray_error,
    node_lost,
    stuck_error,
    unresponsive,
    worker_error,
)
from verlite.controller.node_watch import DaemonWatch, NodeWatch
from verlite.controller.rank_watch import look, straggler
from verlite.controller.records import Failed
from verlite.controller.stacks import collect
from verlite.controller.worker_handle import WorkerHandle, diagnose, kill_processes, process_infos

T = TypeVar("T")


@dataclass(eq=False)
class Future(Generic[T]):
    """The result of a call that workers are still running.

    Attributes:
        pending: {Ray reference: worker} for the ranks that have not answered.
        assemble: builds the result from the values of all ranks, in rank order.
        send: sends the call to one rank; returns (Ray reference, worker). None: it cannot be sent
            again.
        sent: {rank: worker} to which the call was sent.
        values: {rank: value} for the ranks that have answered.
        started: time of the call, from time.monotonic().
        answered: {rank: (its worker, seconds until its answer)}.
        pause_s: longest time without progress that has been seen so far.
        named: see `control.watch.Watch.look`.
    """

    supervisor: "Supervisor"
    role: str
    method: str
    pending: dict[Any, WorkerHandle]
    assemble: Callable[[list[Any]], T]
    send: Callable[[int], tuple[Any, WorkerHandle]] | None = None
    sent: dict[int, WorkerHandle] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    answered: dict[int, tuple[WorkerHandle, float]] = field(default_factory=dict)
    pause_s: float = 0.0
    named: set[str] = field(default_factory=set)

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for all ranks and return the assembled result.

        Args:
            timeout_s: longest time without progress, in seconds, counted from the call or from the
                last heartbeat that showed progress; None uses the run's limit.

        Raises:
            WorkerError: a worker of any role failed.
            RankDied: see `Supervisor.restartable`. `send_missing` then repeats what is missing.
            StuckError: the time limit was exceeded.
            RayLost, NodeLost: a process of Ray here, or a node, is lost.
        """
        limit_s = self.supervisor.call_timeout_s if timeout_s is None else timeout_s
        try:
            self.supervisor.wait(self, limit_s)
        except RankDied as died:
            died.call = self
            raise
        return self.assemble([self.values[rank] for rank in sorted(self.values)])

    def facts(self) -> list[Rank]:
        """Return what is known of each rank that has not answered."""
        elapsed_s = time.monotonic() - self.started
        facts = self.supervisor.ranks.facts
        return [facts(w.rank, w.heartbeat, elapsed_s) for w in list(self.pending.values())]

    def exceeds(self, limit_s: float) -> bool:
        """Return whether ranks have made no progress for longer than the limit."""
        elapsed_s = time.monotonic() - self.started
        return elapsed_s > limit_s and bool(still_ranks(self.facts(), limit_s))

    def send_missing(self) -> None:
        """Send the call again to the ranks that have died, also to those that had answered: what
        they keep for others is lost with them. Also to ranks that failed because of the deaths. The
        other ranks' answers are kept."""
        assert self.send is not None
        for rank, worker in self.sent.items():
            if rank not in self.values or worker not in self.supervisor.workers:
                self.values.pop(rank, None)
                ref, self.sent[rank] = self.send(rank)
                self.pending[ref] = self.sent[rank]
        self.started = time.monotonic()
        if self not in self.supervisor.outstanding:
            self.supervisor.watch(self)


class Supervisor:
    """Watches the calls and processes of one run.

    Attributes:
        call_timeout_s: default limit of one call without progress, in seconds.
        ranks: notices frozen, stuck and slow ranks.
        warn: shows a warning to the user.
        workers: all workers of the run.
        restartable: roles of which a dead worker does not end the run: calls raise RankDied. Then
            use `settle` and `WorkerGroup.restart`.
        outstanding: calls that have not finished.
        failure: the first failure, after which no call can succeed.
        stopped_by: failure of a worker that waits for a debugger before it reports it.
        node_watch: notices lost nodes of a joined cluster.
        daemon_watch: notices lost processes of Ray on this machine.
        before_poll: called repeatedly while the driver waits for a call. It may raise, which ends
            the wait.
    """

    def __init__(self, call_timeout_s: float, ranks: Watch | None = None) -> None:
        self.call_timeout_s = call_timeout_s
        self.ranks = ranks or Watch()
        self.warn: Callable[[str], None] = logging.getLogger(__name__).warning
        self.workers: list[WorkerHandle] = []
        self.restartable: set[str] = set()
        self.outstanding: list[Future[Any]] = []
        self.failure: Exception | None = None
        self.node_watch = NodeWatch([])
        self.daemon_watch: DaemonWatch | None = None
        self.stopped_by: Cause | None = None
        self.before_poll: Callable[[], object] = lambda: None

    def watch(self, future: Future[T]) -> Future[T]:
        """Add a call to the outstanding ones."""
        self.outstanding.append(future)
        return future

    def wait(self, future: Future[Any], timeout_s: float) -> None:
        """Return when every rank of `future` has answered.

        Raises:
            WorkerError, StuckError: see `Future.result`. WorkerError also at Ctrl-C, if a worker's
                failure is known and the worker still waits for a debugger.
            RuntimeError: the workers were stopped after an earlier failure.
        """
        while future.pending and self.failure is None:
            self._look_around()
            try:
                self.poll(limits.POLL_S)
            except KeyboardInterrupt:
                if self.stopped_by is None:
                    raise
                self._raise_first([self.stopped_by])
            if self.failure is None and future.exceeds(timeout_s):
                self.ranks.look_now()  # a rank stuck on its own may be restartable
                self.poll(0.0)
                if future.pending:
                    self._raise_stuck(future, timeout_s)
        if self.failure is not None and future.pending:
            raise RuntimeError(
                f"{future.role}.{future.method}: the workers were stopped after an earlier failure"
            ) from self.failure

    def poll(self, timeout_s: float) -> None:
        """Collect the answers that have arrived for any call, waiting at most timeout_s.

        Raises:
            WorkerError: on the first failure.
        """
        failures = Failures()
        wait_s: float | None = timeout_s
        while wait_s is not None:
            failures.causes += self._collect(wait_s)
            if not failures.causes or self.failure is not None:
                return
            wait_s = failures.wait_s(bool(self.outstanding), time.monotonic())
        if failures.are_unexplained:
            failures.causes += self._dead_workers()
        self._raise_first(failures.causes)

    def answers_within(self, future: Future[Any], limit_s: float) -> list[Any]:
        """Return what ranks answer within the limit, in rank order. Then the call is forgotten.

        Ranks of restartable roles that die meanwhile are left out; the next call notices them.
        """
        until = time.monotonic() + limit_s
        while future.pending and time.monotonic() < until:
            with suppress(RankDied):
                self.poll(min(limits.POLL_S, limit_s))
        future.pending = {}
        self.outstanding = [other for other in self.outstanding if other is not future]
        return [future.values[rank] for rank in sorted(future.values)]

    def raise_if_worker_died(self, workers: Sequence[WorkerHandle] | None = None) -> None:
        """Raise WorkerError if a worker has died between two calls.

        workers: those to ask. None: all of the run.
        """
        causes = self._dead_workers(workers)
        if causes:
            self._raise_first(causes)

    def settle(self, dead: Sequence[WorkerHandle]) -> list[WorkerHandle]:
        """After RankDied: kill the dead workers, should they only be stuck, and wait for all other
        workers to answer their calls. Failures that the deaths explain are ignored.

        Workers of restartable roles that die meanwhile are killed, too: a process that is only
        stuck, or out of memory, would keep the devices of its successor.

        A call that exceeds the run's limit is stuck only if a last look finds neither its answer
        nor a worker that has died, which it may have been waiting for.

        Returns:
            The dead workers, with those of restartable roles that have died meanwhile.

        Raises:
            WorkerError, StuckError: another worker failed, or a call exceeded the run's limit.
            RayLost, NodeLost: a process of Ray here, or a node, is lost.
        """
        settling = Settling(list(dict.fromkeys(dead)))
        self._kill(settling.dead)
        settling.begin(time.monotonic())
        while self.outstanding:
            self._look_around()
            late = self._late() if settling.may_be_stuck(time.monotonic()) else []
            if late:
                self.ranks.look_now()
            causes = self._collect(0.0 if late else limits.POLL_S)
            if any(future.pending for future in late):
                causes += [c for c in self._dead_workers() if c.worker not in settling.dead]
                causes += self._collect(0.0)
            more = settling.more(causes, self.restartable)
            if more is None:
                self._raise_first(causes)
            if more:
                self._kill(more)
                settling.begin(time.monotonic())
                continue
            for future in late:
                if future.pending:
                    self._raise_stuck(future, self.call_timeout_s)
        self.workers = [worker for worker in self.workers if worker not in settling.dead]
        return settling.dead

    def _late(self) -> list[Future[Any]]:
        """Return the calls that exceed the run's limit."""
        return [future for future in self.outstanding if future.exceeds(self.call_timeout_s)]

    def stop_all(self) -> None:
        """Kill every worker; see `stop`."""
        self.stop(list(self.workers))

    def stop(self, workers: Sequence[WorkerHandle]) -> None:
        """Kill workers, including SIGSTOPped and busy ones, without waiting for their exit.

        Calls that any of them was running are dropped.
        """
        self.outstanding = [
            future
            for future in self.outstanding
            if not any(worker in workers for worker in future.pending.values())
        ]
        self.workers = [worker for worker in self.workers if worker not in workers]
        self._kill(workers)

    def _kill(self, workers: Sequence[WorkerHandle]) -> None:
        import ray

        for worker in workers:
            ray.kill(worker.actor, no_restart=True)
        # ray.kill only asks the process to exit; a SIGSTOPped process does not respond.
        lost = {one.node_id for one in list(self.node_watch.lost)}
        reachable = [worker for worker in workers if worker.node_id not in lost]
        kill_processes(reachable)

    def _collect(self, timeout_s: float) -> list[Cause]:
        """Store the answers that have arrived; return the failures among them."""
        import ray

        owners = {ref: future for future in self.outstanding for ref in future.pending}
        if not owners:
            return []
        ready, rest = ray.wait(list(owners), num_returns=1, timeout=timeout_s)
        answering = {owners[ref] for ref in ready}
        same = [ref for ref in rest if owners[ref] in answering]
        others = [ref for ref in rest if owners[ref] not in answering]
        for refs, wait_s in ((same, min(timeout_s, limits.GATHER_S)), (others, 0.0)):
            if ready and refs:
                ready += ray.wait(refs, num_returns=len(refs), timeout=wait_s)[0]
        causes = []
        for ref in ready:
            future = owners[ref]
            worker = future.pending.pop(ref)
            try:
                value = ray.get(ref)
            except ray.exceptions.RayError as error:
                causes.append(cause_of_ray_error(worker, future.method, error))
                continue
            if isinstance(value, Failed):
                causes.append(cause_of_exception(worker, future.method, value))
            else:
                future.values[worker.rank] = value
                future.answered[worker.rank] = worker, time.monotonic() - future.started
                if not future.pending:
                    text = straggler(self.ranks, future)
                    if text:
                        self.warn(text)
        causes += self._unresponsive()
        self.outstanding = [future for future in self.outstanding if future.pending]
        return causes

    def _unresponsive(self) -> list[Cause]:
        """Return a cause for each worker that is frozen, or that makes no progress on its own.

        Calls no longer wait for these workers. Idle workers of restartable roles are left out: the
        call in progress does not need them, and their next call notices them.

        Raises:
            StuckError: ranks that meet in collectives make no progress.
        """
        if not self.ranks.is_due(time.monotonic()):
            return []
        busy = {worker for future in self.outstanding for worker in future.pending.values()}
        needed = [one for one in self.workers if one in busy or one.role not in self.restartable]
        causes = []
        given = (self.workers, self.outstanding, self.call_timeout_s, self.warn)
        for one in look(self.ranks, needed, *given):
            if one.call is not None:
                self._raise_stuck(one.call, one.limit_s, one.why)
            for worker in one.workers:
                causes.append(unresponsive(worker, self._drop(worker), one.kind, one.why))
        return causes

    def _drop(self, worker: WorkerHandle) -> str:
        """Stop waiting for a worker; return the method that it was running."""
        methods = []
        for future in self.outstanding:
            for ref in [ref for ref, pending in future.pending.items() if pending is worker]:
                del future.pending[ref]
                methods.append(future.method)
        return methods[0] if methods else "no call"

    def _dead_workers(self, workers: Sequence[WorkerHandle] | None = None) -> list[Cause]:
        """Return a cause for each worker that has died between two calls."""
        import ray

        workers = self.workers if workers is None else workers
        if not workers:
            return []
        asked = {worker.actor.process_info.remote(): worker for worker in workers}
        causes = []
        for ref in ray.wait(list(asked), num_returns=len(asked), timeout=limits.GRACE_S)[0]:
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                causes.append(cause_of_ray_error(asked[ref], "no call", error))
        return causes

    def _raise_first(self, causes: list[Cause]) -> NoReturn:
        """Raise the root cause. Stop all workers, unless it is a death of a restartable role's."""
        self._raise_if_ray_lost()  # workers end with their raylet
        dead = dead_workers(causes, self.restartable)
        first = causes[0]
        info = process_infos([first.worker])[0]
        diagnosis = diagnose([first.worker])[0]
        error = worker_error(causes, diagnosis, info.oom_kills if info else None)
        if dead and error.kind != NODE_LOST:
            raise RankDied(error, dead)
        self.failure = error
        try:
            exception = pickle.loads(first.pickled) if first.pickled is not None else None
        finally:
            self.stop_all()
        raise error from exception

    def _look_around(self) -> None:
        """Raise if something ends the wait: see `before_poll`, RayLost, NodeLost."""
        self.before_poll()
        self._raise_if_ray_lost()
        self._raise_if_node_lost()

    def _raise_if_ray_lost(self) -> None:
        """Raise RayLost if a process of Ray on this machine is lost. The guardian ends the workers,
        because Ray may not."""
        error = None if self.daemon_watch is None else self.daemon_watch.check()
        if error is not None:
            self.failure = error
            raise error

    def _raise_if_node_lost(self) -> None:
        """Stop all workers and raise NodeLost if a node or the head cannot be reached any more."""
        if not self.node_watch.lost:
            return
        first, reason = next(iter(self.node_watch.lost.items()))
        on_it = [worker for worker in self.workers if worker.node_id == first.node_id]
        self.failure = node_lost(first.name, reason, on_it)
        self.stop_all()
        raise self.failure

    def _raise_stuck(self, future: Future[Any], timeout_s: float, why: str = "") -> NoReturn:
        """Have all workers write their stacks into their logs, stop them and raise StuckError."""
        if not why:
            collect(self.workers, self.outstanding)  # faulthandler writes the stacks
        unfinished = sorted(future.pending.values(), key=lambda worker: worker.rank)
        diagnoses = zip(unfinished, diagnose(unfinished), strict=True)
        error = stuck_error(
            future.role, future.method, timeout_s, sorted(future.values), list(diagnoses), why
        )
        self.failure = error
        self.stop_all()
        raise error
