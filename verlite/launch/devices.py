"""`verlite cluster check N`: wait until the nodes of a cluster have N devices in all."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from verlite.controller import ray_internals, ray_node
from verlite.controller.head import answers
from verlite.controller.ray_internals import NodeView
from verlite.controller.ray_node import RANK_LABEL, RayNode
from verlite.launch import ClusterError
from verlite.launch.head import HeadSource, Say, WaitMessages, credentials, find_head

POLL_S = 2.0


@dataclass(frozen=True)
class ClusterDevices:
    """The devices of a cluster: its GPUs, or its CPU slots if no node has a GPU.

    Attributes:
        nodes: (rank, address, devices) in order of rank. The rank is -1 for a node that was not
            started by `verlite cluster start`.
    """

    kind: str
    nodes: list[tuple[int, str, int]]

    @property
    def total(self) -> int:
        return sum(devices for _, _, devices in self.nodes)


def count(nodes: Sequence[NodeView]) -> ClusterDevices:
    """Return the devices of these nodes."""
    kind = "GPU" if any(node.resources.get("GPU", 0) for node in nodes) else "CPU"
    rows = []
    for node in nodes:
        label = node.labels.get(RANK_LABEL, "")
        rank = int(label) if label.isdigit() else -1
        rows.append((rank, node.address, int(node.resources.get(kind, 0))))
    return ClusterDevices(kind, sorted(rows))


def check(needed: int, source: HeadSource, expected_nodes: int | None, say: Say) -> bool:
    """Wait up to source.wait_s for `needed` devices in all, and report.

    Args:
        source: see `view`.
        expected_nodes: None: derived from the devices of the nodes that have joined.

    Raises:
        ClusterError: the cluster refuses the token.
    """
    deadline = time.monotonic() + source.wait_s
    progress = WaitMessages(say)
    devices: ClusterDevices | None = None
    while True:
        before = devices
        try:
            devices = count(view(source))
            problem = ""
        except ConnectionError as error:
            problem = str(error)
        remaining = deadline - time.monotonic()
        if devices is not None and not problem:
            enough = devices.total >= needed
            if before is None or before.total != devices.total:
                say(_available(devices, needed))
            if enough:
                say(f"Success: Required GPU count ({needed}) is now available.")
                return True
        if remaining <= 0:
            waited = f"Gave up after {source.wait_s:.0f} s (--wait)."
            say(f"{waited} {problem}" if problem else waited)
            if devices is not None:
                say(report(devices, needed, expected_nodes))
            return False
        if problem:
            progress.show(f"waiting for the head: {problem}", remaining)
        time.sleep(min(POLL_S, remaining))


def view(source: HeadSource) -> list[NodeView]:
    """Return the living nodes of the cluster that `source` names.

    If this machine has joined that cluster, or if nothing was named, its record has the token.

    Raises:
        ConnectionError: the head does not answer.
        ClusterError: the cluster refuses the token.
    """
    node = ray_node.load()
    if node is None or not _is_named(node, source):
        return find_head(source)[2].nodes
    if not answers(node.address):
        raise ConnectionError(f"the head at {node.address} does not answer")
    try:
        token = ray_node.token_path().read_text(encoding="utf-8") if node.authenticated else None
        with credentials(token):
            return ray_internals.view(node.address).nodes
    except FileNotFoundError:
        raise ClusterError(f"{ray_node.token_path()}, the cluster's token, is gone") from None
    except PermissionError as error:
        raise ClusterError(f"the head at {node.address} refuses the token: {error}") from None


def _is_named(node: RayNode, source: HeadSource) -> bool:
    """Return whether the node of this machine belongs to the cluster that `source` names."""
    if not source.named:
        return True
    if source.head is not None:
        return source.head == node.address
    return str(source.shared) == node.shared


def report(devices: ClusterDevices, needed: int, expected_nodes: int | None) -> str:
    """Return a line per node that has joined, and the ranks that have not."""
    unit = "GPUs" if devices.kind == "GPU" else "CPU slots"
    lines = [
        f"  rank {rank if rank >= 0 else '?'}  {address}  {number} {unit}"
        for rank, address, number in devices.nodes
    ]
    joined = {rank for rank, _, _ in devices.nodes}
    sizes = {number for _, _, number in devices.nodes}
    why = ""
    if expected_nodes is None and len(sizes) == 1:
        size = sizes.pop()
        if size and needed % size == 0:
            expected_nodes = needed // size
            why = f" (for {needed} with {size} per node)"
    if expected_nodes is not None:
        missing = [str(rank) for rank in range(expected_nodes) if rank not in joined]
        if -1 in joined:  # nodes that `ray start` has started have no rank
            lines.append(f"  {len(devices.nodes)} of {expected_nodes} nodes have joined{why}")
        elif missing:
            lines.append(f"  not joined: rank {', '.join(missing)} of {expected_nodes} nodes{why}")
        else:
            lines.append(f"  all {expected_nodes} nodes have joined, with too few devices{why}")
    return "\n".join(lines)


def _available(devices: ClusterDevices, needed: int) -> str:
    note = "" if devices.kind == "GPU" else " [CPU slots: no node has a GPU]"
    return f"Available GPUs: {devices.total} (Required: {needed}){note}"
