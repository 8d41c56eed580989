"""The tables of `verlite plan`: placement, models, and memory."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verlite.config.compile import model_spec, teacher_model_spec
from verlite.config.placement import ranges
from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.sizing.devices import Devices
from verlite.sizing.facts import ModelFacts, model_facts
from verlite.sizing.memory import (
    ASLEEP,
    CONTEXT,
    FRAGMENTS,
    GRAPHS,
    PROCESS,
    DeviceGroup,
    Memory,
)
from verlite.terminal import GIB, amount, facts_table, flops, grid, size

if TYPE_CHECKING:
    from rich.table import Table


# Which role runs on which device of which node, as a table

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


# The models of a run in words: parameters, multiplications of a step, KV cache


@dataclass(frozen=True)
class RunModels:
    """The policy and, where the run computes them, critic and teacher."""

    policy: ModelFacts
    critic: ModelFacts | None
    teacher: ModelFacts | None = None


def run_models(config: Config, plan: Plan) -> RunModels:
    """Count the models of a run.

    Raises:
        ModelError: a model has no usable config.json.
    """
    policy, critic, teacher = config.actor_rollout_ref.model, None, None
    if plan.critic:
        critic = model_facts(model_spec(config.critic.model, path=plan.critic_model_path), "value")
    if plan.teacher:
        teacher = model_facts(teacher_model_spec(config))
    return RunModels(model_facts(model_spec(policy)), critic, teacher)


def model_table(config: Config, plan: Plan, models: RunModels) -> "Table":
    """Return the table."""
    rows = [("policy", _model(models.policy))]
    if models.critic is not None:
        rows.append(("critic", _model(models.critic)))
    if models.teacher is not None:
        rows.append(("teacher", _model(models.teacher)))
    length = plan.longest_sequence
    policy = models.policy
    recomputes = config.actor_rollout_ref.model.enable_gradient_checkpointing
    forward = flops(policy.forward_flops(length))
    update = flops(policy.update_flops(length, recomputes))
    rows.append(("one token", f"forward {forward}, update {update}, in samples of {length} tokens"))
    passes = step_flops(config, plan, models)
    parts = ", ".join(f"{name} {flops(number)}" for name, number in passes.items())
    total = flops(sum(passes.values()))
    rows.append(("one step", f"at most {total} ({parts}), if every sample is that long"))
    dtype = plan.rollout_dtype
    per_token = policy.kv_bytes(dtype)
    sample = size(per_token * plan.max_model_len)
    rows.append(
        (
            "KV cache",
            f"{size(per_token)} per token in {dtype}; {sample} for a sample of "
            f"{plan.max_model_len} tokens",
        )
    )
    return facts_table("model, counted from config.json", rows)


def step_flops(
    config: Config, plan: Plan, models: RunModels, length: int | None = None
) -> dict[str, int]:
    """Return the floating-point operations of each part of a step. Generation is one forward pass
    per token.

    length: of all its samples, in tokens. None: the longest.
    """
    length = length or plan.longest_sequence
    tokens = plan.batch_size * length
    forward = tokens * models.policy.forward_flops(length)
    recomputes = config.actor_rollout_ref.model.enable_gradient_checkpointing
    update = tokens * models.policy.update_flops(length, recomputes)
    parts = {"generation": forward}
    if plan.needs_old_log_probs:
        parts["old log-probs"] = forward
    if plan.needs_reference and not plan.reference_urls:
        parts["reference"] = forward
    if models.teacher is not None:
        parts["teacher"] = tokens * models.teacher.forward_flops(length)
    if plan.critic is not None and models.critic is not None:
        recomputes = config.critic.model.enable_gradient_checkpointing
        critic_update = models.critic.update_flops(length, recomputes)
        parts["values"] = tokens * models.critic.forward_flops(length)
        parts["critic"] = tokens * plan.critic.epochs * critic_update
    return parts | {"actor": update * plan.actor.epochs}


def _model(facts: ModelFacts) -> str:
    kinds = ", ".join(f"{kind} {amount(count)}" for kind, count in facts.kinds.items())
    text = f"{facts.architecture}, {facts.layers} layers, {amount(facts.parameters)} parameters"
    if facts.trained != facts.parameters:
        text += f", {amount(facts.trained)} trained"
    return f"{text}: {kinds}"


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
        f"context, NCCL and cuBLAS buffers), {CONTEXT / GIB:.1f} GiB for an engine's context, "
        f"{(ASLEEP + GRAPHS) / GIB:.1f} GiB for what a vLLM engine keeps asleep (of these "
        f"{GRAPHS / GIB:.1f} GiB CUDA graphs, unless rollout.enforce_eager), and {FRAGMENTS:.0%} "
        "of the training engines' bytes (fragmentation)."
    )
