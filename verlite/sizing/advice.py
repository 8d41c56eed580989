"""What to change so that a run fits, or how much larger its micro-batches may be."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from verlite.config.keys import get
from verlite.config.placement import ranges
from verlite.config.plan import Micro, Plan, make_plan
from verlite.config.schema import Config
from verlite.sizing.devices import Devices
from verlite.sizing.facts import DTYPE_BYTES, ModelFacts
from verlite.sizing.measure import Passes
from verlite.sizing.memory import (
    FRAGMENTS,
    DeviceGroup,
    Measure,
    Memory,
    Phase,
    engine_share,
    largest,
    measured_role,
    over,
    run_memory,
    training_roles,
)
from verlite.terminal import GIB, amount, size

ENGINE_BUFFERS = 2 * GIB
"""Assumed for vLLM's activations and CUDA graphs, on each device."""
TRIED = 4
"""Micro-batches are tried up to this multiple of the configured size."""
KEPT_SHARE = 0.8
"""Part of rollout.gpu_memory_utilization that is kept before something is offloaded."""
KEPT = ("products", "attention")
"""Values of enable_gradient_checkpointing, from the least recomputation."""
TOKENS = 256
"""Token budgets are multiples of this."""

POLICY = "actor_rollout_ref."
SIZES = {
    "actor": (
        f"{POLICY}actor.ppo_micro_batch_size_per_gpu",
        f"{POLICY}actor.ppo_max_token_len_per_gpu",
    ),
    "critic": ("critic.ppo_micro_batch_size_per_gpu", "critic.ppo_max_token_len_per_gpu"),
}
MODELS = {"actor": f"{POLICY}model", "critic": "critic.model"}
FSDP = {
    "actor": f"{POLICY}actor.fsdp_config",
    "ref": f"{POLICY}ref.fsdp_config",
    "critic": "critic.model.fsdp_config",
}
UTILIZATION = f"{POLICY}rollout.gpu_memory_utilization"


@dataclass(frozen=True)
class SizedRun:
    """A run whose memory is known.

    measure: measures engines, with a cache.
    """

    config: Config
    plan: Plan
    devices: Devices
    policy: ModelFacts
    measure: Measure
    memory: Memory

    def changed(self, key: str, value: object) -> "SizedRun":
        """Return the run with another value of one key."""
        config = copy.deepcopy(self.config)
        path = key.split(".")
        section: Any = config
        for name in path[:-1]:
            section = getattr(section, name)
        setattr(section, path[-1], value)
        plan = make_plan(config, self.plan.device, count_rows=False)
        memory = run_memory(config, plan, self.devices, self.policy, self.measure)
        return replace(self, config=config, plan=plan, memory=memory)

    def over(self) -> list[tuple[DeviceGroup, Phase, int]]:
        """Return the phases that do not fit, and by how many bytes."""
        return over(self.memory, self.devices)

    def excess(self) -> int:
        """Return the bytes by which phases do not fit, all together."""
        return sum(bytes_over for _, _, bytes_over in self.over())


def advise(run: SizedRun) -> list[str]:
    """Return sentences: does it fit, what would make it fit, how large micro-batches may be."""
    if run.devices.bytes is None:
        return ["Name the devices, as in --devices 8xH100-80GB, to see whether this fits."]
    if run.devices.kind == "cpu":
        return list(_on_cpu(run))
    if not run.over():
        return [
            *_kv_cache(run),
            *(_tightest(run, group) for group in run.memory.groups),
            *_larger(run),
            *_unneeded(run),
        ]
    sentences = [
        f"Does not fit: devices {ranges(group.devices)} in phase {phase.name}, over by "
        f"{size(excess)}."
        for group, phase, excess in run.over()
    ]
    fitting, changes = make_fit(run)
    if changes:
        needed = "It fits with" if not fitting.over() else "Smaller, but not enough:"
        sentences.append(f"{needed} {' '.join(changes)}")
    if fitting.over():
        group, phase, excess = max(fitting.over(), key=lambda found: found[2])
        sentences.append(
            f"No setting that this command knows makes it fit: {phase.name} stays over by "
            f"{size(excess)}. Use more devices, devices with more memory, or LoRA "
            f"({POLICY}model.lora_rank)."
        )
    else:
        sentences += [_tightest(fitting, group) for group in fitting.memory.groups]
        sentences += _kv_cache(fitting)
    return sentences


def _tightest(run: SizedRun, group: DeviceGroup) -> str:
    assert run.devices.bytes is not None
    phase = group.tightest
    free = size(run.devices.bytes - phase.total)
    return (
        f"Devices {ranges(group.devices)} fit: the fullest phase is {phase.name} with "
        f"{size(phase.total)} of {size(run.devices.bytes)}, {free} free."
    )


def _kv_cache(run: SizedRun) -> Iterator[str]:
    """Say how many samples an engine holds, of the share of the device that vLLM takes."""
    if run.plan.rollout_name != "vllm":
        return
    devices = run.plan.tensor_parallel
    share = engine_share(run.config, run.plan, run.devices, run.policy) - ENGINE_BUFFERS
    weights = run.policy.exported * DTYPE_BYTES[run.plan.rollout_dtype]
    tokens = (share * devices - weights) // run.policy.kv_bytes(run.plan.rollout_dtype)
    samples = tokens // run.plan.max_model_len
    if samples < 1:
        yield (
            f"An engine of {devices} devices has no room for the KV cache of one sample of "
            f"{run.plan.max_model_len} tokens: raise {UTILIZATION} or "
            f"{POLICY}rollout.tensor_model_parallel_size."
        )
        return
    yield (
        f"An engine has room for about {amount(tokens)} tokens of KV cache, {samples:,} samples of "
        f"{run.plan.max_model_len}; it generates at most {POLICY}rollout.max_num_seqs="
        f"{run.config.actor_rollout_ref.rollout.max_num_seqs} at a time. (vLLM's own buffers are "
        f"assumed to take {size(ENGINE_BUFFERS)} of each device.)"
    )


def _on_cpu(run: SizedRun) -> Iterator[str]:
    """Devices are slots of one machine, so all of a node's peaks add up."""
    assert run.devices.bytes is not None
    needed = 0
    for group in run.memory.groups:
        most = max(run.plan.devices_per_node, 1)
        here = min(len(group.devices), most)
        needed += here * group.tightest.total
    processes = run.memory.host[0].held["processes"]
    total = needed + processes
    verdict = "fits" if total <= run.devices.bytes else "may not fit"
    yield (
        f"A node {verdict}: at most {size(needed)} of tensors on its slots and {size(processes)} "
        f"for processes, of {size(run.devices.bytes)}."
    )


# What fits


def _larger(run: SizedRun) -> Iterator[str]:
    """Say how large the micro-batches of updates may be."""
    for role in SIZES:
        if role not in run.memory.roles:
            continue
        key, now, most, unit, limit = largest_micro_batch(run, role)
        if most is None or most == now:
            continue
        why = ""
        if most >= limit:
            why = " (all rows of an update)"
        elif most == TRIED * now:
            why = " (the largest that was tried)"
        yield f"{key} may be up to {most} {unit}{why}; it is {now}."


def _unneeded(run: SizedRun) -> Iterator[str]:
    """Say which offload and checkpointing could be left out."""
    for key in _switches(run, wanted=True):
        if not run.changed(key, False).over():
            yield f"{key}=true is not needed: without it everything still fits."
    for role, section in MODELS.items():
        key = f"{section}.enable_gradient_checkpointing"
        now = get(run.config, key) if role in run.memory.roles else False
        if not now or get(run.config, f"{section}.enable_activation_offload"):
            continue
        excess = run.changed(key, False).over()
        if not excess:
            yield f"{key}=false would fit too, and saves about a quarter of the update's FLOPs."
            continue
        most = size(max(found[2] for found in excess))
        is_compiled = get(run.config, f"{FSDP[role]}.use_torch_compile")  # it cannot keep a part
        less = () if is_compiled else KEPT if now is True else KEPT[: KEPT.index(now)]
        for kept in less:
            if not run.changed(key, kept).over():
                yield f"{key}={kept} would fit too, and recomputes less; false is over by {most}."
                break
        else:
            yield f"{key}={_typed(now)} is needed: without it over by {most}."


def largest_micro_batch(run: SizedRun, role: str) -> tuple[str, int, int | None, str, int]:
    """Return key, present value, largest value that fits, its unit, and the largest sensible one
    of a role's update. The largest that fits is None if not even one sample does."""
    assert run.devices.bytes is not None
    one = next(found for found in training_roles(run.config, run.plan) if found.name == role)
    updates = run.plan.actor if role == "actor" else run.plan.critic
    assert updates is not None and one.passes.update is not None
    groups = len(run.plan.placement[role]) // run.plan.sequence_parallel[role]
    rows = -(-updates.mini_rows // groups)
    group = next(found for found in run.memory.groups if role in found.roles)
    phase = next(found for found in group.phases if found.name == f"{role} update")
    room = run.devices.bytes - phase.total + int(phase.held[role] * (1 + FRAGMENTS))
    shared = run.plan.sequence_parallel[role]

    def needs(number: int) -> int:
        micro = Micro(number, None) if by_rows else Micro(None, number)
        passes = Passes(
            None,
            largest(run.plan, micro, rows, one.spec.model),
            update_entropy=one.passes.update_entropy,
        )
        memory = measured_role(replace(one, passes=passes), run.measure)
        return int(memory.update * (1 + FRAGMENTS))

    by_rows = updates.micro.max_tokens is None
    size_key, tokens_key = SIZES[role]
    if by_rows:
        assert updates.micro.size is not None
        most = _most_that_fits(needs, room, 1, min(rows, TRIED * updates.micro.size), 1)
        return size_key, updates.micro.size, most, "samples", rows
    longest = run.plan.longest_sequence
    assert updates.micro.max_tokens is not None
    limit = min(rows * longest, TRIED * updates.micro.max_tokens)
    most = _most_that_fits(needs, room, longest, max(longest, limit), TOKENS * shared)
    each = None if most is None else most // shared
    return tokens_key, updates.micro.max_tokens // shared, each, "tokens", rows * longest // shared


def _most_that_fits(
    needs: Callable[[int], int], room: int, least: int, most: int, step: int
) -> int | None:
    """Return the largest number between `least` and `most` whose need is at most `room`; None if
    `least` does not fit. Numbers above `least` are multiples of `step`.

    The need is a maximum of linear functions, so it lies below each of its chords: the number at
    which a chord reaches `room` fits. Few steps come close to the largest.
    """
    low, at_low = least, needs(least)
    if at_low > room:
        return None
    high, at_high = most, needs(most)
    if at_high <= room:
        return most
    for _ in range(4):
        crossing = low + (high - low) * (room - at_low) // max(1, at_high - at_low)
        next_low = crossing // step * step
        if next_low <= low:
            break
        low, at_low = next_low, needs(next_low)
        if low + step >= high:
            break
        at_next = needs(low + step)
        if at_next > room:
            break
        low, at_low = low + step, at_next
    return low


# What would fit


def make_fit(run: SizedRun) -> tuple[SizedRun, list[str]]:
    """Return the run with changes that make it fit, or come as close as possible, and the changes
    as they are typed. Cheap changes come first: a smaller micro-batch costs some speed,
    checkpointing a third more computation, offload a copy in each step.
    """
    original = run.config
    changes: dict[str, object] = {}
    stages = (
        _checkpointing,
        _smaller_micro_batches,
        _slightly_lower_utilization,
        _offload,
        _sharding,
        _smaller_micro_batches,
        _lower_utilization,
    )
    for stage in stages:
        for key, value in list(stage(run)):
            if not run.over():
                break
            changed = run.changed(key, value)
            if changed.excess() < run.excess():
                run = changed
                changes[key] = value
    for key, value in list(changes.items()):
        if value is True:  # a switch, which later changes may have made unneeded
            without = run.changed(key, get(original, key))
            if without.excess() <= run.excess():
                run = without
                del changes[key]
    return run, [f"{key}={_typed(value)}" for key, value in changes.items()]


def _checkpointing(run: SizedRun) -> Iterator[tuple[str, object]]:
    for role, section in MODELS.items():
        key = f"{section}.enable_gradient_checkpointing"
        if role in run.memory.roles and get(run.config, key) is not True:
            yield key, True


def _offload(run: SizedRun) -> Iterator[tuple[str, object]]:
    for key in _switches(run, wanted=False):
        yield key, True


def _sharding(run: SizedRun) -> Iterator[tuple[str, object]]:
    for role, section in FSDP.items():
        key = f"{section}.fsdp_size"
        if role in run.memory.roles and get(run.config, key) != -1:
            yield key, -1


def _smaller_micro_batches(run: SizedRun) -> Iterator[tuple[str, object]]:
    too_large = {phase.name for _, phase, _ in run.over()}
    for role, (size_key, tokens_key) in SIZES.items():
        updates = run.plan.actor if role == "actor" else run.plan.critic
        if updates is None or f"{role} update" not in too_large:
            continue
        if updates.micro.max_tokens is not None:
            shared = run.plan.sequence_parallel[role]
            least = -(-run.plan.longest_sequence // shared)
            if updates.micro.max_tokens // shared > least:
                yield tokens_key, least
        else:
            now = updates.micro.size or 1
            while now > 1:
                now //= 2
                yield size_key, now


def _slightly_lower_utilization(run: SizedRun) -> Iterator[tuple[str, object]]:
    """A share for vLLM that leaves the others room and keeps most of the KV cache."""
    share = run.config.actor_rollout_ref.rollout.gpu_memory_utilization
    for key, lower in _lower_utilization(run):
        if isinstance(lower, float) and lower >= KEPT_SHARE * share:
            yield key, lower


def _lower_utilization(run: SizedRun) -> Iterator[tuple[str, object]]:
    """The largest share for vLLM that leaves the others room, if it holds more than weights."""
    assert run.devices.bytes is not None
    excess = [found for _, phase, found in run.over() if phase.name == "generation"]
    if excess and run.plan.rollout_name == "vllm":
        share = run.config.actor_rollout_ref.rollout.gpu_memory_utilization
        lower = math.floor((share - max(excess) / run.devices.bytes) * 100) / 100
        weights = run.policy.exported * DTYPE_BYTES[run.plan.rollout_dtype]
        if lower > weights / run.plan.tensor_parallel / run.devices.bytes + 0.05:
            yield UTILIZATION, lower


def _switches(run: SizedRun, wanted: bool) -> list[str]:
    """Return the switches of offload that are on, or off, of the roles that exist."""
    held = {"ref" if role == "teacher" else role for role in run.memory.roles}
    part = {"actor": "optimizer", "ref": "param", "critic": "optimizer"}
    keys = [f"{FSDP[role]}.{part[role]}_offload" for role in FSDP if role in held]
    keys += [f"{FSDP[role]}.param_offload" for role in SIZES if role in held]
    keys += [f"{MODELS[role]}.enable_activation_offload" for role in MODELS if role in held]
    return [key for key in keys if bool(get(run.config, key)) == wanted]


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
