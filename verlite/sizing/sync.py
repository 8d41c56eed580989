"""The bytes that one weight sync moves, by transport."""

from dataclasses import dataclass

from verlite.config.plan import Plan
from verlite.sizing.facts import DTYPE_BYTES, ModelFacts
from verlite.sizing.words import amount, count, size


@dataclass(frozen=True)
class TransportUse:
    """The engines, or ranks of `inference`, that get their weights by one transport.

    transport: its name.
    readers: what they are, and their number in words.
    nodes: where their first devices are.
    per_device: bytes that each of their devices loads.
    """

    transport: str
    readers: str
    nodes: list[int]
    per_device: int


@dataclass(frozen=True)
class SyncBytes:
    """One weight sync.

    parameters: exported parameters. dtype: in which they are sent.
    whole: bytes of the exported weights.
    per_device: bytes that each device of an engine holds.
    uses: the transports.
    adapters: parameters that later syncs export alone (rollout.lora_sync=adapter); None: all.
    """

    parameters: int
    dtype: str
    whole: int
    per_device: int
    uses: list[TransportUse]
    adapters: int | None = None

    def lines(self) -> list[tuple[str, str]]:
        """Return the rows of a table."""
        parameters = amount(self.parameters)
        lines = [("weights", f"{parameters} parameters in {self.dtype} = {size(self.whole)}")]
        for use in self.uses:
            where = f"{use.readers} on {count(len(use.nodes), 'node')}"
            text = f"{where}; {self._way(use.transport)}; each device loads {size(use.per_device)}"
            lines.append((use.transport, text))
        if self.adapters is not None:
            alone = size(self.adapters * DTYPE_BYTES[self.dtype])
            lines.append(("later syncs", f"{amount(self.adapters)} adapter parameters = {alone}"))
        return lines

    def _way(self, transport: str) -> str:
        whole = size(self.whole)
        return {
            "shared_memory": f"a copy of {whole} in the memory of each node",
            "collective": f"{whole} over the network to each node, kept in its memory",
            "cuda_ipc": "bucket by bucket within each GPU, nothing in host memory",
            "files": f"{whole} written to the shared folder, read on each node",
        }[transport]

    def host_bytes(self, node: int) -> int:
        """Return the bytes of a node's memory that hold the weights while its engines load."""
        keeping = ("shared_memory", "collective")
        return self.whole * any(use.transport in keeping and node in use.nodes for use in self.uses)


def sync_bytes(plan: Plan, facts: ModelFacts) -> SyncBytes:
    """Return what one weight sync moves."""
    whole = facts.exported * DTYPE_BYTES[plan.sync_dtype]
    per_device = facts.exported * DTYPE_BYTES[plan.rollout_dtype] // plan.tensor_parallel
    routes = plan.weights
    groups = [("engine", slice(routes.engines), per_device)]
    if "inference" in plan.roles:
        shard = facts.trained * DTYPE_BYTES[plan.sync_dtype] // len(plan.placement["inference"])
        groups.append(("inference rank", slice(routes.engines, None), shard))
    uses = []
    for name, part, loaded in groups:
        nodes, transports = routes.nodes[part], routes.transport[part]
        for transport in dict.fromkeys(transports):
            of_it = [n for n, t in zip(nodes, transports, strict=True) if t == transport]
            readers = count(len(of_it), name)
            if plan.servers and name == "engine":
                readers = f"{count(len(plan.servers), 'server')} by one process"
            uses.append(TransportUse(transport, readers, sorted(set(of_it)), loaded))
    adapters = facts.trained if plan.syncs_adapters else None
    return SyncBytes(facts.exported, plan.sync_dtype, whole, per_device, uses, adapters)
