"""Starting the workers of a role, and calling them as if they were one object of their class."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, cast

from verlite.controller.dispatch import dispatch_of, join_rows, split_rows
from verlite.controller.hosts import start_hosts
from verlite.controller.placement import Placement
from verlite.controller.supervise import Future, presences
from verlite.protocol.data import DataProto

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")

INLINE_BYTES = 64 << 10
"""Smaller batches travel inside the call; larger ones are put into the object store first."""


def spawn(
    worker: Callable[P, W], placement: Placement, role: str, /, *args: P.args, **kwargs: P.kwargs
) -> W:
    """Start one `worker` on each of the role's places, all constructed with the same arguments.

    The result has the static type of the worker class; what it really is calls all ranks: `actor.update(batch)` divides, runs, collects
    and blocks. It returns at once: construction goes on meanwhile, and its failure is the failure of the next call. Use `ready` to wait.
    """
    return cast(W, _Proxy(WorkerGroup(cast(type, worker), placement, role, args, kwargs)))


def submit(method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call without blocking: submit(actor.update, batch).result(). Calls of one role run in the order they were made."""
    if not isinstance(method, _Method):
        raise TypeError(f"submit needs a method of a spawned worker, got {method!r}")
    return method.group.submit(method.name, *args, **kwargs)


def group(worker: object) -> "WorkerGroup":
    """The group behind what spawn returned."""
    if not isinstance(worker, _Proxy):
        raise TypeError(f"not a spawned worker: {worker!r}")
    return object.__getattribute__(worker, "_group")


def ready(*workers: object, timeout_s: float | None = None) -> None:
    """Wait until all ranks of these roles are constructed. Raises WorkerError with the first cause."""
    for worker in workers:
        group(worker).started.result(timeout_s)


class WorkerGroup:
    """The ranks of one role. members: what is known of each; started: completes when all are constructed."""

    def __init__(
        self,
        worker_class: type,
        placement: Placement,
        role: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        import ray

        self.worker_class, self.placement, self.role = worker_class, placement, role
        self.cluster = placement.cluster
        self.supervisor = self.cluster.supervisor
        self.members = placement.hosts.pop(role, None) or start_hosts(placement, role)
        rendezvous = self.members[0].handle.listen.remote()
        code, names = ray.put(ray.cloudpickle.dumps(worker_class)), list(kwargs)
        values = [ray.put(value) for value in (*args, *kwargs.values())]
        refs = {
            member.handle.build.remote(code, names, rendezvous, *values): member
            for member in self.members
        }
        self.started: Future[None] = self.supervisor.watch(
            Future(self.supervisor, role, "construction", refs, lambda values: None)
        )

    def __len__(self) -> int:
        return len(self.members)

    @property
    def pids(self) -> list[int | None]:
        """Process id of each rank, None where it never started."""
        return [known.process.pid if known else None for known in presences(self.members)]

    @property
    def node_ids(self) -> list[str]:
        """Ray's node id of each rank."""
        return [member.node_id for member in self.members]

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Send a call to the ranks its dispatch names."""
        dispatch = dispatch_of(self.worker_class, method)
        members = self.members[:1] if dispatch == "rank_zero" else self.members
        assemble: Callable[[list[Any]], Any] = self._collected
        shards: list[Any] | None = None
        if dispatch == "rank_zero":
            assemble = lambda values: self._collected(values)[0]  # noqa: E731
        elif dispatch == "split":
            if not args or not isinstance(args[0], DataProto):
                raise TypeError(
                    f"{self.role}.{method} divides the rows of its first argument, which must be a DataProto"
                )
            data, args = args[0], args[1:]
            shards = self._put(split_rows(data, len(members)))
            assemble = lambda values: join_rows(self._collected(values), data)  # noqa: E731
        common = self._put([*args, *kwargs.values()], copies=len(members))
        refs = {}
        for i, member in enumerate(members):
            own = [] if shards is None else [shards[i]]
            refs[member.handle.call.remote(method, list(kwargs), *own, *common)] = member
        return self.supervisor.watch(Future(self.supervisor, self.role, method, refs, assemble))

    def _put(self, values: list[Any], copies: int = 1) -> list[Any]:
        """Large batches into the object store, in parallel; everything else stays as it is."""
        import ray

        sizes = [value.nbytes if isinstance(value, DataProto) else 0 for value in values]
        large = [i for i, size in enumerate(sizes) if size > INLINE_BYTES]
        self.cluster.sent_bytes += sum(
            size if size > INLINE_BYTES else copies * size for size in sizes
        )
        with ThreadPoolExecutor(max(1, min(len(large), os.cpu_count() or 1))) as pool:
            stored = dict(zip(large, pool.map(ray.put, [values[i] for i in large]), strict=True))
        return [stored.get(i, value) for i, value in enumerate(values)]

    def _collected(self, values: list[Any]) -> list[Any]:
        self.cluster.received_bytes += sum(
            value.nbytes for value in values if isinstance(value, DataProto)
        )
        return values


class _Method:
    """A method of all ranks."""

    def __init__(self, of: WorkerGroup, name: str) -> None:
        self.group, self.name = of, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.group.submit(self.name, *args, **kwargs).result()

    def __repr__(self) -> str:
        return f"<{self.group.role}.{self.name} of {len(self.group)} ranks>"


class _Proxy:
    """Stands for the workers of a role; has the registered methods of their class and nothing else."""

    def __init__(self, of: WorkerGroup) -> None:
        object.__setattr__(self, "_group", of)

    def __getattr__(self, name: str) -> _Method:
        of = object.__getattribute__(self, "_group")
        dispatch_of(of.worker_class, name)
        return _Method(of, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"workers are other processes: {name} cannot be set from here")

    def __repr__(self) -> str:
        of = object.__getattribute__(self, "_group")
        return f"<{of.role}: {len(of)} x {of.worker_class.__name__}>"
