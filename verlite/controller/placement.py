"""Assign the ranks of each role to devices, and reserve those devices for the run.

A device is a GPU, or a CPU slot on machines without GPUs. Devices are numbered node by node, so the
ranks have the same order in every run. Nodes with the label `verlite-node-rank` come first, in the
order of their ranks; the others follow by address. Each device is one bundle of a Ray placement
group. The workers on a device share its bundle in equal fractions.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verlite.controller import ray_internals
from verlite.controller.cluster import Cluster
from verlite.controller.node_watch import NodeWatch, Watched
from verlite.controller.ray_node import RANK_LABEL
from verlite.controller.worker_handle import WorkerHandle
from verlite.machine import torch_build
from verlite.terminal import Countdown

Kind = Literal["cpu", "cuda"]
Ranks = dict[str, tuple[tuple[int, ...], ...]]
"""For each role, the device numbers of each of its ranks."""
RESOURCE = {"cpu": "CPU", "cuda": "GPU"}
MAX_NODES_SHOWN = 4
"""Nodes in the line that says what a run waits for."""
CPUS_PER_GPU = 1.0
"""CPU slots reserved with each GPU and shared by its workers. It is small, because a missing CPU
slot would block a free GPU."""


class ResourcesMissing(RuntimeError):
    """The cluster does not have the devices that the run needs, or its torch cannot use them.

    The message is a table by node.
    """


@dataclass(frozen=True)
class Device:
    """A reserved device.

    Attributes:
        index: its number, and the index of its bundle.
        node: the node's name in messages.
        address: IP address of the node.
        devices_on_node: number of devices of this run on the same node.
        gpu_id: Ray's id, known only if a worker uses several GPUs; else None.
        env_vars: environment variables of the workers on the node.
        python: their Python interpreter. "": the cluster's.
    """

    index: int
    node_id: str
    node: str
    address: str
    devices_on_node: int
    gpu_id: str | None = None
    env_vars: Mapping[str, str] = field(default_factory=dict)
    python: str = ""


@dataclass(frozen=True)
class Placement:
    """The devices reserved for a run.

    Attributes:
        roles: for each role, the device numbers of each rank, all on one node.
        group: the Ray placement group.
        prestarted: processes of a role that wait for `spawn`.
    """

    cluster: Cluster
    kind: Kind
    devices: tuple[Device, ...]
    roles: Ranks
    group: Any
    prestarted: dict[str, list[WorkerHandle]] = field(default_factory=dict)

    def share(self, index: int) -> float:
        """Return the fraction of a device for each worker on it, in Ray's units of 1/10000."""
        workers = sum(index in devices for ranks in self.roles.values() for devices in ranks)
        return (10000 // max(1, workers)) / 10000


def reserve(
    cluster: Cluster,
    roles: Mapping[str, Sequence[int] | Sequence[Sequence[int]]],
    *,
    nodes: int = 1,
    devices_per_node: int,
    kind: Kind = "cpu",
    wait_s: float = 300.0,
    env_vars: Mapping[int, Mapping[str, str]] | None = None,
    python: Mapping[int, str] | None = None,
) -> Placement:
    """Reserve nodes x devices_per_node devices.

    Args:
        roles: for each role, its ranks in order. A rank is a device number, or a list of device
            numbers of one node for a worker that uses several devices.
        kind: GPUs or CPU slots. On a local cluster of CPU slots, several `nodes` may be the same
            machine.
        wait_s: how long to wait for nodes that join or become free, in seconds.
        env_vars: environment variables of the workers on some nodes, by node rank.
        python: Python interpreter of the workers on some nodes, by node rank.

    Raises:
        ValueError: a role is placed on a device that does not exist.
        ResourcesMissing: the devices were not free within wait_s, or a node of GPUs has a torch
            for CPUs.
    """
    ranks = _normalized(roles)
    _check(ranks, nodes, devices_per_node)
    if cluster.local and kind == "cpu":
        machine = _nodes()[0]
        if machine["Resources"].get("CPU", 0) < nodes * devices_per_node:
            raise ResourcesMissing(_table(kind, nodes, devices_per_node))
        chosen_nodes = [machine] * nodes
    else:
        chosen_nodes = _wait_for_nodes(kind, nodes, devices_per_node, wait_s)
        cluster.supervisor.node_watch = _watch(cluster, chosen_nodes)
    group = _placement_group(chosen_nodes, kind, devices_per_node, wait_s)
    cluster.reserved.append(group)
    gpu_ids: list[str] | None = None
    if kind == "cuda":
        if not cluster.local:  # on this machine a rule has checked it
            _check_torch(group, chosen_nodes, devices_per_node)
        if any(len(devices) > 1 for role in ranks.values() for devices in role):
            gpu_ids = _in_bundles(group, range(nodes * devices_per_node), _gpu_id)
    devices = _devices(chosen_nodes, devices_per_node, gpu_ids, env_vars or {}, python or {})
    return Placement(cluster, kind, devices, ranks, group)


def device_kind() -> Kind:
    """Return the kind of device that a run on the connected cluster uses: GPUs if it has any."""
    return "cuda" if any(node["Resources"].get("GPU", 0) for node in _nodes()) else "cpu"


def _normalized(roles: Mapping[str, Sequence[int] | Sequence[Sequence[int]]]) -> Ranks:
    """Return the roles with a tuple of devices for each rank."""
    ranks = {}
    for role, wanted in roles.items():
        ranks[role] = tuple((rank,) if isinstance(rank, int) else tuple(rank) for rank in wanted)
    return ranks


def _check(ranks: Ranks, nodes: int, devices_per_node: int) -> None:
    """Raise ValueError if a rank has no device, a missing device or devices of several nodes."""
    total = nodes * devices_per_node
    for role, devices_of_ranks in ranks.items():
        if not devices_of_ranks:
            raise ValueError(f"role {role} has no device")
        for rank, devices in enumerate(devices_of_ranks):
            placed = f"{role} rank {rank} is placed on devices {list(devices)}"
            if not devices or any(not 0 <= device < total for device in devices):
                raise ValueError(f"{placed}, but the run has only 0 to {total - 1}")
            if len({device // devices_per_node for device in devices}) > 1:
                raise ValueError(f"{placed}, which are on different nodes")


def _devices(
    chosen_nodes: Sequence[dict[str, Any]],
    devices_per_node: int,
    gpu_ids: list[str] | None,
    env_vars: Mapping[int, Mapping[str, str]],
    python: Mapping[int, str],
) -> tuple[Device, ...]:
    """Return the devices in order. On a local CPU cluster all nodes may be one machine."""
    node_ids = [node["NodeID"] for node in chosen_nodes]
    devices: list[Device] = []
    for rank, node in enumerate(chosen_nodes):
        on_node = devices_per_node * node_ids.count(node["NodeID"])
        for _ in range(devices_per_node):
            index = len(devices)
            gpu_id = gpu_ids[index] if gpu_ids else None
            devices.append(
                Device(
                    index,
                    node["NodeID"],
                    _name(node),
                    node["NodeManagerAddress"],
                    on_node,
                    gpu_id,
                    env_vars.get(rank, {}),
                    python.get(rank, ""),
                )
            )
    return tuple(devices)


def _nodes() -> list[dict[str, Any]]:
    """Return the living nodes, always in the same order."""
    import ray

    def order(node: dict[str, Any]) -> tuple[Any, ...]:
        rank = node.get("Labels", {}).get(RANK_LABEL, "")
        is_labelled = rank.isdecimal()
        address = node["NodeManagerAddress"]
        parts = address.split(".")
        is_ipv4 = all(part.isdigit() for part in parts)
        numbers = tuple(int(part) for part in parts) if is_ipv4 else ()
        place = int(rank) if is_labelled else 0
        return not is_labelled, place, numbers, address, node["NodeID"]

    untyped_ray: Any = ray
    return sorted((node for node in untyped_ray.nodes() if node["Alive"]), key=order)


def _name(node: Mapping[str, Any]) -> str:
    """Return a node's address, with its rank if `verlite cluster start` has started it."""
    rank = node.get("Labels", {}).get(RANK_LABEL)
    address: str = node["NodeManagerAddress"]
    return f"{address} (rank {rank})" if rank else address


def _watch(cluster: Cluster, chosen_nodes: Sequence[Mapping[str, Any]]) -> NodeWatch:
    """Watch the nodes of the run and the head of the cluster."""
    watched = {
        node["NodeID"]: Watched(
            f"node {_name(node)}",
            (node["NodeManagerAddress"], node["NodeManagerPort"]),
            node["NodeID"],
        )
        for node in chosen_nodes
    }
    host, _, port = cluster.address.rpartition(":")
    head = Watched(
        f"the head of the cluster at {cluster.address}", (host.strip("[]"), int(port)), None
    )
    return NodeWatch([*watched.values(), head])


def _needs(kind: Kind, devices: int) -> dict[str, float]:
    """Return {resource: amount} for a number of devices."""
    if kind == "cpu":
        return {"CPU": devices}
    return {"GPU": devices, "CPU": CPUS_PER_GPU * devices}


def _wait_for_nodes(kind: Kind, count: int, devices: int, wait_s: float) -> list[dict[str, Any]]:
    """Return the first `count` nodes with enough free resources.

    Shows a countdown on the terminal while it waits.

    Raises:
        ResourcesMissing: after wait_s.
    """
    deadline = time.monotonic() + wait_s
    needs = _needs(kind, devices)
    with Countdown() as countdown:
        while True:
            free = ray_internals.free_resources()
            ready = [node for node in _nodes() if _has(free.get(node["NodeID"], {}), needs)]
            if len(ready) >= count:
                return ready[:count]
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ResourcesMissing(_table(kind, count, devices))
            have = f"{len(ready)} of {count} nodes have {devices} free {RESOURCE[kind]}s"
            lacking = _lacking(free, needs, count)
            countdown.show(
                f"waiting for devices: {have} ({lacking}), giving up in {remaining:.0f} s"
            )
            time.sleep(min(1.0, remaining))


def _lacking(
    free: Mapping[str, Mapping[str, float]], needs: Mapping[str, float], count: int
) -> str:
    """Return which nodes lack what, and how many have not joined."""
    nodes = _nodes()
    parts = []
    for node in nodes:
        has = free.get(node["NodeID"], {})
        if not _has(has, needs):
            amounts = ", ".join(
                f"{has.get(name, 0):g} of {need:g} {name}" for name, need in needs.items()
            )
            parts.append(f"{_name(node)} has {amounts}")
    if len(nodes) < count:
        parts.append(f"{count - len(nodes)} not joined")
    shown = parts[:MAX_NODES_SHOWN]
    if len(parts) > len(shown):
        shown.append(f"and {len(parts) - len(shown)} more")
    return "; ".join(shown)


def _has(free: Mapping[str, float], needs: Mapping[str, float]) -> bool:
    return all(free.get(name, 0) >= need for name, need in needs.items())


def _table(kind: Kind, count: int, devices: int) -> str:
    """Return the text of ResourcesMissing: needed, total and free resources of each node."""
    free = ray_internals.free_resources()
    needs = _needs(kind, devices)
    header = ["node"]
    for name in needs:
        header += [f"{name} needed", f"{name} total", f"{name} free"]
    rows = [header]
    nodes = _nodes()
    for node in nodes:
        row = [node["NodeManagerAddress"]]
        for name, need in needs.items():
            total = node["Resources"].get(name, 0)
            unused = free.get(node["NodeID"], {}).get(name, 0)
            row += [f"{need:g}", f"{total:g}", f"{unused:g}"]
        rows.append(row)
    for number in range(len(nodes), count):
        rows.append([f"(node {number + 1}: has not joined)", *("-" for _ in header[1:])])
    what = ", ".join(f"{need:g} {name}" for name, need in needs.items())
    return (
        f"the run needs {count} node(s) with {what} each, and the cluster does not have them "
        f"free:\n"
        f"{_aligned(rows)}\n"
        "  Lower trainer.nnodes or trainer.n_gpus_per_node, add nodes with "
        "`ray start --address=...`, or free what `ray status` shows."
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as indented lines with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _placement_group(
    chosen_nodes: Sequence[dict[str, Any]], kind: Kind, devices: int, wait_s: float
) -> Any:
    """Create a placement group with one bundle per device, each on its chosen node.

    Raises:
        ResourcesMissing: Ray could not create it in time.
    """
    import ray

    bundles = []
    selectors = []
    for node in chosen_nodes:
        bundles += [_needs(kind, 1)] * devices
        selectors += [{"ray.io/node-id": node["NodeID"]}] * devices
    group = ray.util.placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
    if not group.wait(timeout_seconds=max(10.0, wait_s)):
        ray.util.remove_placement_group(group)
        raise ResourcesMissing(_table(kind, len(chosen_nodes), devices))
    return group


def _check_torch(group: Any, chosen_nodes: Sequence[dict[str, Any]], devices_per_node: int) -> None:
    """Ask one task on each node, because its environment may differ from the driver's.

    A node where verlite cannot be imported is left to the workers' start, which reports it.

    Raises:
        ResourcesMissing: torch supports only CPUs there.
    """
    import ray

    first_bundles = range(0, len(chosen_nodes) * devices_per_node, devices_per_node)
    try:
        builds = _in_bundles(group, first_bundles, torch_build)
    except ray.exceptions.RayTaskError:
        return
    wrong = [
        f"  {node['NodeManagerAddress']}: {build or 'not installed'}"
        for node, build in zip(chosen_nodes, builds, strict=True)
        if build not in ("cuda", "rocm")
    ]
    if wrong:
        raise ResourcesMissing(
            "the run was given GPUs, but torch cannot use them on these nodes (node: build of "
            "torch):\n" + "\n".join(wrong) + "\n"
            "  Install a build of torch for CUDA or ROCm there, or set trainer.device=cpu."
        )


def _gpu_id() -> str:
    return ray_internals.assigned_gpus()[0]


def _in_bundles(group: Any, bundles: Iterable[int], function: Callable[[], str]) -> list[str]:
    """Run a function once in each of these bundles, which are still empty; return its results."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    task = ray.remote(num_cpus=0, num_gpus=1)(function)
    refs = []
    for index in bundles:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        refs.append(task.options(scheduling_strategy=strategy).remote())
    results: list[str] = ray.get(refs, timeout=300)
    return results
