"""Plain values that the driver and its workers exchange."""

from dataclasses import dataclass, field

from verlite.controller.heartbeat import Target
from verlite.controller.node import Process


@dataclass(frozen=True)
class WorkerSpec:
    """The rank, device and log file of one worker.

    Attributes:
        role: name of the worker's role, such as "actor".
        rank: index among the workers of the role.
        world_size: number of workers of the role.
        local_rank: index among the workers of the role on the same node.
        device_kind: "cpu" or "cuda".
        devices: number of devices that this worker uses.
        devices_on_node: number of devices of the run on the worker's node.
        address: IP address of the node, or loopback if the whole run is on one node.
        log: path of the worker's log file.
        threads: threads for torch and OpenMP. 0 means its devices' share of the node's cores.
        gpu_ids: GPUs of a worker with several; None: the one that Ray assigns to its actor.
        debugger: what breakpoint() stops in: "debugpy", "legacy" (`ray debug`), or "" to refuse it.
        heartbeat: where to send heartbeats; None: nowhere.
        stops_at_failures: whether the worker waits for the debugger before it reports a failure.
        restarts: number of earlier processes of this rank.
        mark: NAME=VALUE in the environment of this worker and its children, if the worker needs its
            own guardian because the driver's guardian runs on another machine; else None.
        head: host:port of Ray's head. The guardian ends a worker that loses it.
        secrets: environment variables, as (name, value), that must not be in Ray's runtime
            environment: Ray shows that in its dashboard and on command lines.
    """

    role: str
    rank: int
    world_size: int
    local_rank: int
    device_kind: str
    devices: int
    devices_on_node: int
    address: str
    log: str
    threads: int = 0
    gpu_ids: tuple[str, ...] | None = None
    mark: str | None = None
    head: str | None = None
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    debugger: str = ""
    stops_at_failures: bool = False
    heartbeat: Target | None = None
    restarts: int = 0


@dataclass(frozen=True)
class Failed:
    """An exception in a worker, as plain values that can always be sent to the driver.

    Attributes:
        when: time of the exception, in seconds since the epoch.
        pickled: the exception itself; None if it cannot be pickled.
    """

    type_name: str
    message: str
    traceback: str
    when: float
    pickled: bytes | None = None


@dataclass(frozen=True)
class ProcessInfo:
    """A worker's process, and the node's count of out-of-memory kills when the worker started."""

    process: Process
    oom_kills: int
