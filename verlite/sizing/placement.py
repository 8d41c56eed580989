"""Which role runs on which device of which node, as a table."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verlite.config.placement import ranges
from verlite.config.plan import Plan
from verlite.sizing.words import grid

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_COLUMNS = 16
"""Nodes with more devices are shown as ranges of devices."""


@dataclass(frozen=True)
class NodeRoles:
    """What runs on one node.

    cells: role -> for each device of the node the rank of its process; for rollout the engine.
    None where the role has no process.
    """

    node: int
    cells: dict[str, list[str | None]]


def node_roles(plan: Plan) -> list[NodeRoles]:
    """Return the roles of each node, in the order of the plan's roles."""
    width = plan.devices_per_node
    nodes = []
    for node in range(plan.nnodes):
        cells = {}
        for role in plan.device_roles:
            rank_of = {device: rank for rank, device in enumerate(plan.placement[role])}
            ranks = [rank_of.get(node * width + device) for device in range(width)]
            if any(rank is not None for rank in ranks):
                cells[role] = [None if r is None else _process(plan, role, r) for r in ranks]
        nodes.append(NodeRoles(node, cells))
    return nodes


def placement_table(plan: Plan) -> "Table":
    """Return the table. A row is one role on one node, a column one device of the node. Cells are
    ranks, or for rollout engines."""
    width = plan.devices_per_node
    title = "placement"
    nodes = node_roles(plan)
    if width > SHOWN_COLUMNS:
        rows = [
            (str(node.node), role, _used(cells), _span(cells))
            for node in nodes
            for role, cells in node.cells.items()
        ]
        return grid(title, ("node", "role", "devices of the node", "processes"), rows, 4)
    named: list[tuple[str, ...]] = []
    for node in nodes:
        for role, cells in node.cells.items() or {"nothing": [None] * width}.items():
            first = str(node.node) if role == next(iter(node.cells), role) else ""
            named.append((first, role, *(cell or "-" for cell in cells)))
    return grid(title, ("node", "role", *map(str, range(width))), named, 2)


def _process(plan: Plan, role: str, rank: int) -> str:
    return f"e{rank // plan.tensor_parallel}" if role == "rollout" else str(rank)


def _used(cells: list[str | None]) -> str:
    return ranges(device for device, cell in enumerate(cells) if cell is not None)


def _span(cells: list[str | None]) -> str:
    used = [cell for cell in cells if cell is not None]
    return used[0] if used[0] == used[-1] else f"{used[0]} to {used[-1]}"
