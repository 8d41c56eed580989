"""Join a Ray cluster, or start one on this machine, and leave no process behind at the end."""

import atexit
import logging
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verlite.control import limits
from verlite.control.watch import InARow, Watch
from verlite.controller import guardian, head, leftovers, node, ray_internals, ray_node
from verlite.controller.failures import RayLost
from verlite.controller.heartbeat import Receiver
from verlite.controller.node_watch import Daemon, DaemonWatch
from verlite.controller.ray_internals import set_environment
from verlite.controller.supervise import Supervisor
from verlite.threads import cores

RUN_MARK = "VERLITE_RUN"
"""Environment variable that marks the processes of a run.

The driver and its children have the run's id. Ray, the workers and their children have
"RUN_ID/...". See `controller.guardian`.
"""
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's name for: 0 is a cluster of one node that uses loopback only."""
UV_RUN = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
TASK_EVENTS = "RAY_task_events_report_interval_ms"
"""Ray's name for: how often workers report their tasks to the GCS; 0 is never."""
TOKEN_FILE = "ray_token"
"""File in run_dir/logs with the token of a local cluster while it runs, for `ray debug`."""


@dataclass(eq=False)
class Cluster:
    """The connection of one run to Ray. As a context manager it stops all workers at exit.

    Attributes:
        local: whether this process started the cluster.
        run_dir: workers write their logs into run_dir/logs.
        debugger, stops_at_failures: see `connect`.
        heartbeats: receives those of the workers.
        reserved: Ray placement groups to remove at exit.
        environment: variables that workers on a joined cluster get. Those of a local cluster
            inherit the driver's.
        py_executable: command that starts the workers' Python; None: the nodes' own.
    """

    local: bool
    address: str
    run_id: str
    run_dir: Path
    supervisor: Supervisor
    debugger: str = ""
    stops_at_failures: bool = False
    heartbeats: Receiver | None = None
    reserved: list[Any] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    py_executable: str | None = None
    _guardian: "subprocess.Popen[bytes] | None" = None
    _guardian_stops: InARow = field(default_factory=InARow)
    _environment_before: dict[str, str | None] = field(default_factory=dict)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.shutdown(graceful=kind is None)

    def shutdown(self, graceful: bool = True) -> None:
        """Stop the workers, free the devices, leave or stop the cluster. Later calls do nothing.

        Args:
            graceful: give the workers a few seconds for their close().
        """
        global _current
        if _current is not self:
            return
        _current = None
        import ray

        self.supervisor.node_watch.stop()
        if self.heartbeats is not None:
            self.heartbeats.stop()
        daemons = self.supervisor.daemon_watch
        if daemons is not None:
            daemons.stop()
        try:
            # Calls into Ray may hang when one of its processes is lost.
            if (daemons and daemons.lost) or not ray.is_initialized():
                # At exit Ray would make its folder again, which the guardian has removed by then.
                atexit.unregister(ray.shutdown)
                return
            if graceful:
                bounded(lambda: _close_workers(self.supervisor), limits.CLOSE_S)
            if bounded(self._free_devices, limits.FREE_S):
                bounded(ray.shutdown, limits.RAY_END_S)
        finally:
            set_environment(self._environment_before)
            watch, self._guardian = self._guardian, None
            if watch is not None:
                guardian.dismiss(watch)
                leftovers.forget(self.run_dir)
            if self.local:
                (self.run_dir / "logs" / TOKEN_FILE).unlink(missing_ok=True)

    def _free_devices(self) -> None:
        import ray

        self.supervisor.stop_all()
        for group in self.reserved:
            ray.util.remove_placement_group(group)

    def _check_guardian(self, mark: str, folder: str | None, warn: Callable[[str], None]) -> None:
        """Start a new guardian if something has killed or stopped it."""
        if self._guardian is None:
            return
        state = node.process_state(node.process(self._guardian.pid))
        looks = self._guardian_stops.look(self._guardian.pid, state == "stopped by a signal")
        if state in ("gone", "dead"):
            what = "has ended"
        elif looks >= limits.FROZEN_LOOKS:
            what = "was stopped by a signal (SIGSTOP)"
        else:
            return
        before, self._guardian = self._guardian, guardian.start(mark, folder)
        warn(
            f"the process that cleans up after this run (guardian, process {before.pid}) {what}: a "
            "new one was started"
        )
        before.kill()
        before.wait()

    @property
    def ray_debug_command(self) -> str:
        """The command that connects Ray's legacy debugger to this cluster."""
        token = self.run_dir / "logs" / TOKEN_FILE
        access = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token} " if token.exists() else ""
        if self.local:  # otherwise Ray replaces 127.0.0.1 by the machine's address
            access += f"{LOOPBACK_ONLY}=0 "
        return f"{access}RAY_DEBUG=legacy ray debug --address={self.address}"


_current: Cluster | None = None


def connect(
    run_dir: str | Path,
    *,
    address: str | None = None,
    num_cpus: int | None = None,
    slots: int = 1,
    call_timeout_s: float = 3600.0,
    heartbeat_timeout_s: float = limits.HEARTBEAT_TIMEOUT_S,
    debugger: str = "",
    stops_at_failures: bool = False,
    temp_dir: str | None = None,
    environment: Mapping[str, str] | None = None,
    py_executable: str | None = None,
    wait_s: float = 0.0,
    preload: Sequence[str] = (),
    on_lost: Callable[[RayLost], None] = lambda error: None,
    warn: Callable[[str], None] = lambda text: None,
) -> Cluster:
    """Join a Ray cluster, or start one on this machine.

    The connection lasts until Cluster.shutdown or the end of this process.

    A cluster started here is local: it listens on loopback only, has no dashboard, and always ends
    with this process. Signals are left to the caller; see `trainer.stop`.

    Args:
        address: host:port of a cluster, or "local" to start one. None uses RAY_ADDRESS (which `ray
            job submit` sets), else the cluster that `verlite cluster start` or `ray start` has
            started on this machine, else starts one.
        num_cpus: CPU slots of a local cluster. None uses the number of cores, but at least `slots`,
            so that any placement can be tried on a laptop.
        call_timeout_s: default limit of one call to workers without progress, in seconds.
        heartbeat_timeout_s: see `control.watch.Watch`.
        debugger: what breakpoint() in a worker stops in: "debugpy", "legacy" (`ray debug`), or ""
            to refuse it. With "legacy" the token of a local cluster is written to TOKEN_FILE.
        stops_at_failures: whether workers wait for the debugger before they report a failure.
        temp_dir: folder for the sockets and logs of a local cluster. None creates a private folder
            and removes it at the end.
        environment, py_executable: see `Cluster`.
        wait_s: how long to wait for a cluster that is not there yet, in seconds.
        preload: modules that one process of a local cluster imports. The workers are forks of it;
            see `worker_fork`. Not on machines with GPUs, which a fork may not be able to use. With
            () every worker starts as a new process.
        on_lost: called in another thread if a process of Ray here is lost while the main thread
            does not wait for a call, or hangs in Ray.
        warn: prints a warning, from any thread.

    Raises:
        NoCluster: no cluster answers at the address, or this process cannot join it.
    """
    global _current
    if _current is not None:
        raise RuntimeError("this process is connected to a cluster: call Cluster.shutdown first")
    target = head.find(address)
    if target is not None:
        target = head.wait_for(target, address, wait_s)
    local = target is None
    run_path = Path(run_dir).resolve()
    (run_path / "logs").mkdir(parents=True, exist_ok=True)
    if leftovers.clean(run_path):
        warn("processes that an earlier run in this directory had left were ended")
    run_id = f"{os.getpid()}-{secrets.token_hex(8)}"
    private_dir = None
    if local and temp_dir is None:
        # In /tmp, because the paths of sockets must be short.
        private_dir = os.path.realpath(tempfile.mkdtemp(prefix="verlite-", dir="/tmp"))
        temp_dir = os.path.join(private_dir, "r")  # Ray gives its own folder mode 0777
    for_ray: dict[str, str | None] = {RUN_MARK: run_id, "RAY_USAGE_STATS_ENABLED": "0"}
    # Under `uv run`, ray.init would copy the current folder to every node and run workers there.
    for_ray[UV_RUN] = os.environ.get(UV_RUN, "0")
    for_ray |= ray_internals.hip_environment()
    if local:
        for_ray |= _local_environment()
    elif target is not None:
        for_ray |= head.token_environment(target)
    environment_before = {name: os.environ.get(name) for name in for_ray}
    breakpoint_before = os.environ.get("PYTHONBREAKPOINT")
    set_environment(for_ray)
    mark = f"{RUN_MARK}={run_id}"
    watch = guardian.start(mark, private_dir)
    leftovers.note(run_path, mark, private_dir)
    os.environ[RUN_MARK] = f"{run_id}/ray"  # for the processes that Ray starts
    try:
        import ray

        if target is None:
            _start_local(
                num_cpus or max(cores(), slots),
                temp_dir,
                preload,
                lambda: _kill_ray(mark, private_dir),
            )
        else:
            _join(target)
    except BaseException:
        set_environment(environment_before)
        guardian.dismiss(watch)
        raise
    os.environ[RUN_MARK] = run_id
    # Ray's hook for drivers would wait for a debugger without a message. The driver has a terminal.
    set_environment({"PYTHONBREAKPOINT": breakpoint_before})
    _redirect_ray_messages(run_path / "logs" / "ray.log")
    if local and debugger == "legacy":
        _write_token(run_path / "logs" / TOKEN_FILE)
    host = "127.0.0.1" if local else ray_internals.own_address()
    ranks = Watch(heartbeat_timeout_s)
    cluster = Cluster(
        local,
        ray.get_runtime_context().gcs_address,
        run_id,
        run_path,
        Supervisor(call_timeout_s, ranks),
        debugger,
        stops_at_failures,
        heartbeats=Receiver(host, ranks),
        environment=dict(environment or {}),
        py_executable=py_executable,
        _guardian=watch,
        _environment_before=environment_before,
    )
    _current = cluster
    cluster.supervisor.daemon_watch = DaemonWatch(
        _local_daemons if local else lambda: _joined_daemons(cluster.address),
        on_lost,
        lambda: cluster._check_guardian(mark, private_dir, warn),
    )
    atexit.register(cluster.shutdown, graceful=False)
    return cluster


def _local_daemons() -> list[Daemon]:
    """Return Ray's processes of the local cluster."""
    return [
        Daemon(name, node.process(pid), tuple(logs))
        for name, pid, logs in ray_internals.local_daemons()
    ]


def _joined_daemons(address: str) -> list[Daemon]:
    """Return the processes of the cluster at this address that `verlite cluster start` has started
    on this machine."""
    record = ray_node.load()
    if record is None or record.stopping or record.address != address:
        return []
    logs = f"{record.session_dir}/logs"
    return [
        Daemon(name, node.Process(pid, started), (f"{logs}/{name}.err", f"{logs}/{name}.out"))
        for name, pid, started in record.daemons
        if name in ray_node.DAEMONS
    ]


def bounded(function: Callable[[], object], seconds: float) -> bool:
    """Run a function in a thread for at most `seconds`. Its exceptions are dropped.

    The function may be `ray.shutdown`, which takes SIGTERM away from its handler: the handler is
    set again every few milliseconds, and once more at the end.

    Returns whether it has ended. A thread that has not is abandoned: it may hang in Ray.
    """

    def run() -> None:
        with suppress(Exception):
            function()

    thread = threading.Thread(target=run, name="ending", daemon=True)
    thread.start()
    until = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < until:
        thread.join(limits.RESTORE_EVERY_S)
        ray_internals.restore_sigterm()
    ray_internals.restore_sigterm()  # the function may have ended before the first look
    return not thread.is_alive()


def lost_ray() -> RayLost | None:
    """Return the error about a lost process of Ray here, which explains other errors. Else None."""
    watch = None if _current is None else _current.supervisor.daemon_watch
    return None if watch is None else watch.check()


def current() -> Cluster | None:
    """Return the cluster that this process has started or joined; None in workers."""
    return _current


def _local_environment() -> dict[str, str]:
    """Return the environment variables for Ray of a local cluster."""
    environment = {
        **daemon_environment(),
        LOOPBACK_ONLY: "0",
        # Ray would start a process for each CPU slot before it knows the run's job and roles.
        "RAY_prestart_worker_first_driver": "0",
        # Ray's default of 60 is too short for imports on a machine with many workers per core.
        "RAY_worker_register_timeout_seconds": "300",
        # Ray would keep a record of each call for its dashboard, which a local cluster lacks.
        TASK_EVENTS: os.environ.get(TASK_EVENTS, "0"),
    }
    if "RAY_AUTH_MODE" not in os.environ:
        # Without a token of ours, Ray would write one into the home directory.
        environment["RAY_AUTH_MODE"] = "token"
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return environment


def daemon_environment() -> dict[str, str]:
    """Return the environment variables for the Ray daemons of any node."""
    # Ray's default of 15 would let every other process on the machine slow the run down.
    return {"RAY_worker_niceness": "0", **ray_internals.hip_environment()}


def _start_local(
    num_cpus: int, temp_dir: str | None, preload: Sequence[str], clean: Callable[[], None]
) -> None:
    """Start a cluster on this machine, with up to three tries.

    Ray waits 30 s for its own processes, which is too short on a busy laptop. There is no further
    try while `ray.shutdown` still runs: it would end what the next try starts.
    """
    import ray

    for is_last_try in (False, False, True):
        try:
            with (
                ray_internals.lean_head(),
                ray_internals.without_stop_signals(),  # until this process's handlers are back
                ray_internals.keep_signal_handlers(),
                ray_internals.forked_workers(preload),
            ):
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=_object_store_bytes(),
                    _temp_dir=temp_dir,
                )
            return
        except KeyboardInterrupt:  # often at the end of the above
            if ray.is_initialized():
                bounded(ray.shutdown, limits.RAY_END_S)
            raise
        except Exception as error:  # Ray has no narrower class for it
            has_ended = bounded(ray.shutdown, limits.RAY_END_S)
            clean()
            timed_out = "timed out" in str(error)
            if is_last_try or not timed_out or not has_ended:
                if not timed_out and not isinstance(error, (RuntimeError, OSError)):
                    raise
                raise RayLost(
                    f"Ray did not start on this machine: {str(error).strip()}\n"
                    "  The same command tries it again."
                ) from error


def _write_token(path: Path) -> None:
    """Write the token of this process's cluster into a file that only its user can read."""
    token = os.environ.get("RAY_AUTH_TOKEN")
    if token:
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)


def _join(address: str) -> None:
    """Join the cluster at host:port. Raises NoCluster if Ray refuses, for its own reason."""
    import ray

    try:
        with ray_internals.keep_signal_handlers():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        reason = str(error.__cause__ or error).strip()
        raise head.NoCluster(f"Ray could not join the cluster at {address}: {reason}") from error


def _kill_ray(mark: str, private_dir: str | None) -> None:
    """Kill the processes of a failed start."""
    if os.path.isdir("/proc/self"):
        guardian.kill(mark, True, *([private_dir] if private_dir else []))


def _redirect_ray_messages(path: Path) -> None:
    """Write Ray's messages about ended processes to a file. The supervisor reports the cause."""

    def write(lines: Sequence[str]) -> None:
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)

    ray_internals.redirect_messages(write)


def _object_store_bytes() -> int:
    """Return a tenth of memory, but at least 2 GiB, and at most 80% of /dev/shm.

    Ray takes the memory only as it is used.
    """
    import psutil

    size = int(max(2 << 30, psutil.virtual_memory().total // 10))
    shm = Path("/dev/shm")
    free = shutil.disk_usage(shm).free if shm.is_dir() else size
    if free < 256 << 20:
        return size
    return min(size, int(free * 0.8))


def _close_workers(supervisor: Supervisor) -> None:
    """Give the workers a few seconds to close. Failures no longer matter to the run."""
    import ray

    refs = [worker.actor.close.remote() for worker in supervisor.workers]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=limits.CLOSE_S)
