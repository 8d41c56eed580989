"""The driver's handle of one worker, and functions that reach workers' processes on any node."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from verlite.controller import node
from verlite.controller.records import ProcessInfo

T = TypeVar("T")

NODE_TIMEOUT_S = 10.0
"""Longest wait for an answer from another node."""


@dataclass(eq=False)
class WorkerHandle:
    """One worker as the driver sees it.

    Attributes:
        actor: Ray's handle of the WorkerActor.
        node: the node's name in messages.
        info_ref: Ray reference to the worker's ProcessInfo.
        heartbeat: name of the process in heartbeats; "" without them.
    """

    actor: Any
    role: str
    rank: int
    node_id: str
    node: str
    log: str
    info_ref: Any
    heartbeat: str = ""

    @property
    def name(self) -> str:
        """Role and rank, for messages."""
        return f"{self.role} rank {self.rank}"

    @property
    def pid(self) -> str:
        """Process id, for messages."""
        info = process_infos([self])[0]
        return str(info.process.pid) if info else "unknown (it never started)"


def process_infos(workers: Sequence[WorkerHandle]) -> list[ProcessInfo | None]:
    """Return each worker's process, None for a worker that never started."""
    import ray

    if not workers:
        return []
    refs = [worker.info_ref for worker in workers]
    ready = set(ray.wait(refs, num_returns=len(refs), timeout=1.0)[0])
    found: list[ProcessInfo | None] = []
    for ref in refs:
        try:
            found.append(ray.get(ref) if ref in ready else None)
        except ray.exceptions.RayError:
            found.append(None)
    return found


def kill_processes(workers: Sequence[WorkerHandle]) -> None:
    """Kill the processes of the workers on any node, and those that they have left; see `node`."""
    by_node: dict[str, list[node.Process]] = {}
    for worker, info in zip(workers, process_infos(workers), strict=True):
        if info is not None:
            by_node.setdefault(worker.node_id, []).append(info.process)
    on_nodes(node.kill, {node_id: (processes,) for node_id, processes in by_node.items()})


def diagnose(workers: Sequence[WorkerHandle]) -> list[node.Diagnosis | None]:
    """Return each worker's diagnosis, None where the node does not answer."""
    by_node: dict[str, list[tuple[str, node.Process | None]]] = {}
    places = []
    for worker, info in zip(workers, process_infos(workers), strict=True):
        on_same_node = by_node.setdefault(worker.node_id, [])
        places.append((worker.node_id, len(on_same_node)))
        on_same_node.append((worker.log, info.process if info else None))
    arguments = {node_id: (processes,) for node_id, processes in by_node.items()}
    found = on_nodes(node.diagnose, arguments)
    return [found[node_id][i] if node_id in found else None for node_id, i in places]


def on_nodes(
    function: Callable[..., T],
    arguments: Mapping[str, tuple[Any, ...]],
    timeout_s: float = NODE_TIMEOUT_S,
) -> dict[str, T]:
    """Run a function of `node` on several nodes in parallel.

    Args:
        arguments: {node id: the function's arguments there}.

    Returns:
        {node id: result}, without the nodes that do not answer within timeout_s.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this_node = ray.get_runtime_context().get_node_id()
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    refs = {}
    for node_id, values in arguments.items():
        if node_id != this_node:
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            refs[task.options(scheduling_strategy=strategy).remote(*values)] = node_id
    results = {}
    if this_node in arguments:
        results[this_node] = function(*arguments[this_node])
    if not refs:
        return results
    for ref in ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)[0]:
        try:
            results[refs[ref]] = ray.get(ref)
        except ray.exceptions.RayError:
            continue
    return results
