"""How each reader of the trainer's weights gets them: chosen from where both sit.

Readers are the rollout engines and, if the role `inference` is placed, its ranks. They are numbered
in this order.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

TRANSPORTS = ("shared_memory", "ipc", "collective", "files")

CPU_STREAM_BYTES = 4 << 20
"""Largest bucket of ipc on CPUs. Both buffers stay in the cache, and little memory is fresh,
which takes several times as long to write."""


@dataclass(frozen=True)
class WeightRoutes:
    """Attributes:
    transport: of each reader.
    nodes: node of each reader.
    devices: devices of each reader, in rank order.
    engines: number of readers that are rollout engines.
    writers: actor ranks that write their node's copy into shared memory.
    receivers: readers that receive their node's copy, in the order of their ranks in the group.
    publishers: {device: actor rank} for the devices of ipc engines.
    fallback: what takes their place if the trial of ipc fails that is made before the first sync.
        None: nothing is tried.
    """

    transport: tuple[str, ...]
    nodes: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    engines: int
    writers: tuple[int, ...]
    receivers: tuple[int, ...]
    publishers: dict[int, int]
    fallback: "WeightRoutes | None" = None

    @property
    def is_streaming(self) -> bool:
        """Whether readers take weights while the trainer publishes them."""
        return bool(self.receivers or self.publishers)

    def reader(self, role: str, rank: int) -> int:
        """Return the number of a rank of "rollout" or "inference"."""
        return rank + self.engines if role == "inference" else rank

    def uses(self, transport: str) -> bool:
        """Return whether any reader uses a transport."""
        return transport in self.transport

    def bucket_bytes(self, device: str, limit_mb: int) -> int:
        """Return the size of a bucket on a device, "cpu" or "cuda".

        limit_mb: rollout.sync_bucket_mb.
        """
        is_stream = device == "cpu" and set(self.transport) == {"ipc"}
        return min(limit_mb << 20, CPU_STREAM_BYTES) if is_stream else limit_mb << 20

    def __str__(self) -> str:
        text = _words(self.transport[: self.engines], "engines")
        inference = self.transport[self.engines :]
        text += f"; inference: {_words(inference, 'ranks')}" if inference else ""
        return f"{text}. If its trial fails: {self.fallback}" if self.fallback else text


def _words(transports: Sequence[str], readers: str) -> str:
    counts = {name: transports.count(name) for name in TRANSPORTS}
    used = [(name, count) for name, count in counts.items() if count]
    if len(used) == 1:
        return used[0][0]
    return ", ".join(f"{name} to {count}" for name, count in used) + f" {readers}"


def weight_routes(
    actor: Sequence[int],
    rollout: Sequence[int],
    per_engine: int,
    per_node: int,
    device: str,
    chosen: str,
    inference: Sequence[int] = (),
) -> WeightRoutes:
    """Choose the transport of each reader.

    Args:
        actor: devices of the actor's ranks.
        rollout: devices of the engines, `per_engine` consecutive ones each.
        per_node: devices of a node.
        device: "cpu" or "cuda".
        chosen: rollout.weight_transport. "auto": under Linux ipc for engines whose devices all
            have an actor rank, on GPUs with a fallback; shared_memory for others on nodes with an
            actor rank, collective on other nodes. `inference` never has ipc, which serves engines.
        inference: devices of the ranks of that role.
    """
    first_rank: dict[int, int] = {}
    for rank, place in enumerate(actor):
        first_rank.setdefault(place // per_node, rank)
    devices = [tuple(rollout[i : i + per_engine]) for i in range(0, len(rollout), per_engine)]
    engines = len(devices)
    devices += [(device,) for device in inference]
    nodes = [group[0] // per_node for group in devices]
    rank_on = {place: rank for rank, place in enumerate(actor)}

    def routes(transport: list[str]) -> WeightRoutes:
        first_reader: dict[int, int] = {}
        for reader, node in enumerate(nodes):
            if transport[reader] == "collective":
                first_reader.setdefault(node, reader)
        written = sorted({n for n, t in zip(nodes, transport, strict=True) if t == "shared_memory"})
        streamed = [d for g, t in zip(devices, transport, strict=True) if t == "ipc" for d in g]
        return WeightRoutes(
            tuple(transport),
            tuple(nodes),
            tuple(devices),
            engines,
            tuple(first_rank[node] for node in written if node in first_rank),
            tuple(first_reader.values()),
            {place: rank_on[place] for place in streamed if place in rank_on},
        )

    by_node = ["shared_memory" if node in first_rank else "collective" for node in nodes]
    if chosen == "ipc":
        return routes(["ipc"] * engines + by_node[engines:])
    if chosen != "auto":
        return routes([chosen] * len(devices))
    beside = [set(group) <= set(actor) and sys.platform == "linux" for group in devices[:engines]]
    streams = ["ipc" if is_beside else by_node[i] for i, is_beside in enumerate(beside)]
    found = routes(streams + by_node[engines:])
    is_tried = device == "cuda" and found.uses("ipc")
    return replace(found, fallback=routes(by_node)) if is_tried else found


def why_impossible(
    actor: Sequence[int],
    rollout: Sequence[int],
    per_engine: int,
    per_node: int,
    device: str,
    chosen: str,
    inference: Sequence[int] = (),
) -> str:
    """Return why readers cannot get their weights by the chosen transport; "" if they can."""
    actor_nodes = {d // per_node for d in actor}
    if chosen == "shared_memory":
        for readers, name in ((rollout, "engines"), (inference, "inference ranks")):
            alone = sorted({d // per_node for d in readers} - actor_nodes)
            if alone:
                return f"node {alone[0]} has {name} but no actor rank that could write its copy"
    if chosen == "ipc":
        alone = sorted(set(rollout) - set(actor))
        if alone:
            return f"device {alone[0]} has an engine but no actor rank"
    if chosen == "collective" and device == "cuda":
        routes = weight_routes(actor, rollout, per_engine, per_node, device, chosen, inference)
        shared = [r for r in routes.receivers if routes.devices[r][0] == actor[0]]
        if shared:
            return f"device {actor[0]} would be two ranks of one NCCL group"
    return ""
