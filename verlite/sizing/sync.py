"""The bytes that one weight sync moves, and by which transport."""

from dataclasses import dataclass

from verlite.config.plan import Plan
from verlite.sizing.facts import DTYPE_BYTES, ModelFacts
from verlite.sizing.placement import engines_on
from verlite.sizing.words import amount, size

SAME_HOST = "shared_memory"
OTHER_HOST = "from another host"


@dataclass(frozen=True)
class NodeSync:
    """What a weight sync brings to the engines of one node.

    node: number of the node.
    engines: engines whose first device is there.
    transport: how the weights reach them.
    host_bytes: copy of the weights in the node's memory while the engines load.
    """

    node: int
    engines: int
    transport: str
    host_bytes: int


@dataclass(frozen=True)
class SyncBytes:
    """One weight sync.

    parameters: exported parameters; dtype: that of the engines.
    whole: bytes of the exported weights.
    per_device: bytes that each device of an engine loads.
    nodes: those with engines.
    """

    parameters: int
    dtype: str
    whole: int
    per_device: int
    nodes: list[NodeSync]

    def lines(self) -> list[tuple[str, str]]:
        """Return the rows of a table."""
        count = amount(self.parameters)
        lines = [("weights", f"{count} parameters in {self.dtype} = {size(self.whole)}")]
        by_transport: dict[str, list[NodeSync]] = {}
        for node in self.nodes:
            by_transport.setdefault(node.transport, []).append(node)
        for transport, nodes in by_transport.items():
            engines = sum(node.engines for node in nodes)
            copies = f"{len(nodes)} x {size(nodes[0].host_bytes)} of host memory"
            lines.append(
                (
                    transport,
                    f"{_count(engines, 'engine')} on {_count(len(nodes), 'node')}; "
                    f"a copy on each node, {copies}; "
                    f"each device loads {size(self.per_device)}",
                )
            )
        return lines


def sync_bytes(plan: Plan, facts: ModelFacts) -> SyncBytes:
    """Return what one weight sync moves."""
    whole = facts.exported * DTYPE_BYTES[plan.rollout_dtype]
    actor_nodes = {device // plan.devices_per_node for device in plan.placement["actor"]}
    nodes = []
    for node in range(plan.nnodes):
        engines = engines_on(plan, node)
        if engines:
            transport = SAME_HOST if node in actor_nodes else OTHER_HOST
            nodes.append(NodeSync(node, len(engines), transport, whole))
    return SyncBytes(
        facts.exported, plan.rollout_dtype, whole, whole // plan.tensor_parallel, nodes
    )


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" + ("" if n == 1 else "s")
