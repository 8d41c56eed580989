"""The processes of a role's workers, before anything is built in them. Imports nothing heavy, so that they can start first of all."""

import os
from typing import Any

from verlite.controller.cluster import RUN_ID, WORKER, WORKERS_OF
from verlite.controller.host import WorkerActor, WorkerSpec
from verlite.controller.placement import Placement
from verlite.controller.supervise import WorkerHandle


def prestart(placement: Placement, role: str, *modules: str) -> None:
    """Start a role's processes and have them import modules while the driver is still busy with other things; `spawn` takes them over.

    It returns at once. A module that cannot be imported is told by `spawn`, which needs it.
    """
    placement.hosts[role] = start_hosts(placement, role)
    for member in placement.hosts[role]:
        member.handle.load.remote(modules)


def start_hosts(placement: Placement, role: str) -> list[WorkerHandle]:
    """Start one process on each of the role's places."""
    import ray

    seats = _seats(
        placement,
        role,
        str(placement.cluster.run_dir / "logs"),
        ray.get_runtime_context().get_node_id(),
    )
    members = [
        _start(placement, seat, devices[0])
        for seat, devices in zip(seats, placement.roles[role], strict=True)
    ]
    placement.cluster.supervisor.members += members
    return members


def _start(placement: Placement, seat: WorkerSpec, slot: int) -> WorkerHandle:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    share = placement.share(slot)
    options: dict[str, Any] = (
        {"num_cpus": share} if placement.kind == "cpu" else {"num_gpus": share, "num_cpus": share}
    )
    if (
        not placement.cluster.local
    ):  # the processes of a cluster of our own have the first two already
        marks = {RUN_ID: placement.cluster.run_id, WORKERS_OF: placement.cluster.run_id}
        if seat.mark is not None:
            marks[WORKER] = seat.mark.partition("=")[2]
        options["runtime_env"] = {"env_vars": marks}
    where = PlacementGroupSchedulingStrategy(placement.group, placement_group_bundle_index=slot)
    host: Any = ray.remote(WorkerActor)
    handle = host.options(
        scheduling_strategy=where, max_restarts=0, max_task_retries=0, **options
    ).remote(seat)
    return WorkerHandle(
        handle,
        seat.role,
        seat.rank,
        placement.slots[slot].node_id,
        seat.log,
        handle.presence.remote(),
    )


def _seats(placement: Placement, role: str, logs: str, driver_node: str) -> list[WorkerSpec]:
    """The role's ranks with their places."""
    homes = [placement.slots[devices[0]] for devices in placement.roles[role]]
    same_node = len({slot.node_id for slot in homes}) == 1
    seats = []
    for rank, (home, devices) in enumerate(zip(homes, placement.roles[role], strict=True)):
        ids = (
            tuple(str(placement.slots[device].gpu_id) for device in devices)
            if len(devices) > 1 and placement.kind == "cuda"
            else None
        )
        seats.append(
            WorkerSpec(
                role=role,
                rank=rank,
                world_size=len(homes),
                local_rank=sum(other.node_id == home.node_id for other in homes[:rank]),
                device_kind=placement.kind,
                devices=len(devices),
                devices_on_node=home.on_node,
                address="127.0.0.1" if same_node else home.address,
                log=f"{logs}/{role}_{rank}.log",
                threads=int(os.environ.get("OMP_NUM_THREADS") or 0),
                gpu_ids=ids,
                mark=None
                if home.node_id == driver_node
                else f"{WORKER}={placement.cluster.run_id}/{role}/{rank}",
            )
        )
    return seats
