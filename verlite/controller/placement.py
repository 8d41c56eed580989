"""Which role sits on which device, and holding those devices for the run.

A device is a GPU, or a CPU slot where there is none. Devices are numbered node by node, so that ranks are in the same order in
every run. Each is one bundle of a Ray placement group; the roles on a device share its bundle in equal fractions.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verlite.controller.cluster import Cluster
from verlite.controller.supervise import WorkerHandle

Kind = Literal["cpu", "cuda"]
RESOURCE = {"cpu": "CPU", "cuda": "GPU"}
CPUS_PER_GPU = 1.0
"""CPU slots taken beside each GPU, shared by its roles: small, since a missing CPU would hold up a free GPU."""


class ResourcesMissing(RuntimeError):
    """The cluster has not got what the run needs. The message is a table: needed, in total, free, by node."""


@dataclass(frozen=True)
class Slot:
    """A device. index: its number, which is also its bundle's. on_node: slots of this run on the same machine. gpu_id: None on CPU."""

    index: int
    node_id: str
    address: str
    on_node: int
    gpu_id: str | None = None


@dataclass(frozen=True)
class Placement:
    """Devices held for a run.

    roles: for each role, the devices of each of its ranks; all of one rank's devices are on one node. hosts: processes that were started
    for a role and wait for its workers.
    """

    cluster: Cluster
    kind: Kind
    slots: tuple[Slot, ...]
    roles: dict[str, tuple[tuple[int, ...], ...]]
    group: Any
    hosts: dict[str, list[WorkerHandle]] = field(default_factory=dict)

    def share(self, slot: int) -> float:
        """The fraction of a device that each worker on it takes, in Ray's units of 1/10000."""
        workers = sum(slot in devices for ranks in self.roles.values() for devices in ranks)
        return (10000 // max(1, workers)) / 10000


def reserve(
    cluster: Cluster,
    roles: Mapping[str, Sequence[int] | Sequence[Sequence[int]]],
    *,
    nodes: int = 1,
    devices_per_node: int,
    kind: Kind | Literal["auto"] = "auto",
    wait_s: float = 300.0,
) -> Placement:
    """Hold nodes x devices_per_node devices.

    roles: role to its ranks in order; a rank is a device number, or a list of them for a worker that uses several (of one node).
    kind: auto takes GPUs where the cluster has any. On a local cluster of CPU slots several `nodes` may be the same machine.
    wait_s: how long to wait for nodes to join or to get free; then ResourcesMissing. Raises ValueError for a role on a missing device.
    """
    ranks = {
        role: tuple((rank,) if isinstance(rank, int) else tuple(rank) for rank in wanted)
        for role, wanted in roles.items()
    }
    _check(ranks, nodes, devices_per_node)
    chosen_kind: Kind = ("cuda" if _totals("GPU") else "cpu") if kind == "auto" else kind
    if cluster.local and chosen_kind == "cpu":
        where, free_per_node = [_nodes()[0]] * nodes, nodes * devices_per_node
        if _nodes()[0]["Resources"].get("CPU", 0) < free_per_node:
            raise ResourcesMissing(_table(chosen_kind, nodes, devices_per_node))
    else:
        where = _wait_for_nodes(chosen_kind, nodes, devices_per_node, wait_s)
    group = _hold(where, chosen_kind, devices_per_node, wait_s)
    cluster.reserved.append(group)
    ids = (
        _gpu_ids(group, nodes * devices_per_node)
        if chosen_kind == "cuda" and _several(ranks)
        else None
    )
    count = {
        node["NodeID"]: devices_per_node * sum(node is other for other in where) for node in where
    }
    slots = tuple(
        Slot(
            i,
            node["NodeID"],
            node["NodeManagerAddress"],
            count[node["NodeID"]],
            ids[i] if ids else None,
        )
        for i, node in enumerate(node for node in where for _ in range(devices_per_node))
    )
    return Placement(cluster, chosen_kind, slots, ranks, group)


def _several(ranks: Mapping[str, tuple[tuple[int, ...], ...]]) -> bool:
    return any(len(devices) > 1 for role in ranks.values() for devices in role)


def _check(
    ranks: Mapping[str, tuple[tuple[int, ...], ...]], nodes: int, devices_per_node: int
) -> None:
    total = nodes * devices_per_node
    for role, devices_of_ranks in ranks.items():
        if not devices_of_ranks:
            raise ValueError(f"role {role} has no device")
        for rank, devices in enumerate(devices_of_ranks):
            outside = [device for device in devices if not 0 <= device < total]
            if outside or not devices:
                raise ValueError(
                    f"{role} rank {rank} is placed on devices {list(devices)}, but the run has only 0 to {total - 1}"
                )
            if len({device // devices_per_node for device in devices}) > 1:
                raise ValueError(
                    f"{role} rank {rank} is placed on devices {list(devices)}, which are on different nodes"
                )


def _nodes() -> list[dict[str, Any]]:
    """Living nodes, always in the same order."""
    import ray

    def order(node: dict[str, Any]) -> tuple[Any, ...]:
        address = node["NodeManagerAddress"]
        parts = address.split(".")
        return (
            tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (),
            address,
            node["NodeID"],
        )

    return sorted((node for node in ray.nodes() if node["Alive"]), key=order)


def _totals(resource: str) -> float:
    return sum(node["Resources"].get(resource, 0) for node in _nodes())


def _needs(kind: Kind, devices: int) -> dict[str, float]:
    return {"CPU": devices} if kind == "cpu" else {"GPU": devices, "CPU": CPUS_PER_GPU * devices}


def _free() -> dict[str, dict[str, float]]:
    from ray._private.state import available_resources_per_node

    return available_resources_per_node()


def _wait_for_nodes(kind: Kind, count: int, devices: int, wait_s: float) -> list[dict[str, Any]]:
    """The first `count` nodes that have enough free, waiting for them with a countdown on the terminal."""
    deadline = time.monotonic() + wait_s
    countdown = _Countdown()
    with countdown:
        while True:
            free, needs = _free(), _needs(kind, devices)
            ready = [
                node
                for node in _nodes()
                if all(
                    free.get(node["NodeID"], {}).get(name, 0) >= need
                    for name, need in needs.items()
                )
            ]
            if len(ready) >= count:
                return ready[:count]
            left = deadline - time.monotonic()
            if left <= 0:
                raise ResourcesMissing(_table(kind, count, devices))
            have = f"{len(ready)} of {count} nodes have {devices} free {RESOURCE[kind]}s"
            countdown.show(f"waiting for devices: {have}, giving up in {left:.0f} s")
            time.sleep(min(1.0, left))


class _Countdown:
    """One changing line on a terminal; elsewhere a line now and then."""

    def __enter__(self) -> "_Countdown":
        self._status: Any = None
        self._last = 0.0
        return self

    def show(self, text: str) -> None:
        if sys.stderr.isatty():
            from rich.console import Console

            if self._status is None:
                self._status = Console(stderr=True).status(text)
                self._status.start()
            self._status.update(text)
        elif time.monotonic() - self._last > 30:
            self._last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()


def _table(kind: Kind, count: int, devices: int) -> str:
    free, needs = _free(), _needs(kind, devices)
    names = list(needs)
    rows = [["node", *(f"{name} {what}" for name in names for what in ("needed", "total", "free"))]]
    nodes = _nodes()
    for node in nodes:
        row = [node["NodeManagerAddress"]]
        for name in names:
            row += [
                f"{needs[name]:g}",
                f"{node['Resources'].get(name, 0):g}",
                f"{free.get(node['NodeID'], {}).get(name, 0):g}",
            ]
        rows.append(row)
    rows += [
        [f"(node {i + 1}: has not joined)", *("-" for _ in rows[0][1:])]
        for i in range(len(nodes), count)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    what = ", ".join(f"{need:g} {name}" for name, need in needs.items())
    return (
        f"the run needs {count} node(s) with {what} each, and the cluster does not have them free:\n"
        + "\n".join(lines)
        + "\n"
        "  Lower trainer.nnodes or trainer.n_gpus_per_node, add nodes with `ray start --address=...`, or free what `ray status` shows."
    )


def _hold(where: Sequence[dict[str, Any]], kind: Kind, devices: int, wait_s: float) -> Any:
    """A placement group with one bundle per device, each on the node chosen for it."""
    import ray

    bundles = [_needs(kind, 1) for _ in where for _ in range(devices)]
    pins = [{"ray.io/node-id": node["NodeID"]} for node in where for _ in range(devices)]
    group = ray.util.placement_group(bundles, strategy="PACK", bundle_label_selector=pins)
    if not group.wait(timeout_seconds=max(10.0, wait_s)):
        ray.util.remove_placement_group(group)
        raise ResourcesMissing(_table(kind, len(where), devices))
    return group


def _gpu_ids(group: Any, count: int) -> list[str]:
    """The GPU behind each bundle, asked on the spot while the bundles are empty."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def here() -> str:
        return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])

    task = ray.remote(num_cpus=0, num_gpus=1)(here)
    strategies = [
        PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
        for i in range(count)
    ]
    return ray.get(
        [task.options(scheduling_strategy=strategy).remote() for strategy in strategies],
        timeout=300,
    )
