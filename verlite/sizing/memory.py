"""Memory of each device and node in each phase of a step, all roles together, and the bytes of a
weight sync by transport.

Of the phases, first comes what each role runs at most: its engine, and the largest micro-batch of
each pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from verlite.algorithms.balancing import MOST_PATHS
from verlite.config.compile import engine_spec as compiled_engine
from verlite.config.plan import Micro, Plan, resolve_dtype
from verlite.config.schema import Config
from verlite.sizing.devices import Devices
from verlite.sizing.dry_engine import DryEngineSpec
from verlite.sizing.facts import DTYPE_BYTES, ModelFacts
from verlite.sizing.measure import Passes, PassRows, RoleMemory
from verlite.spec.roles import ModelSpec
from verlite.terminal import GIB, amount, counted, size
from verlite.weights import fingerprint
from verlite.workers.roles import ROLES


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
    fallback: the same facts for the case that the trial of ipc fails. None if none is made.
    """

    parameters: int
    dtype: str
    whole: int
    per_device: int
    uses: list[TransportUse]
    adapters: int | None = None
    fallback: "SyncBytes | None" = None

    def lines(self) -> list[tuple[str, str]]:
        """Return the rows of a table."""
        parameters = amount(self.parameters)
        lines = [("weights", f"{parameters} parameters in {self.dtype} = {size(self.whole)}")]
        lines += [(use.transport, self._sentence(use)) for use in self.uses]
        if self.fallback is not None:
            for use in self.fallback.uses:
                lines.append(("if ipc fails", f"{use.transport}: {self._sentence(use)}"))
        if self.adapters is not None:
            alone = size(self.adapters * DTYPE_BYTES[self.dtype])
            lines.append(("later syncs", f"{amount(self.adapters)} adapter parameters = {alone}"))
        return lines

    def _sentence(self, use: TransportUse) -> str:
        where = f"{use.readers} on {counted(len(use.nodes), 'node')}"
        return f"{where}; {self._way(use.transport)}; each device loads {size(use.per_device)}"

    def _way(self, transport: str) -> str:
        whole = size(self.whole)
        return {
            "shared_memory": f"a copy of {whole} in the memory of each node",
            "collective": f"{whole} over the network to each node, kept in its memory",
            "ipc": "bucket by bucket from the actor rank on the same device",
            "files": f"{whole} written to the shared folder, read on each node",
        }[transport]

    def host_bytes(self, node: int) -> int:
        """Return the most bytes of a node's memory that hold the weights while its engines load."""
        keeping = ("shared_memory", "collective")
        uses = [*self.uses, *(self.fallback.uses if self.fallback else [])]
        return self.whole * any(use.transport in keeping and node in use.nodes for use in uses)


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
            readers = counted(len(of_it), name)
            if plan.servers and name == "engine":
                readers = f"{counted(len(plan.servers), 'server')} by one process"
            uses.append(TransportUse(transport, readers, sorted(set(of_it)), loaded))
    adapters = facts.trained if plan.syncs_adapters else None
    fallback = (
        sync_bytes(replace(plan, weights=routes.fallback), facts) if routes.fallback else None
    )
    return SyncBytes(facts.exported, plan.sync_dtype, whole, per_device, uses, adapters, fallback)


TRAINING_ROLES = ("actor", "inference", "ref", "teacher", "critic")


@dataclass(frozen=True)
class SizedRole:
    """One training role.

    name: one of TRAINING_ROLES.
    spec: its engine.
    passes: what it runs.
    """

    name: str
    spec: DryEngineSpec
    passes: Passes


@dataclass(frozen=True)
class MeasuredRole(SizedRole):
    """A role with the memory of its engine, without offload."""

    memory: RoleMemory

    @property
    def offload(self) -> tuple[bool, bool]:
        """Whether its parameters and its optimizer leave the device. On CPUs nothing moves."""
        fsdp, moves = self.spec.fsdp, self.spec.kind != "cpu"
        return fsdp.param_offload and moves, fsdp.optimizer_offload and moves

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer on the device outside updates."""
        return 0 if self.offload[1] else self.memory.optimizer

    @property
    def idle(self) -> int:
        """Bytes on the device outside passes."""
        return self.optimizer + (0 if self.offload[0] else self.memory.parameters)

    @property
    def forward(self) -> int:
        """Peak while it computes log-probs or values."""
        return self.memory.forward - self.memory.optimizer + self.optimizer


def training_roles(config: Config, plan: Plan) -> list[SizedRole]:
    """Return the roles of a run that have a training engine."""
    return [
        SizedRole(name, spec, role_passes(config, plan, name, spec.model))
        for name in TRAINING_ROLES
        if name in plan.roles
        for spec in [engine_spec(config, plan, name)]
    ]


def engine_spec(config: Config, plan: Plan, role: str) -> DryEngineSpec:
    """Return the engine of a role, as its worker builds it."""
    engine = compiled_engine(config, plan, role)
    return DryEngineSpec(
        model=engine.model,
        fsdp=engine.fsdp,
        optim=engine.optim,
        head="value" if role == "critic" else "lm",
        ranks=len(plan.placement[role]),
        sequence_parallel=engine.sequence_parallel,
        kind=plan.device,
        dtype=resolve_dtype(engine.fsdp.dtype, plan.device),
    )


def role_passes(config: Config, plan: Plan, role: str, model: ModelSpec) -> Passes:
    """Return what a role runs, if every sample has the longest length."""
    groups = len(plan.placement[role]) // plan.sequence_parallel[role]
    step_rows = -(-plan.batch_size // groups)
    if role in ("ref", "teacher"):
        return Passes(largest(plan, plan.ref_micro, step_rows, model), None)
    if role == "critic":
        assert plan.critic is not None
        update_rows = -(-plan.critic.mini_rows // groups)
        return Passes(
            largest(plan, plan.value_micro, step_rows, model),
            largest(plan, plan.critic.micro, update_rows, model),
        )
    log_probs = largest(plan, plan.log_prob_micro, step_rows, model)
    if role == "inference":
        return Passes(
            log_probs, None, forward_entropy=True, sum_pi_squared=plan.needs_sum_pi_squared
        )
    actor = config.actor_rollout_ref.actor
    entropy = "loss" if actor.entropy_coeff else ""
    if actor.calculate_entropy or not plan.needs_old_log_probs:
        entropy = entropy or "metric"
    return Passes(
        # The start-up check runs this pass in the first step even if no other step does.
        None if "inference" in plan.roles else log_probs,
        largest(plan, plan.actor.micro, -(-plan.actor.mini_rows // groups), model),
        forward_entropy=True,
        sum_pi_squared=plan.needs_sum_pi_squared,
        update_entropy=entropy,
    )


def largest(plan: Plan, micro: Micro | None, rows: int, model: ModelSpec) -> PassRows:
    """Return the largest micro-batch of a pass over `rows` samples of the longest length. If the
    model shares prefixes, a limit of tokens counts each prompt once."""
    assert micro is not None
    longest = plan.longest_sequence
    if micro.max_tokens is None:
        assert micro.size is not None
        lengths = (longest,) * min(micro.size, rows)
        return PassRows(lengths, plan.longest_response, rows > micro.size)
    each, prompt = plan.samples_per_prompt, longest - plan.longest_response
    shared = prompt if model.share_prefixes and model.use_remove_padding and each > 1 else 0
    left, number = micro.max_tokens, 0
    most = min(rows, MOST_PATHS * micro.max_tokens // longest)
    while number < most and left >= (new := longest - (shared if number % each else 0)):
        left, number = left - new, number + 1
    lengths = (longest,) * number + ((left,) if 1 < left < longest and number < most else ())
    prompts = tuple(i // each if i < number else -1 for i in range(len(lengths)))
    return PassRows(lengths, plan.longest_response, number < rows, prompts if shared else ())


CONTEXT = int(0.5 * GIB)
"""Assumed for the CUDA context of a process, which vLLM does not count as its share."""
PROCESS = CONTEXT + int(0.4 * GIB)
"""Assumed for each training process on a GPU: its context, NCCL and cuBLAS buffers."""
ASLEEP = int(0.5 * GIB)
"""Assumed for what a vLLM engine keeps in sleep mode, beside its context: buffers of kernels."""
GRAPHS = int(1.5 * GIB)
"""Assumed for its CUDA graphs, which stay on the GPU, too; none with rollout.enforce_eager."""
HASHED = 10
"""Bytes for each element that is hashed: its value, and two integers."""
FRAGMENTS = 0.05
"""Assumed share of the training engines' bytes that the allocator cannot use."""
HOST_PROCESS = {"cuda": int(3 * GIB), "cpu": int(1.5 * GIB)}
"""Assumed memory of a process with its libraries. On CPUs 0.5 GiB at the start and 0.3 to 1.0 GiB
of pages that are not returned were measured (docs/benchmarks.md)."""

Measure = Callable[[DryEngineSpec, Passes], RoleMemory]

STREAM = "sync: stream"
_FORWARD = {
    "actor": "old log-probs",
    "inference": "old log-probs",
    "ref": "reference log-probs",
    "teacher": "teacher's log-probs",
    "critic": "values",
}
"""What a role's forward passes compute."""


@dataclass(frozen=True)
class Phase:
    """One phase on one device, or on one node.

    name: of the phase.
    held: bytes of each role on the device, or in the node's memory by name.
    margin: what is assumed beyond the tensors.
    """

    name: str
    held: dict[str, int]
    margin: int = 0

    @property
    def total(self) -> int:
        """Bytes in use."""
        return sum(self.held.values()) + self.margin


@dataclass(frozen=True)
class DeviceGroup:
    """Devices with the same roles.

    devices: their numbers. roles: in the order of the plan.
    """

    devices: list[int]
    roles: tuple[str, ...]
    phases: list[Phase]

    @property
    def tightest(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class Memory:
    """The memory of a run.

    roles: that of each training engine.
    groups: devices by the roles on them.
    host: the fullest node.
    """

    roles: dict[str, RoleMemory]
    groups: list[DeviceGroup]
    host: list[Phase]


def run_memory(
    config: Config, plan: Plan, devices: Devices, policy: ModelFacts, measure: Measure
) -> Memory:
    """Return the memory of a run whose samples all have the longest length.

    Weights that may go by ipc go by its fallback if a device has too little memory for it.
    """
    roles = {
        role.name: MeasuredRole(role.name, role.spec, role.passes, measured_role(role, measure))
        for role in training_roles(config, plan)
    }
    by_roles: dict[tuple[str, ...], list[int]] = {}
    for device in range(plan.n_devices):
        here = tuple(role for role in plan.device_roles if device in plan.placement[role])
        if here:
            by_roles.setdefault(here, []).append(device)

    def memory(plan: Plan) -> Memory:
        groups = [
            DeviceGroup(numbers, here, _phases(config, plan, devices, policy, roles, here))
            for here, numbers in by_roles.items()
        ]
        measured = {name: role.memory for name, role in roles.items()}
        nodes = [_node(config, plan, policy, roles, node) for node in range(plan.nnodes)]
        fullest = max(nodes, key=lambda node: max(phase.total for phase in node))
        return Memory(measured, groups, fullest)

    found = memory(plan)
    if plan.weights.fallback and any(phase.name == STREAM for _, phase, _ in over(found, devices)):
        return memory(replace(plan, weights=plan.weights.fallback))  # what the trial will find
    return found


def measured_role(role: SizedRole, measure: Measure) -> RoleMemory:
    """Measure a role. Offload moves whole parts, so it is not part of what is measured."""
    fsdp = replace(role.spec.fsdp, param_offload=False, optimizer_offload=False)
    return measure(replace(role.spec, fsdp=fsdp), role.passes)


def engine_share(
    config: Config, plan: Plan, devices: Devices, policy: ModelFacts, others: int = 0
) -> int:
    """Return what a rollout engine holds on each of its devices while it generates.

    others: bytes of the other roles on the device meanwhile.
    """
    rollout = config.actor_rollout_ref.rollout
    weights = policy.exported * DTYPE_BYTES[plan.rollout_dtype] // plan.tensor_parallel
    if plan.rollout_name == "vllm" and plan.device == "cuda":
        # vLLM takes this share of the device whatever it needs; without a size, at least weights.
        return int(rollout.gpu_memory_utilization * (devices.bytes or 0)) or weights
    if plan.rollout_name == "vllm":
        return weights + int(rollout.kv_cache_gb * GIB)
    cached = policy.kv_bytes(plan.rollout_dtype) * plan.max_model_len * rollout.max_num_seqs
    if plan.device == "cuda" and devices.bytes is not None:
        free = max(0, devices.bytes - weights - others)
        cached = min(cached, int(rollout.gpu_memory_utilization * free))
    return weights + cached


def _phases(
    config: Config,
    plan: Plan,
    devices: Devices,
    policy: ModelFacts,
    roles: dict[str, MeasuredRole],
    here: tuple[str, ...],
) -> list[Phase]:
    """Return the phases of a device with these roles."""
    trained = [name for name in here if name != "rollout"]
    rest = {name: roles[name].idle for name in trained}
    sleeps = plan.device == "cuda" and config.actor_rollout_ref.rollout.free_cache_engine
    others = sum(rest.values())
    awake = engine_share(config, plan, devices, policy, others) if "rollout" in here else 0
    weight = policy.largest * DTYPE_BYTES[plan.rollout_dtype]
    rollout = config.actor_rollout_ref.rollout
    kept = ASLEEP + GRAPHS * (not rollout.enforce_eager) if plan.rollout_name == "vllm" else 0
    whole = policy.exported * DTYPE_BYTES[plan.sync_dtype]
    bucket = plan.weights.bucket_bytes(plan.device, rollout.sync_bucket_mb)
    largest = policy.largest * DTYPE_BYTES[plan.sync_dtype]
    bucket = min(max(bucket, largest), whole)  # a larger weight is a bucket of its own
    hashing = HASHED * min(policy.largest, fingerprint.CUDA_CHUNK)

    def phase(name: str, engine: int, **held: int) -> Phase:
        own = rest | held
        margin = int(FRAGMENTS * sum(own.values()))
        if plan.device == "cuda":
            margin += len(trained) * PROCESS
        if "rollout" in here:
            own["rollout"] = engine
            if plan.device == "cuda":
                # What vLLM keeps is part of its share while it has all of that.
                margin += CONTEXT + kept * (engine < awake)
        return Phase(name, own, margin)

    between = 0 if sleeps else awake
    begun = {}  # trainer.mode=pipelined: the actor has gradients while the others compute
    gradients = 0
    if plan.overlaps_gradients and "actor" in trained:
        memory = roles["actor"].memory
        gradients = memory.optimizer // 2  # of each trained parameter; Adam has two moments
        begun["actor"] = memory.parameters + roles["actor"].optimizer + gradients
    phases = []
    if trained:
        in_order = {name: roles[name] for name in ROLES if name in trained}
        building = _building(in_order, 2 * weight)
        phases.append(phase("build", between, **building))
    if "rollout" in here:
        phases.append(phase("generation", awake))
    for name in trained:
        if roles[name].passes.forward is not None:
            peak = roles[name].forward + gradients * (name == "actor")
            phases.append(phase(_FORWARD[name], between, **begun | {name: peak}))
    for name in reversed(trained):
        if roles[name].passes.update is not None:
            held = begun | {name: roles[name].memory.update}
            phases.append(phase(f"{name} update", between, **held))
    exporting = 0
    if "actor" in trained:
        memory, optimizer = roles["actor"].memory, roles["actor"].optimizer
        # A bucket of whole weights, the layer or the weight that comes next, and its shard.
        following = max(weight, policy.layer * DTYPE_BYTES[plan.sync_dtype])
        shard = weight // len(plan.placement["actor"])
        gathered = min(whole, bucket + following) + shard * (len(plan.placement["actor"]) > 1)
        exporting = memory.parameters + optimizer + gathered
        checked = memory.check - memory.optimizer + optimizer
        if plan.weights.uses("ipc"):
            phases.append(phase("sync: check", between, actor=checked))
        else:
            phases.append(phase("sync: gather", between, actor=max(checked, exporting)))
    if "rollout" in here:
        loading = policy.exported * DTYPE_BYTES[plan.rollout_dtype] // plan.tensor_parallel
        engine = loading if sleeps else awake
        if plan.weights.uses("ipc"):
            # The engine copies each weight out of two buckets while the trainer gathers.
            streamed = engine + min(2 * bucket, whole) + max(largest, hashing)
            phases.append(phase(STREAM, streamed, actor=exporting))
        else:
            phases.append(phase("sync: load", engine + max(bucket, hashing)))
    if any(roles[name].spec.optim is not None for name in trained):
        # The sync has woken the engines. Checkpoints of adapters have a hash of the base model.
        hashes = {n: rest[n] + hashing for n in trained if roles[n].spec.model.trains_adapters}
        phases.append(phase("checkpoint", awake, **hashes))
    return phases


def _building(roles: dict[str, MeasuredRole], transit: int) -> dict[str, int]:
    """Return what each role holds at the fullest moment of the start.

    Roles start in order, and together, but the next one waits for a role that offloads.
    transit: bytes of weights that a role receives, beside its shards.
    """
    moments = []
    before: dict[str, int] = {}
    for name, role in roles.items():
        memory = role.memory
        whole = max(memory.resident + transit, memory.check - memory.optimizer)
        moments.append(dict.fromkeys(roles, 0) | before | {name: whole})
        before[name] = role.idle if any(role.offload) else whole
    return max(moments, key=lambda held: sum(held.values()))


def _node(
    config: Config,
    plan: Plan,
    policy: ModelFacts,
    roles: dict[str, MeasuredRole],
    node: int,
) -> list[Phase]:
    width = plan.devices_per_node

    def ranks(role: str) -> int:
        return sum(device // width == node for device in plan.placement[role])

    processes = sum(ranks(role) for role in plan.roles)
    base = {"processes": processes * HOST_PROCESS[plan.device]}
    offloaded = sum(ranks(name) * (r.memory.resident - r.idle) for name, r in roles.items())
    if offloaded:
        base["offloaded"] = offloaded
    activations = max((ranks(name) * role.memory.host for name, role in roles.items()), default=0)
    moved = sync_bytes(plan, policy)
    copy = moved.host_bytes(node)
    # Each rank writes its shards one tensor at a time.
    written = sum(
        ranks(name) * 4 * policy.largest // role.spec.ranks
        for name, role in roles.items()
        if role.spec.optim is not None
    )
    phases = [Phase("generation", dict(base))]
    frees = config.actor_rollout_ref.rollout.free_cache_engine and plan.device == "cuda"
    if plan.syncs_adapters and frees:
        base["sleeping engines"] = ranks("rollout") * moved.per_device
    if roles:
        phases.append(Phase("update", base | ({"activations": activations} if activations else {})))
    if copy:
        phases.append(Phase("sync", base | {"weights": copy}))
    if written:
        phases.append(Phase("checkpoint", base | {"tensors being written": written}))
    return phases


def over(memory: Memory, devices: Devices) -> list[tuple[DeviceGroup, Phase, int]]:
    """Return the phases that do not fit their device, and by how many bytes."""
    if devices.bytes is None or devices.kind == "cpu":
        return []
    return [
        (group, phase, phase.total - devices.bytes)
        for group in memory.groups
        for phase in group.phases
        if phase.total > devices.bytes
    ]
