"""Start the processes of a role.

Imports nothing heavy, so that processes can start before the driver imports torch.
"""

from typing import Any

from verlite.controller.cluster import RUN_MARK
from verlite.controller.placement import Device, Placement
from verlite.controller.records import WorkerSpec
from verlite.controller.worker_actor import WorkerActor
from verlite.controller.worker_handle import WorkerHandle
from verlite.masking import is_secret
from verlite.threads import users


def prestart(placement: Placement, role: str, *modules: str) -> None:
    """Start a role's processes and let them import modules. `spawn` builds the workers in them.

    Returns at once. A module that cannot be imported is reported by `spawn`, which needs it.

    On a busy machine with 2 cores, an actor and a rollout worker were ready after 37 s. Without
    prestart it took 42 s, and 70 s when the driver's imports did not run while Ray started (minima
    of alternating runs).
    """
    workers = start_processes(placement, role)
    placement.prestarted[role] = workers
    for worker in workers:
        worker.actor.load.remote(modules)


def start_processes(placement: Placement, role: str) -> list[WorkerHandle]:
    """Start one process for each rank of the role."""
    import ray

    driver_node = ray.get_runtime_context().get_node_id()
    specs = _specs(placement, role, driver_node)
    workers = [_start_process(placement, spec) for spec in specs]
    placement.cluster.supervisor.workers += workers
    return workers


def restart_process(placement: Placement, role: str, rank: int, restarts: int) -> WorkerHandle:
    """Start a new process for a rank whose process is dead, in the same bundle.

    Args:
        restarts: number of this restart of the rank, from 1.
    """
    import ray

    driver_node = ray.get_runtime_context().get_node_id()
    worker = _start_process(placement, _specs(placement, role, driver_node, restarts)[rank])
    placement.cluster.supervisor.workers.append(worker)
    return worker


def _start_process(placement: Placement, spec: WorkerSpec) -> WorkerHandle:
    """Start the process of one rank in the bundle of its first device."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    device = placement.roles[spec.role][spec.rank][0]
    share = placement.share(device)
    options: dict[str, Any] = {"num_cpus": share}
    if placement.kind == "cuda":
        options["num_gpus"] = share
    options["runtime_env"] = _runtime_env(placement, spec, placement.devices[device])
    strategy = PlacementGroupSchedulingStrategy(
        placement.group, placement_group_bundle_index=device
    )
    actor_class: Any = ray.remote(WorkerActor)
    actor = actor_class.options(
        scheduling_strategy=strategy, max_restarts=0, max_task_retries=0, **options
    ).remote(spec)
    return WorkerHandle(
        actor=actor,
        role=spec.role,
        rank=spec.rank,
        node_id=placement.devices[device].node_id,
        node=placement.devices[device].node,
        log=spec.log,
        info_ref=actor.process_info.remote(),
        heartbeat=spec.heartbeat.name if spec.heartbeat else "",
    )


def _runtime_env(placement: Placement, spec: WorkerSpec, device: Device) -> dict[str, Any]:
    """Return what Ray sets up before the worker's Python starts.

    The processes of a local cluster inherit the driver's variables, the run's mark among them.
    """
    cluster = placement.cluster
    runtime_env: dict[str, Any] = {}
    if not cluster.local:
        hidden = {name for name, _ in spec.secrets}
        variables = {name: text for name, text in cluster.environment.items() if name not in hidden}
        mark = _mark(placement, spec.role, spec.rank, spec.restarts)
        runtime_env["env_vars"] = {**variables, **device.env_vars, RUN_MARK: mark}
    elif device.env_vars:
        runtime_env["env_vars"] = dict(device.env_vars)
    python = device.python or cluster.py_executable
    if python:
        runtime_env["py_executable"] = python
    return runtime_env


def _specs(
    placement: Placement, role: str, driver_node: str, restarts: int = 0
) -> list[WorkerSpec]:
    """Return the specs of the role's ranks, in rank order."""
    ranks = placement.roles[role]
    first_devices = [placement.devices[devices[0]] for devices in ranks]
    one_node = len({device.node_id for device in placement.devices}) == 1
    logs = placement.cluster.run_dir / "logs"
    environment = {} if placement.cluster.local else placement.cluster.environment
    heartbeats = placement.cluster.heartbeats
    secrets = tuple(pair for pair in environment.items() if is_secret(*pair))
    specs = []
    for rank, (device, devices) in enumerate(zip(first_devices, ranks, strict=True)):
        gpu_ids = None
        if len(devices) > 1 and placement.kind == "cuda":
            gpu_ids = tuple(str(placement.devices[index].gpu_id) for index in devices)
        mark = None
        if device.node_id != driver_node:  # the driver's guardian does not see that machine
            mark = f"{RUN_MARK}={_mark(placement, role, rank, restarts)}"
        earlier = first_devices[:rank]
        specs.append(
            WorkerSpec(
                role=role,
                rank=rank,
                world_size=len(ranks),
                local_rank=sum(other.node_id == device.node_id for other in earlier),
                device_kind=placement.kind,
                devices=len(devices),
                devices_on_node=device.devices_on_node,
                address="127.0.0.1" if one_node else device.address,
                log=str(logs / f"{role}_{rank}.log"),
                threads=users(),
                gpu_ids=gpu_ids,
                mark=mark,
                head=placement.cluster.address,
                secrets=secrets,
                debugger=placement.cluster.debugger,
                stops_at_failures=placement.cluster.stops_at_failures,
                heartbeat=heartbeats.target(role, rank) if heartbeats else None,
                restarts=restarts,
            )
        )
    return specs


def _mark(placement: Placement, role: str, rank: int, restarts: int) -> str:
    """Return the mark of one process: a dead one's guardian kills whatever has its mark."""
    again = f".{restarts}" if restarts else ""
    return f"{placement.cluster.run_id}/{role}/{rank}{again}"
