"""`cluster.node_groups`: names for groups of nodes, and the environment of the workers on them.

The keys are RLinf's: [{label, node_ranks, env_configs: [{node_ranks, env_vars,
python_interpreter_path}]}].
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from verlite.config.placement import ALL_NODES, read_numbers
from verlite.masking import is_secret

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


def read(value: object, nodes: int) -> NodeGroups:
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
