"""Start the workers of a role, and call them as if they were one object of their class."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, cast

from verlite.controller.dispatch import dispatch_of, join_rows, split_rows
from verlite.controller.failures import RankDied
from verlite.controller.placement import Placement
from verlite.controller.supervise import Future
from verlite.controller.worker_handle import WorkerHandle
from verlite.controller.worker_start import restart_process, start_processes
from verlite.protocol.data import DataProto
from verlite.threads import cores

P = ParamSpec("P")
W = TypeVar("W")

INLINE_BYTES = 64 << 10
"""Smaller batches are sent with the call. Larger ones are put into the object store first."""
PLACE_S = 120.0
"""How long Ray may take to start a process on the devices of one that died."""


def spawn(
    worker: Callable[P, W], placement: Placement, role: str, /, *args: P.args, **kwargs: P.kwargs
) -> W:
    """Start one worker on each rank of the role, all constructed with the same arguments.

    The result has the static type of the worker class. At run time it is a proxy for all ranks:
    `actor.update(batch)` splits the batch, runs the method on every rank, and blocks until the
    results are collected.

    Returns at once, while the workers are constructed. If construction fails, the next call raises
    the error. Use `ready` to wait.
    """
    return cast(W, _Proxy(WorkerGroup(cast(type, worker), placement, role, args, kwargs)))


def group(worker: object) -> "WorkerGroup":
    """Return the group behind a proxy that `spawn` returned."""
    if not isinstance(worker, _Proxy):
        raise TypeError(f"{worker!r} is not the result of spawn")
    return cast(WorkerGroup, object.__getattribute__(worker, "_group"))


def ready(*workers: object, timeout_s: float | None = None) -> None:
    """Wait until all ranks of these roles are constructed.

    Raises:
        WorkerError: with the first cause.
    """
    for worker in workers:
        group(worker).construction.result(timeout_s)


def submit(method: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> Future[W]:
    """Start a call without waiting: `submit(actor.update, batch)`. `result()` waits for it."""
    if not isinstance(method, _Method):
        raise TypeError(f"{method!r} is not a method of a role's workers")
    return method.group.submit(method.name, *args, **kwargs)


class WorkerGroup:
    """The ranks of one role.

    Attributes:
        workers: the handle of each rank.
        construction: completes when all ranks are constructed.
    """

    def __init__(
        self,
        worker_class: type,
        placement: Placement,
        role: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        import ray

        self.worker_class = worker_class
        self.role = role
        self.placement = placement
        self.cluster = placement.cluster
        self.supervisor = self.cluster.supervisor
        self.workers = placement.prestarted.pop(role, []) or start_processes(placement, role)
        untyped_ray: Any = ray
        self._code = ray.put(untyped_ray.cloudpickle.dumps(worker_class))
        self._names = list(kwargs)
        self._values = [ray.put(value) for value in (*args, *kwargs.values())]
        self._restarts = 0
        self.construction = self._construct(self.workers)

    def _construct(self, workers: list[WorkerHandle]) -> Future[None]:
        rendezvous = workers[0].actor.listen.remote()
        pending = {
            worker.actor.build.remote(self._code, self._names, rendezvous, *self._values): worker
            for worker in workers
        }
        return self._watch("construction", pending)

    def _watch(self, method: str, pending: dict[Any, WorkerHandle]) -> Future[None]:
        return self.supervisor.watch(
            Future(self.supervisor, self.role, method, pending, lambda values: None)
        )

    def restart(self, dead: list[WorkerHandle]) -> None:
        """Start new processes in place of dead ones, and construct their workers as the first time.

        Only for roles whose ranks have no process group of their own.

        Raises:
            WorkerError, RankDied: a new process failed.
            StuckError: one of them was not placed within PLACE_S, or not constructed in time.
        """
        self._restarts += 1
        self.supervisor.ranks.restarted(self.role)
        new = [restart_process(self.placement, self.role, w.rank, self._restarts) for w in dead]
        for worker in new:
            self.workers[worker.rank] = worker
        try:
            self._watch("start", {worker.info_ref: worker for worker in new}).result(PLACE_S)
        except RankDied as died:  # none of the new ones is constructed, so all are replaced again
            died.workers = list(dict.fromkeys([*died.workers, *new]))
            raise
        self.construction = self._construct(new)
        self.construction.result()

    def __len__(self) -> int:
        return len(self.workers)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Send a call to the ranks that its dispatch names, without waiting.

        Calls of one role run in the order of submission.
        """
        dispatch = dispatch_of(self.worker_class, method)
        ranks = len(self.workers)
        assemble: Callable[[list[Any]], Any] = list
        pieces: list[list[Any]] = [[] for _ in range(ranks)]
        if dispatch == "rank_zero":
            ranks = 1

            def assemble(values: list[Any]) -> Any:
                return values[0]

        elif dispatch == "split":
            if not args or not isinstance(args[0], DataProto):
                raise TypeError(
                    f"{self.role}.{method} splits the rows of its first argument, "
                    "which must be a DataProto"
                )
            data = args[0]
            args = args[1:]
            pieces = [[piece] for piece in _put_large(split_rows(data, ranks))]

            def assemble(values: list[Any]) -> Any:
                return join_rows(values, data)

        common = _put_large([*args, *kwargs.values()])
        called = " ".join((method, *kwargs))

        def send(rank: int) -> tuple[Any, WorkerHandle]:
            worker = self.workers[rank]
            return worker.actor.call.remote(called, *pieces[rank], *common), worker

        pending = dict(send(rank) for rank in range(ranks))
        sent = {worker.rank: worker for worker in pending.values()}
        return self.supervisor.watch(
            Future(self.supervisor, self.role, method, pending, assemble, send, sent)
        )


def _put_large(values: list[Any]) -> list[Any]:
    """Put large batches into the object store, in parallel; return other values unchanged."""
    import ray

    def is_large(value: Any) -> bool:
        return isinstance(value, DataProto) and value.nbytes > INLINE_BYTES

    large = [i for i, value in enumerate(values) if is_large(value)]
    if not large:
        return values
    with ThreadPoolExecutor(min(len(large), cores())) as pool:
        refs = dict(zip(large, pool.map(ray.put, [values[i] for i in large]), strict=True))
    return [refs.get(i, value) for i, value in enumerate(values)]


class _Method:
    """A method of all ranks."""

    def __init__(self, workers: WorkerGroup, name: str) -> None:
        self.group = workers
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.group.submit(self.name, *args, **kwargs).result()

    def __repr__(self) -> str:
        return f"<{self.group.role}.{self.name} of {len(self.group)} ranks>"


class _Proxy:
    """Proxy for the workers of a role. It has only the registered methods of their class."""

    def __init__(self, workers: WorkerGroup) -> None:
        object.__setattr__(self, "_group", workers)

    def __getattr__(self, name: str) -> _Method:
        workers = group(self)
        dispatch_of(workers.worker_class, name)
        return _Method(workers, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{name} cannot be set from the driver, because the workers are other processes"
        )

    def __repr__(self) -> str:
        workers = group(self)
        return f"<{workers.role}: {len(workers)} x {workers.worker_class.__name__}>"
