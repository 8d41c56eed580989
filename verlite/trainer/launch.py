"""Launch a run of main_ppo: its first checks, Ray, and worker processes.

`command.train_rl` goes through a run: `launched`, then `build.open_run`, the loop in `ppo.py`, and
`build.finalize`.

Launching takes two files because of torch. Importing torch and transformers takes seconds in the
driver and in every worker, and so does starting Ray. This file imports neither, so that both happen
at the same time and a wrong path is reported at once. `build.py` has everything that needs torch.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from verlite.config import debug
from verlite.config.load import Loaded, dump
from verlite.config.plan import Plan, make_plan
from verlite.config.rules import check
from verlite.config.schema import Config
from verlite.controller.cluster import Cluster, connect, current
from verlite.controller.placement import Placement, device_kind, reserve
from verlite.controller.stacks import answer_requests
from verlite.controller.worker_start import prestart
from verlite.importing import import_ahead
from verlite.machine import visible_gpus
from verlite.spec.catalog import ENGINES
from verlite.trainer.checkpoints import Checkpoint
from verlite.trainer.checks import cluster_wait_s
from verlite.trainer.display import Display
from verlite.trainer.errors import RunRefused
from verlite.trainer.opening import environment, in_run_directory, rl_preflight
from verlite.trainer.preflight import FILES, Preflight, walk
from verlite.trainer.stop import Stop
from verlite.workers.roles import ROLES

DRIVER_PRELOAD = "verlite.trainer.build"
"""Module that the driver imports in a thread while Ray and the worker processes start."""


@dataclass(frozen=True)
class Launch:
    """A run whose first checks are done, and its Ray."""

    found: Preflight
    """What the checks have found."""
    stop: Stop
    """Whether a signal has requested a stop."""
    config_yaml: str
    """The configuration as YAML text, with the origin of each value, for config.yaml and the
    trackers."""
    display: Display
    placement: Placement | None = None
    """Reserved devices, on which worker processes are starting.

    None if the run joins an existing Ray cluster, or if the checkpoint is from the last step.
    """


@contextmanager
def launched(loaded: Loaded, stop: Stop) -> Iterator[Launch]:
    """Run the checks that do not need torch, then start Ray and the worker processes.

    The run directory stays locked, and a local Ray cluster stays up, until the context ends.

    An existing Ray cluster is not joined here: other jobs may be waiting for its devices.
    `open_run` joins it after all checks.

    Raises:
        REFUSED, CheckpointError: see `preflight.walk`.
        NoCluster, ResourcesMissing: see `connect` and `reserve`.
    """
    display = Display(log=stop.log)
    stop.where = display.where
    found = rl_preflight(loaded.config)
    found.say, found.warn = display.info, display.warn
    config, plan = found.config, found.plan
    with in_run_directory(found, stop), ExitStack() as stack:
        stack.enter_context(environment(config.ray_kwargs.ray_init.runtime_env.env_vars))
        stack.enter_context(answer_requests(found.run_dir, current))
        with display.phase("checking the configuration and the files"):
            walk(found, FILES)
        launch = Launch(found, stop, dump(loaded), display)
        if found.ray_address is not None or nothing_left(plan, found.checkpoint):
            yield launch
            return
        with display.phase("starting Ray"):
            # Ray must start in the main thread: its processes end with the thread that started
            # them.
            importing = threading.Thread(
                target=import_ahead, args=(DRIVER_PRELOAD,), name="imports"
            )
            importing.start()
            cluster = stack.enter_context(connect_ray(config, plan, "local", stop))
            placement = reserve_devices(cluster, config, plan)
            prestart_workers(placement, plan)
            importing.join()
        yield replace(launch, placement=placement)


def nothing_left(plan: Plan, checkpoint: Checkpoint | None) -> bool:
    """Whether the checkpoint to resume from is already from the last step."""
    if checkpoint is None or plan.total_steps is None:
        return False
    return checkpoint.step >= plan.total_steps


def prestart_workers(placement: Placement, plan: Plan) -> None:
    """Start the processes of every role and let them import what they need. Returns at once."""
    for role in plan.roles:
        modules = preloads(role)
        if role == "rollout":
            engine = ENGINES.get(plan.rollout_name, plan.rollout_name)
            modules.append(engine.partition(":")[0])
        prestart(placement, role, *modules)


def preloads(role: str) -> list[str]:
    """Return the modules that a role's processes import before they are built."""
    return [ROLES[role].worker.partition(":")[0], *ROLES[role].preload]


def connect_ray(config: Config, plan: Plan, address: str | None, stop: Stop) -> Cluster:
    """Connect to Ray at `address`, or start a new cluster for "local". Raises NoCluster."""
    ray_init = config.ray_kwargs.ray_init
    forkable = not visible_gpus()  # imports may look at the GPUs, which no fork can use then
    return connect(
        config.trainer.default_local_dir,
        address=address,
        num_cpus=ray_init.num_cpus,
        slots=plan.n_devices,
        call_timeout_s=config.trainer.phase_timeout_s,
        heartbeat_timeout_s=config.trainer.heartbeat_timeout_s,
        environment=ray_init.runtime_env.env_vars,
        py_executable=ray_init.runtime_env.py_executable,
        debugger=debug.debugger(config),
        stops_at_failures=debug.stops_at_failures(config),
        wait_s=cluster_wait_s(config),
        preload=[name for role in plan.roles for name in preloads(role)] if forkable else [],
        on_lost=stop.end_at_once,
        warn=stop.warn,
    )


def plan_on(cluster: Cluster, config: Config, plan: Plan) -> Plan:
    """Return the plan for the cluster's kind of device, which trainer.device=auto resolves to.

    A driver without a GPU may join a cluster with GPUs. The plan says which devices form an
    engine, so it must be right before they are reserved.

    Raises:
        RunRefused: a rule does not allow the configuration on that kind of device.
    """
    if cluster.local or config.trainer.device != "auto":
        return plan
    kind = device_kind()
    if kind == plan.device:
        return plan
    resolved = copy.deepcopy(config)
    resolved.trainer.device = kind
    resolved.ray_kwargs.ray_init.address = cluster.address
    problems = check(resolved, files=False)
    if problems:
        raise RunRefused(
            f"trainer.device=auto is {kind} on the cluster at {cluster.address}, where:\n"
            + "\n".join(f"  {problem}" for problem in problems)
        )
    return make_plan(config, kind)


def reserve_devices(cluster: Cluster, config: Config, plan: Plan) -> Placement:
    """Reserve the devices of all roles. Raises ResourcesMissing."""
    kind: Any = plan.device
    return reserve(
        cluster,
        devices_of_ranks(plan),
        nodes=plan.nnodes,
        devices_per_node=plan.devices_per_node,
        kind=kind,
        wait_s=config.trainer.resource_wait_s,
        env_vars=plan.env_vars,
        python=plan.python,
    )


def devices_of_ranks(plan: Plan) -> dict[str, list[int] | list[list[int]]]:
    """Devices of each rank of each role. A rollout engine with tensor parallelism has several."""
    size = plan.tensor_parallel
    if size == 1:
        return dict(plan.placement)
    devices = plan.placement["rollout"]
    engines = [devices[i : i + size] for i in range(0, len(devices), size)]
    return {**plan.placement, "rollout": engines}
