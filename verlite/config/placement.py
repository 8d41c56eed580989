"""The section `cluster`: node groups, and which role runs on which devices.

`component_placement` has RLinf's grammar. Names separated by commas share a placement. A placement
is `all`, or a list of device numbers and inclusive ranges (`0-3,6`). A range may be followed by `:`
and the process ranks on it (`4-7:0-3`). Devices are numbered over the whole cluster, node after
node. The long form `{node_group: LABEL, placement: 0-3}` numbers them over the nodes of a group.

`node_groups` has RLinf's keys: [{label, node_ranks, env_configs: [{node_ranks, env_vars,
python_interpreter_path}]}]. It names groups of nodes, and the environment of the workers on them.

`draw` shows a placement: nodes as rows, devices as columns, roles as letters.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verlite.masking import display, is_secret

ROLES = ("actor", "rollout", "inference", "ref", "teacher", "critic")
"""Every role that can have devices. Rewards run in host processes and need none."""
RENAMED = {"actor_inference": "inference"}
"""RLinf's other names of roles."""
IGNORED = {"reward": "rewards are computed by processes without devices"}
"""RLinf's roles that are accepted without effect, with the reason."""
ALL_NODES = "cluster"
"""Reserved label of the node group with all nodes."""


@dataclass(frozen=True)
class Shape:
    """What placements are parsed against.

    Attributes:
        nodes: nodes of the run.
        per_node: devices of each node.
        engine: devices of each rollout process.
        groups: node ranks of each node group, by label.
    """

    nodes: int
    per_node: int
    engine: int = 1
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Devices of the whole run."""
        return self.nodes * self.per_node

    def per_process(self, role: str) -> int:
        """Return the devices of one process of a role."""
        return self.engine if role == "rollout" else 1

    def devices_of(self, nodes: Iterable[int]) -> list[int]:
        """Return the device numbers of nodes, in their order."""
        width = self.per_node
        return [device for node in nodes for device in range(node * width, (node + 1) * width)]


def parse(spec: Mapping[str, object] | None, shape: Shape) -> dict[str, list[int]]:
    """Return the devices of each role, in rank order.

    A role that is not named uses the devices of the actor, and `ref` and `teacher` those of
    `inference` if that is named. `inference` is in the result only if it is named.

    Args:
        spec: role names to placements. None: all roles share all devices.
        shape: the cluster.

    Raises:
        ValueError: with every problem, one per line.
    """
    spec = {"actor": "all"} if spec is None else spec
    if any(value is None and re.search("[0-9]", names) for names, value in spec.items()):
        raise ValueError("a list inside {...} needs brackets, such as {actor: [0-3, 6]}")
    placed: dict[str, list[int]] = {}
    wrong: list[str] = []
    for names, value in spec.items():
        for name in role_names(names):
            if name in IGNORED:
                continue
            if name not in ROLES:
                wrong.append(f"{name!r} is not a role; the roles are {', '.join(ROLES)}")
            elif name in placed:
                wrong.append(f"{name!r} is placed twice")
            else:
                placed[name], problems = _place(value, shape, name)
                wrong += [f"{names}: {problem}" for problem in problems]
    if "actor" not in placed:
        wrong.append("'actor' is not placed")
    if wrong:
        raise ValueError("\n".join(dict.fromkeys(wrong)))
    default = dict.fromkeys(("ref", "teacher"), placed.get("inference", placed["actor"]))
    return {
        role: placed.get(role, default.get(role, placed["actor"]))
        for role in ROLES
        if role != "inference" or role in placed
    }


def role_names(names: str) -> Iterator[str]:
    """Yield the roles of one key of the placement, under their names here."""
    for name in (part.strip() for part in names.split(",")):
        yield RENAMED.get(name, name)


def mode(placement: Mapping[str, Sequence[int]]) -> str:
    """Return how the roles of a run share its devices.

    "collocated": all on the same devices. "disaggregated": actor, rollout and inference have no
    device in common. Otherwise "hybrid".
    """
    devices = {role: set(numbers) for role, numbers in placement.items()}
    if all(numbers == devices["actor"] for numbers in devices.values()):
        return "collocated"
    phases = [devices[role] for role in ("actor", "rollout", "inference") if role in devices]
    apart = sum(map(len, phases)) == len(set().union(*phases))
    return "disaggregated" if apart else "hybrid"


def read_numbers(
    value: object, count: int, noun: str = "device", of: str = "", per_process: int = 1
) -> tuple[list[int], list[str]]:
    """Return the numbers of a list such as "0-3,6", 7, [0-3, 6] or "all", and every problem.

    Args:
        value: the list, as text, number or list of both.
        count: how many there are.
        noun: what is numbered.
        of: what has them, such as "group a100". "": the run.
        per_process: how many belong to one process.
    """
    if isinstance(value, bool | dict) or not isinstance(value, str | int | list):
        return [], [f"expected a list of {noun}s such as 0-3, got {display(noun, value)}"]
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    numbers: list[int] = []
    wrong: list[str] = []
    next_rank = 0
    for segment in filter(None, (part.strip() for part in text.split(","))):
        where, colon, ranks = segment.partition(":")
        try:
            first, last = 0, count - 1
            if where.strip().lower() != "all":
                first, last = _range(where, segment)
            if last >= count:
                there = _there_are(count, noun, of) + _sexagesimal(value)
                raise ValueError(f"{segment!r} names {noun} {last}, but {there}")
            if numbers and first <= numbers[-1]:
                raise ValueError(f"{text!r} must name {noun}s once and in ascending order")
            numbers.extend(range(first, last + 1))
            size = last - first + 1
            processes = -(-size // per_process)
            if colon:
                processes = _processes(ranks, segment, next_rank, size, per_process)
            next_rank += processes
        except ValueError as error:
            wrong.append(str(error))
    if not numbers and not wrong:
        wrong.append(f"{text!r} names no {noun}")
    return numbers, wrong


def ranges(numbers: Iterable[int]) -> str:
    """Return device numbers in the grammar: [0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _place(value: object, shape: Shape, role: str) -> tuple[list[int], list[str]]:
    """Return the devices of one placement, short or long form, and every problem."""
    nodes: list[int] = list(range(shape.nodes))
    of = ""
    wrong: list[str] = []
    if isinstance(value, Mapping):
        unknown = sorted(map(str, value.keys() - {"node_group", "placement"}))
        if unknown:
            wrong.append(f"{unknown[0]!r} is not a key; the keys are node_group and placement")
        if "placement" not in value:
            return [], [*wrong, "'placement' is missing"]
        nodes, problems = _nodes_of(value.get("node_group", ALL_NODES), shape)
        if wrong or problems:
            return [], [*wrong, *problems]
        of = f"node_group {_written(value.get('node_group', ALL_NODES))}"
        value = value["placement"]
    devices = shape.devices_of(nodes)
    numbers, wrong = read_numbers(value, len(devices), of=of, per_process=shape.per_process(role))
    return [devices[number] for number in numbers], wrong


def _nodes_of(labels: object, shape: Shape) -> tuple[list[int], list[str]]:
    """Return the node ranks of one or several node groups in the given order, and every problem."""
    wrong: list[str] = []
    nodes: list[int] = []
    for label in _written(labels).split(","):
        if label == "node":
            wrong.append(
                "node_group 'node' has nodes without devices, and every role here needs devices"
            )
        elif label != ALL_NODES and label not in shape.groups:
            known = ", ".join([ALL_NODES, *shape.groups])
            wrong.append(f"node_group {label!r} does not exist; the groups are {known}")
        else:
            nodes += range(shape.nodes) if label == ALL_NODES else shape.groups[label]
    twice = sorted({node for node in nodes if nodes.count(node) > 1})
    if twice:
        wrong.append(f"node {twice[0]} is in several of the groups {_written(labels)}")
    return nodes, wrong


def _written(labels: object) -> str:
    names = labels if isinstance(labels, list) else str(labels).split(",")
    return ",".join(str(name).strip() for name in names)


def _processes(ranks: str, segment: str, expected: int, size: int, per_process: int) -> int:
    """Return how many processes a segment names. Raises ValueError if they do not fit."""
    if ranks.strip().lower() == "all":
        raise ValueError(f"{segment!r}: all stands for devices, not for processes; write a range")
    first, last = _range(ranks, segment)
    processes = last - first + 1
    if first != expected:
        rule = "the first process is 0" if not expected else f"the next process is {expected}"
        raise ValueError(f"{segment!r} starts at process {first}, but {rule}")
    if processes * per_process != size:
        each = "one device"
        if per_process > 1:
            each = f"{per_process} devices (rollout.tensor_model_parallel_size)"
        raise ValueError(
            f"{segment!r} puts {_count(processes, 'process', 'processes')} on "
            f"{_count(size, 'device', 'devices')}, but each process uses {each}"
        )
    return processes


def _range(text: str, segment: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text.strip())
    if not match:
        raise ValueError(f"{segment!r} is neither a number, a range such as 0-3, nor all")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"{segment!r}: the range ends before it starts")
    return first, last


def _there_are(count: int, noun: str, of: str) -> str:
    has = f"{of} has" if of else "there is" if count == 1 else "there are"
    return f"{has} {count}: 0-{count - 1}" if count > 1 else f"{has} only {noun} 0"


def _sexagesimal(value: object) -> str:
    """YAML 1.1 reads 3:2 without quotes as a number with base 60."""
    if not isinstance(value, int) or value < 60:
        return ""
    return f" (YAML reads {value // 60}:{value % 60} without quotes as {value})"


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


LETTERS = dict(zip(ROLES, "ARIFTC", strict=True))
MODES = {
    "collocated": "collocated: every role on all devices",
    "disaggregated": "disaggregated: {phases} on devices of their own",
    "hybrid": "hybrid: some roles share devices",
}
SHOWN_COLUMNS = 16
"""Nodes with more devices are shown as ranges of devices."""


def draw(
    placement: Mapping[str, Sequence[int]],
    nodes: int,
    per_node: int,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> str:
    """Return the lines of the picture: the mode, a row per run of equal nodes, and the letters.

    Roles on the same devices have one letter, that of the first of them.

    Args:
        placement: devices of each role.
        nodes: nodes of the run.
        per_node: devices of each node.
        groups: node ranks of each node group, by label.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for role in (role for role in LETTERS if role in placement):
        together.setdefault(tuple(sorted(placement[role])), []).append(role)
    letter_of = {LETTERS[roles[0]]: set(devices) for devices, roles in together.items()}
    rows: list[tuple[list[int], list[str], str]] = []
    for node in range(nodes):
        first = node * per_node
        cells = [
            "".join(letter for letter, devices in letter_of.items() if device in devices) or "-"
            for device in range(first, first + per_node)
        ]
        labels = [label for label, ranks in (groups or {}).items() if node in ranks]
        group = f" ({', '.join(labels)})" if labels else ""
        if rows and rows[-1][1:] == (cells, group):
            rows[-1][0].append(node)
        else:
            rows.append(([node], cells, group))
    names = [ranges(numbers) + group for numbers, _, group in rows]
    bodies = [cells for _, cells, _ in rows]
    if per_node <= SHOWN_COLUMNS:
        lines = _columns(["node", *names], [[str(d) for d in range(per_node)], *bodies])
    else:
        lines = _columns(["node", *names], [["devices"], *([_spans(cells)] for cells in bodies)])
    legend = "   ".join(f"{LETTERS[roles[0]]} {', '.join(roles)}" for roles in together.values())
    return "\n".join([_mode_words(placement), *lines, legend])


def _mode_words(placement: Mapping[str, Sequence[int]]) -> str:
    phases = [role for role in ("actor", "rollout", "inference") if role in placement]
    words = f"{', '.join(phases[:-1])} and {phases[-1]}"
    return MODES[mode(placement)].format(phases=words)


def _columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines."""
    side = max(map(len, names))
    width = max(len(cell) for row in rows for cell in row) if len(rows[0]) > 1 else 0
    return [
        f"{name.ljust(side)}   {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for name, row in zip(names, rows, strict=True)
    ]


def _spans(cells: Sequence[str]) -> str:
    """Return the ranges of devices with the same roles: "R 0-19, I 20-23"."""
    spans: list[tuple[str, list[int]]] = []
    for device, cell in enumerate(cells):
        if spans and spans[-1][0] == cell:
            spans[-1][1].append(device)
        else:
            spans.append((cell, [device]))
    return ", ".join(f"{cell} {ranges(devices)}" for cell, devices in spans)


GROUP_KEYS = ("label", "node_ranks", "env_configs", "hardware", "ignore_hardware")
ENV_KEYS = ("node_ranks", "env_vars", "python_interpreter_path")
RESERVED = (ALL_NODES, "node")
SET_BY_OTHERS = re.compile(r"(CUDA|HIP|ROCR)_VISIBLE_DEVICES|(RAY|VERLITE)_.*")
"""Variables that Ray or verlite sets in workers, or that Ray reads before they start."""


@dataclass(frozen=True)
class NodeGroups:
    """Attributes:
    nodes: node ranks of each group, by label.
    env_vars: environment variables of the workers on each node, by node rank.
    python: Python interpreter of the workers on each node, by node rank.
    """

    nodes: dict[str, list[int]] = field(default_factory=dict)
    env_vars: dict[int, dict[str, str]] = field(default_factory=dict)
    python: dict[int, str] = field(default_factory=dict)


def read_groups(value: object, nodes: int) -> NodeGroups:
    """Return the groups of a run with this many nodes.

    Raises:
        ValueError: with every problem, one per line.
    """
    result = NodeGroups()
    wrong: list[str] = []
    if value is not None and not isinstance(value, list):
        wrong.append(f"expected a list of groups, got {value!r}")
        value = None
    for position, group in enumerate(value or []):
        name = f"[{position}]"
        if isinstance(group, dict) and group.get("label"):
            name = f"{group['label']!r}"
        wrong += [f"group {name}: {problem}" for problem in _read_group(group, nodes, result)]
    if wrong:
        raise ValueError("\n".join(wrong))
    return result


def _read_group(group: object, nodes: int, result: NodeGroups) -> Iterator[str]:
    """Add one group to the result, and yield its problems."""
    if not isinstance(group, dict):
        yield f"expected a mapping with {', '.join(GROUP_KEYS)}, got {group!r}"
        return
    yield from _unknown(group, GROUP_KEYS)
    given = group.get("label")
    label = "" if given is None else str(given)
    if not re.fullmatch(r"[^\s,]+", label):
        yield "label must be a name without spaces and commas"
    elif label in RESERVED:
        yield f"label {label!r} is reserved"
    elif label in result.nodes:
        yield f"label {label!r} is given twice"
    if group.get("hardware") is not None:
        yield "hardware is not supported; roles run on the GPUs or CPU slots of the nodes"
    if group.get("ignore_hardware"):
        yield "ignore_hardware=true is not supported; every role needs devices"
    ranks, problems = _node_ranks(group, nodes)
    yield from problems
    result.nodes[label] = ranks
    configs = group.get("env_configs") or []
    if not isinstance(configs, list):
        yield f"env_configs: expected a list of mappings, got {configs!r}"
        return
    for config in configs:
        for problem in _read_env(config, ranks, nodes, result):
            yield f"env_configs: {problem}"


def _read_env(config: Any, group: Sequence[int], nodes: int, result: NodeGroups) -> Iterator[str]:
    """Add one entry of env_configs to the result, and yield its problems."""
    if not isinstance(config, dict):
        yield f"expected a mapping with {', '.join(ENV_KEYS)}, got {config!r}"
        return
    yield from _unknown(config, ENV_KEYS)
    ranks, problems = _node_ranks(config, nodes)
    yield from problems
    outside = [rank for rank in ranks if rank not in group]
    if outside:
        yield f"node {outside[0]} is not in the group"
    twice = [rank for rank in ranks if rank in result.env_vars]
    if twice:
        yield f"node {twice[0]} has two environments"
    variables, problems = _variables(config.get("env_vars"))
    yield from problems
    for rank in ranks:
        result.env_vars[rank] = variables
    python = config.get("python_interpreter_path")
    if python is not None:
        for rank in ranks:
            result.python[rank] = str(python)


def _node_ranks(mapping: dict[Any, Any], nodes: int) -> tuple[list[int], list[str]]:
    if "node_ranks" not in mapping:
        return [], ["node_ranks is missing"]
    ranks, problems = read_numbers(mapping["node_ranks"], nodes, "node")
    return ranks, [f"node_ranks: {problem}" for problem in problems]


def _variables(value: Any) -> tuple[dict[str, str], list[str]]:
    """Return the variables of a mapping or of a list of mappings, and every problem."""
    entries = value if isinstance(value, list) else [value or {}]
    if not all(isinstance(entry, dict) for entry in entries):
        return {}, ["env_vars must be a list of NAME: value"]
    found: dict[str, str] = {}
    wrong: list[str] = []
    for name, text in (pair for entry in entries for pair in entry.items()):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            wrong.append(f"env_vars: {name!r} is not the name of an environment variable")
        elif SET_BY_OTHERS.fullmatch(name):
            wrong.append(f"env_vars: {name} is set by Ray or verlite; set it before `ray start`")
        elif is_secret(name, text):
            wrong.append(f"env_vars: {name} looks like a secret; set it before `ray start`")
        elif name in found:
            wrong.append(f"env_vars: {name} is given twice")
        elif not isinstance(text, str | int | float) or isinstance(text, bool):
            wrong.append(f"env_vars: the value of {name} must be text or a number")
        else:
            found[name] = str(text)
    return found, wrong


def _unknown(mapping: dict[Any, Any], keys: Sequence[str]) -> Iterator[str]:
    for key in mapping:
        if key not in keys:
            yield f"{key!r} is not a key; the keys are {', '.join(keys)}"
