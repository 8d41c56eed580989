"""Join a Ray cluster, or start one on this machine, and leave no process behind at the end."""

import atexit
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from verlite.controller import guardian, node, ray_internals
from verlite.controller.stop import apply_default_action, terminate
from verlite.controller.supervise import Supervisor

RUN_MARK = "VERLITE_RUN"
"""Environment variable that marks the processes of a run.

The driver and its children have the run's id. Ray, the workers and their children have
"RUN_ID/...". See `controller.guardian`.
"""
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of a gRPC client: the HTTP/2 preface and empty settings (RFC 9113, section 3.4).
The server's first frame contains settings, too."""
HTTP2_SETTINGS = 4


class NoCluster(ConnectionError):
    """No Ray cluster answers at the given address."""


@dataclass(eq=False)
class Cluster:
    """The connection of one run to Ray. As a context manager it stops all workers at exit.

    Attributes:
        local: whether this process started the cluster.
        run_dir: workers write their logs into run_dir/logs.
        reserved: Ray placement groups to remove at exit.
        sent_bytes, received_bytes: size of the batches that passed through the driver.
    """

    local: bool
    address: str
    run_id: str
    run_dir: Path
    supervisor: Supervisor
    reserved: list[Any] = field(default_factory=list)
    sent_bytes: int = 0
    received_bytes: int = 0
    _guardian: "subprocess.Popen[bytes] | None" = None
    _environment_before: dict[str, str | None] = field(default_factory=dict)
    _sigterm_before: Any = None
    _pid: int = field(default_factory=os.getpid)

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

        try:
            if graceful and ray.is_initialized():
                _close_workers(self.supervisor)
        finally:
            if ray.is_initialized():
                self.supervisor.stop_all()
                for group in self.reserved:
                    ray.util.remove_placement_group(group)
            ray.shutdown()
            if self._sigterm_before is not None:
                signal.signal(signal.SIGTERM, self._sigterm_before)
            _set_environment(self._environment_before)
            if self._guardian is not None:
                guardian.dismiss(self._guardian)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            apply_default_action(number)
            return
        # A second SIGTERM must not interrupt the cleanup.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        terminate("SIGTERM")


_current: Cluster | None = None


def connect(
    run_dir: str | Path,
    *,
    address: str | None = None,
    num_cpus: int | None = None,
    slots: int = 1,
    call_timeout_s: float = 3600.0,
    temp_dir: str | None = None,
) -> Cluster:
    """Join a Ray cluster, or start one on this machine.

    The connection lasts until Cluster.shutdown or the end of this process.

    A cluster started here is local: it listens on loopback only, has no dashboard, and always ends
    with this process. SIGTERM raises Terminated in the main thread.

    Args:
        address: host:port of a cluster, or "local" to start one. None uses RAY_ADDRESS (which `ray
            job submit` sets), else a cluster that `ray start` has started on this machine, else
            starts one.
        num_cpus: CPU slots of a local cluster. None uses the number of cores, but at least `slots`,
            so that any placement can be tried on a laptop.
        call_timeout_s: default time limit of one call to workers, in seconds.
        temp_dir: folder for the sockets and logs of a local cluster. None creates a private folder
            and removes it at the end.

    Raises:
        NoCluster: no cluster answers at the address.
    """
    global _current
    if _current is not None:
        raise RuntimeError("this process is connected to a cluster: call Cluster.shutdown first")
    target = find(address)
    local = target is None
    run_path = Path(run_dir).resolve()
    (run_path / "logs").mkdir(parents=True, exist_ok=True)
    run_id = f"{os.getpid()}-{secrets.token_hex(8)}"
    private_dir = None
    if local and temp_dir is None:
        # In /tmp, because the paths of sockets must be short.
        private_dir = os.path.realpath(tempfile.mkdtemp(prefix="verlite-", dir="/tmp"))
        temp_dir = private_dir
    environment = {RUN_MARK: run_id, "RAY_USAGE_STATS_ENABLED": "0"}
    if local:
        environment |= _local_environment()
    environment_before = {name: os.environ.get(name) for name in environment}
    sigterm_before = signal.getsignal(signal.SIGTERM)  # ray.init replaces the handler
    _set_environment(environment)
    mark = f"{RUN_MARK}={run_id}"
    watch = guardian.start(mark, private_dir)
    os.environ[RUN_MARK] = f"{run_id}/ray"  # for the processes that Ray starts
    try:
        import ray

        if target is None:
            _start_local(
                num_cpus or max(node.cores(), slots),
                temp_dir,
                lambda: _kill_ray(mark, private_dir),
            )
        else:
            ray.init(address=target, log_to_driver=False, logging_level=logging.ERROR)
    except BaseException:
        _set_environment(environment_before)
        guardian.dismiss(watch)
        raise
    os.environ[RUN_MARK] = run_id
    _redirect_ray_messages(run_path / "logs" / "ray.log")
    cluster = Cluster(
        local,
        ray.get_runtime_context().gcs_address,
        run_id,
        run_path,
        Supervisor(call_timeout_s),
        _guardian=watch,
        _environment_before=environment_before,
    )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, cluster._on_sigterm)
        cluster._sigterm_before = sigterm_before
    _current = cluster
    atexit.register(cluster.shutdown, graceful=False)
    return cluster


def current() -> Cluster | None:
    """Return the cluster that this process has started or joined; None in workers."""
    return _current


def find(address: str | None) -> str | None:
    """Return the address of the cluster to join, after checking that it answers; None to start one.

    Raises:
        NoCluster: no cluster answers at the address.
    """
    source = "ray_kwargs.ray_init.address" if address else "RAY_ADDRESS"
    wanted = address or os.environ.get("RAY_ADDRESS") or ""
    if wanted == "local":
        return None
    if wanted.startswith(("ray://", "http://", "https://")):
        raise NoCluster(
            f"{source}={wanted}: this process must run inside the cluster. Submit it with "
            f"`ray job submit --address={wanted} -- <command>`, or give the host:port that "
            "`ray start --head` printed."
        )
    if wanted and wanted != "auto":
        if not _answers(wanted):
            raise NoCluster(
                f"{source}={wanted} does not answer as a Ray cluster does. Start the cluster, give "
                "the host:port that `ray start --head` printed (not the dashboard's), or unset it "
                "to run on this machine."
            )
        return wanted
    found = ray_internals.running_cluster()
    if found and _answers(found):
        return found
    if wanted == "auto":
        raise NoCluster(
            f"{source}=auto, but no cluster runs on this machine. "
            "Start one with `ray start --head`."
        )
    return None


def _answers(address: str) -> bool:
    """Return whether a gRPC server, such as Ray's, answers there.

    Ray itself would try for minutes to find out, and then end the process.
    """
    parts = urllib.parse.urlsplit("//" + address)
    try:
        server = (parts.hostname or "", parts.port or 6379)
        with socket.create_connection(server, timeout=5) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return True  # the answer would be encrypted
            connection.sendall(HTTP2_GREETING)
            reply = connection.recv(9)
            return len(reply) > 3 and reply[3] == HTTP2_SETTINGS
    except (OSError, ValueError):
        return False


def _local_environment() -> dict[str, str]:
    """Return the environment variables for Ray of a local cluster."""
    environment = {
        # Ray's default of 15 would let every other process on the machine slow the run down.
        "RAY_worker_niceness": "0",
        # Ray's name for: single node, loopback only.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    if "RAY_AUTH_MODE" not in os.environ:
        # Without a token of ours, Ray would write one into the home directory.
        environment["RAY_AUTH_MODE"] = "token"
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    rocr = os.environ.get("ROCR_VISIBLE_DEVICES")
    if rocr and "HIP_VISIBLE_DEVICES" not in os.environ:
        # Ray refuses ROCR's variable alone, which Slurm sets. HIP numbers the GPUs that it leaves.
        environment["HIP_VISIBLE_DEVICES"] = ",".join(map(str, range(len(rocr.split(",")))))
    return environment


def _start_local(num_cpus: int, temp_dir: str | None, clean: Callable[[], None]) -> None:
    """Start a cluster on this machine, with up to three tries.

    Ray waits 30 s for its own processes, which is too short on a busy laptop.
    """
    import ray

    for is_last_try in (False, False, True):
        try:
            with ray_internals.lean_head():
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
        except Exception as error:  # Ray has no narrower class for it
            ray.shutdown()
            clean()
            if is_last_try or "timed out" not in str(error):
                raise


def _kill_ray(mark: str, private_dir: str | None) -> None:
    """Kill the processes of a failed start."""
    if os.path.isdir("/proc/self"):
        guardian.kill(mark, True, *([private_dir] if private_dir else []))


def _redirect_ray_messages(path: Path) -> None:
    """Write Ray's messages about ended processes to a file. The supervisor reports the cause."""

    def write(lines: Sequence[str]) -> None:
        with path.open("a", encoding="utf-8") as file:
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
        ray.wait(refs, num_returns=len(refs), timeout=10)


def _set_environment(values: Mapping[str, str | None]) -> None:
    """Set environment variables, or remove those with None, and have Ray read them again."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    ray_internals.reload_environment()
