"""The memory of a run as tables."""

from typing import TYPE_CHECKING

from verlite.config.placement import ranges
from verlite.config.plan import Plan
from verlite.sizing.devices import Devices
from verlite.sizing.memory import (
    ASLEEP,
    FRAGMENTS,
    PROCESS,
    DeviceGroup,
    Memory,
)
from verlite.sizing.words import GIB, facts_table, grid, size

if TYPE_CHECKING:
    from rich.table import Table


def engines_table(plan: Plan, memory: Memory) -> "Table":
    """Return what each training engine holds and needs."""
    rows = [
        (
            name,
            str(len(plan.placement[name])),
            size(one.parameters),
            size(one.optimizer),
            size(one.forward) if one.forward else "-",
            size(one.update) if one.update else "-",
        )
        for name, one in memory.roles.items()
    ]
    head = ("engine", "ranks", "parameters", "Adam", "forward peak", "update peak")
    return grid("training engines, bytes on each device", head, rows, 1)


def group_table(group: DeviceGroup, devices: Devices) -> "Table":
    """Return the phases of one group of devices, in GiB, or in MiB for small models."""
    limit = devices.bytes if devices.kind == "cuda" else None
    largest = max(max(phase.held.values(), default=0) for phase in group.phases)
    name, unit = ("GiB", GIB) if largest >= GIB // 2 else ("MiB", 2**20)

    def shown(number: int) -> str:
        return f"{number / unit:,.1f}" if number else "-"

    rows = []
    for phase in group.phases:
        cells = [shown(phase.held.get(role, 0)) for role in group.roles]
        row = [phase.name, *cells, shown(phase.margin), shown(phase.total)]
        if limit is not None:
            free = limit - phase.total
            row.append(f"{shown(free)} free" if free >= 0 else f"{shown(-free)} OVER")
        rows.append(row)
    head = [name, *group.roles, "margin", "total"]
    if limit is not None:
        head.append(f"of {limit / unit:,.1f}")
    return grid(f"memory of devices {ranges(group.devices)}, by phase", head, rows, 1)


def host_table(memory: Memory) -> "Table":
    """Return the memory of the fullest node."""
    rows = []
    for phase in memory.host:
        parts = ", ".join(f"{name} {size(held)}" for name, held in phase.held.items())
        rows.append((phase.name, f"{size(phase.total)}: {parts}"))
    return facts_table("host memory of the fullest node", rows)


def margin_sentence(plan: Plan) -> str:
    """Return what is assumed beyond the tensors."""
    if plan.device == "cpu":
        return f"margin: {FRAGMENTS:.0%} of the tensors' bytes."
    return (
        f"margin, assumed, not measured: {PROCESS / GIB:.1f} GiB for each training process (CUDA "
        f"context, NCCL and cuBLAS buffers), {ASLEEP / GIB:.1f} GiB for an engine that sleeps, "
        f"and {FRAGMENTS:.0%} of the training engines' bytes (fragmentation)."
    )
