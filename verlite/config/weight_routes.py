"""How each rollout engine gets the trainer's weights: chosen from where both sit."""

from collections.abc import Sequence
from dataclasses import dataclass

TRANSPORTS = ("shared_memory", "cuda_ipc", "collective", "files")


@dataclass(frozen=True)
class WeightRoutes:
    """Attributes:
    transport: of each engine.
    nodes: node of each engine.
    devices: devices of each engine, in rank order.
    writers: actor ranks that write their node's copy into shared memory.
    receivers: engines that receive their node's copy, in the order of their ranks in the group.
    publishers: {device: actor rank} for the devices of cuda_ipc engines.
    """

    transport: tuple[str, ...]
    nodes: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    writers: tuple[int, ...]
    receivers: tuple[int, ...]
    publishers: dict[int, int]

    @property
    def is_streaming(self) -> bool:
        """Whether engines take weights while the trainer publishes them."""
        return bool(self.receivers or self.publishers)

    def uses(self, transport: str) -> bool:
        """Return whether any engine uses a transport."""
        return transport in self.transport

    def __str__(self) -> str:
        counts = {name: self.transport.count(name) for name in TRANSPORTS}
        used = [(name, count) for name, count in counts.items() if count]
        if len(used) == 1:
            return used[0][0]
        return ", ".join(f"{name} to {count}" for name, count in used) + " engines"


def weight_routes(
    actor: Sequence[int], rollout: Sequence[int], per_engine: int, per_node: int, chosen: str
) -> WeightRoutes:
    """Choose the transport of each engine.

    Args:
        actor: devices of the actor's ranks.
        rollout: devices of the engines, `per_engine` consecutive ones each.
        per_node: devices of a node.
        chosen: rollout.weight_transport. "auto": shared_memory on nodes with an actor rank,
            collective on others.
    """
    first_rank: dict[int, int] = {}
    for rank, device in enumerate(actor):
        first_rank.setdefault(device // per_node, rank)
    devices = [tuple(rollout[i : i + per_engine]) for i in range(0, len(rollout), per_engine)]
    nodes = [group[0] // per_node for group in devices]
    automatic = ["shared_memory" if node in first_rank else "collective" for node in nodes]
    transport = automatic if chosen == "auto" else [chosen] * len(devices)
    first_engine: dict[int, int] = {}
    for engine, node in enumerate(nodes):
        if transport[engine] == "collective":
            first_engine.setdefault(node, engine)
    written = sorted({n for n, t in zip(nodes, transport, strict=True) if t == "shared_memory"})
    streamed = [d for g, t in zip(devices, transport, strict=True) if t == "cuda_ipc" for d in g]
    rank_on = {device: rank for rank, device in enumerate(actor)}
    return WeightRoutes(
        tuple(transport),
        tuple(nodes),
        tuple(devices),
        tuple(first_rank[node] for node in written if node in first_rank),
        tuple(first_engine.values()),
        {device: rank_on[device] for device in streamed if device in rank_on},
    )


def why_impossible(
    actor: Sequence[int],
    rollout: Sequence[int],
    per_engine: int,
    per_node: int,
    device: str,
    chosen: str,
) -> str:
    """Return why engines cannot get their weights by the chosen transport; "" if they can."""
    actor_nodes = {d // per_node for d in actor}
    if chosen == "shared_memory":
        alone = sorted({d // per_node for d in rollout} - actor_nodes)
        if alone:
            return f"node {alone[0]} has engines but no actor rank that could write its copy"
    if chosen == "cuda_ipc":
        alone = sorted(set(rollout) - set(actor))
        if alone:
            return f"device {alone[0]} has an engine but no actor rank"
    if chosen == "collective" and device == "cuda":
        routes = weight_routes(actor, rollout, per_engine, per_node, chosen)
        shared = [e for e in routes.receivers if routes.devices[e][0] == actor[0]]
        if shared:
            return f"device {actor[0]} would be two ranks of one NCCL group"
    return ""
