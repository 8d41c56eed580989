"""Joining a Ray cluster, or starting one on this machine, and leaving nothing behind."""

import atexit
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from verlite.controller import guardian, node
from verlite.controller.supervise import Supervisor, die_of, terminate

RUN_ID = "VERLITE_RUN_ID"
"""Environment variable that marks every process of a run: Ray's, the workers, their children and the driver's."""
WORKERS_OF = "VERLITE_WORKERS_OF"
"""Environment variable that marks Ray's processes, the workers and their children, but not the driver's."""
WORKER = "VERLITE_WORKER"
"""Environment variable that marks one worker on another machine and its children."""

HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a gRPC client says first: HTTP/2's preface and empty settings (RFC 9113, 3.4). The server's first frame is settings too."""
HTTP2_SETTINGS = 4


class NoCluster(ConnectionError):
    """No Ray cluster answers where one was said to be."""


@dataclass(eq=False)
class Cluster:
    """A connection to Ray for one run. As a context manager it ends all workers on the way out, whatever the reason.

    local: started by us, for us. address: of the cluster. run_dir: workers log into run_dir/logs. sent_bytes, received_bytes: what
    passed through the driver.
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
    _undo: dict[str, str | None] = field(default_factory=dict)
    _sigterm: Any = None
    _process: int = field(default_factory=os.getpid)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.shutdown(graceful=kind is None)

    def shutdown(self, graceful: bool = True) -> None:
        """End the workers, free the devices, leave or stop the cluster. May be repeated.

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
                self.supervisor.end_all()
                for group in self.reserved:
                    ray.util.remove_placement_group(group)
            ray.shutdown()
            if self._sigterm is not None:
                signal.signal(signal.SIGTERM, self._sigterm)
            _set_environment(self._undo)
            if self._guardian is not None:
                guardian.dismiss(self._guardian)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            die_of(number)
        else:
            signal.signal(
                signal.SIGTERM, signal.SIG_IGN
            )  # once is enough: cleaning up must not be interrupted
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
    """Join a cluster, or start one on this machine, for the rest of this process or until Cluster.shutdown.

    address: host:port, "local" to start one whatever runs here, or None: RAY_ADDRESS (which `ray job submit` sets), else a cluster that
    `ray start` has left running on this machine, else a local one.
    num_cpus: CPU slots of a local cluster; None: the cores, and at least `slots`, so that a laptop can try any placement.
    call_timeout_s: default limit of one call to workers.
    temp_dir: of a local cluster's sockets and logs; None: a private one, removed at the end.

    A local cluster listens on loopback only, has no dashboard, and ends with this process, however that ends. On SIGTERM the main thread
    gets Terminated. Raises NoCluster when no cluster answers at the address.
    """
    global _current
    if _current is not None:
        raise RuntimeError("this process has a cluster already: shut it down first")
    target = find(address)
    run_path = Path(run_dir).resolve()
    (run_path / "logs").mkdir(parents=True, exist_ok=True)
    run_id = f"{os.getpid()}-{secrets.token_hex(8)}"
    changes = {RUN_ID: run_id, WORKERS_OF: run_id, "RAY_USAGE_STATS_ENABLED": "0"}
    private_dir: str | None = None
    before = signal.getsignal(signal.SIGTERM)  # ray.init replaces it
    if target is None:
        changes["RAY_worker_niceness"] = (
            "0"  # Ray's 15 would let anything else on the machine starve the run
        )
        changes["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = (
            "0"  # Ray's name for: single node, loopback only
        )
        if (
            "RAY_AUTH_MODE" not in os.environ
        ):  # else Ray would write a token into the home directory
            changes |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        if temp_dir is None:
            temp_dir = private_dir = os.path.realpath(
                tempfile.mkdtemp(prefix="verlite-", dir="/tmp")
            )  # paths of sockets must be short
    undo = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    watch = guardian.start(f"{RUN_ID}={run_id}", f"{WORKERS_OF}={run_id}", private_dir)
    try:
        if target is None:
            _start_local(
                num_cpus or max(node.cores(), slots),
                temp_dir,
                lambda: _kill_ray(run_id, watch.pid, private_dir),
            )
        else:
            import ray

            ray.init(address=target, log_to_driver=False, logging_level=logging.ERROR)
    except BaseException:
        _set_environment(undo)
        guardian.dismiss(watch)
        raise
    import ray

    _redirect_ray_messages(run_path / "logs" / "ray.log")
    where = ray.get_runtime_context().gcs_address
    cluster = Cluster(
        target is None,
        where,
        run_id,
        run_path,
        Supervisor(call_timeout_s),
        _guardian=watch,
        _undo=undo,
    )
    os.environ.pop(WORKERS_OF)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, cluster._terminate)
        cluster._sigterm = before
    _current = cluster
    atexit.register(cluster.shutdown, graceful=False)
    return cluster


def current() -> Cluster | None:
    """The cluster that this process has started or joined; workers have none."""
    return _current


def find(address: str | None) -> str | None:
    """Address of the cluster to join, known to answer; None to start one."""
    source = "ray_kwargs.ray_init.address" if address else "RAY_ADDRESS"
    wanted = address or os.environ.get("RAY_ADDRESS") or ""
    if wanted == "local":
        return None
    if wanted.startswith(("ray://", "http://", "https://")):
        raise NoCluster(
            f"{source}={wanted}: this process must run inside the cluster; submit it with "
            f"`ray job submit --address={wanted} -- <command>`, or give the host:port that `ray start --head` printed"
        )
    if wanted and wanted != "auto":
        if not _answers(wanted):
            raise NoCluster(
                f"{source}={wanted} does not answer as a Ray cluster does: start it, give the host:port that `ray start --head` printed "
                "(not the dashboard's), or unset it to run on this machine"
            )
        return wanted
    from ray._private.utils import read_ray_address

    found = read_ray_address()
    if found and _answers(found):
        return found
    if wanted == "auto":
        raise NoCluster(
            f"{source}=auto, but no cluster runs on this machine: start one with `ray start --head`"
        )
    return None


def _answers(address: str) -> bool:
    """Whether gRPC is spoken there, as Ray does. Ray itself would try for minutes to find that out, then end the process."""
    parts = urllib.parse.urlsplit("//" + address)
    try:
        with socket.create_connection(
            (parts.hostname or "", parts.port or 6379), timeout=5
        ) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return True  # what is said there is encrypted
            connection.sendall(HTTP2_GREETING)
            reply = connection.recv(9)
            return len(reply) > 3 and reply[3] == HTTP2_SETTINGS
    except (OSError, ValueError):
        return False


def _start_local(num_cpus: int, temp_dir: str | None, clean: Callable[[], None]) -> None:
    """Start a cluster on this machine. Ray gives its own processes 30 s to come up, too little on a busy laptop: it gets three tries."""
    import ray

    for last in (False, False, True):
        try:
            with _lean_head():
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
        except Exception as error:  # Ray raises no narrower class here
            ray.shutdown()
            clean()
            if last or "timed out" not in str(error):
                raise


def _kill_ray(run_id: str, guardian_pid: int, private_dir: str | None) -> None:
    """End what a failed start has left."""
    if os.path.isdir("/proc/self"):
        writing = guardian.writing(private_dir) if private_dir else []
        for pid in {*guardian.marked(f"{WORKERS_OF}={run_id}"), *writing} - {guardian_pid}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def _lean_head() -> Iterator[None]:
    """Start a head node without autoscaler, log monitor and dashboard process. Its agent gets no servers, and this process does not
    import the dashboard to see whether it could have them.

    Ray has no option for it, and they are half of its start-up time. Where a version of Ray has no such method, it starts as usual.
    """
    from ray import _raylet
    from ray._private import utils
    from ray._private.node import Node

    nothing = (
        (Node, name, lambda self, *args, **kwargs: None)
        for name in ("start_monitor", "start_log_monitor", "start_api_server")
    )
    no_dashboard = (utils, "get_dashboard_dependency_error", lambda: ImportError("not used"))
    tells = hasattr(
        _raylet, "persist_port"
    )  # an agent without servers says that it has none; else Ray complains on the terminal
    changes = [
        change for change in (*nothing, *([no_dashboard] if tells else [])) if hasattr(*change[:2])
    ]
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        yield
    finally:
        for original in saved:
            setattr(*original)


def _redirect_ray_messages(path: Path) -> None:
    """Ray prints a paragraph on the driver's output for every process that ends. Our reports say it better: into a file with it."""
    from ray._private import worker

    def write(data: Mapping[str, Any], *args: object, **kwargs: object) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in data["lines"])

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = write


def _object_store_bytes() -> int:
    """2 GiB, more on large machines (a tenth of memory), never more than most of /dev/shm. Ray takes the memory only as it is used."""
    import psutil

    size = max(2 << 30, psutil.virtual_memory().total // 10)
    shm = Path("/dev/shm")
    free = shutil.disk_usage(shm).free if shm.is_dir() else size
    return size if free < 256 << 20 else min(size, int(free * 0.8))


def _close_workers(supervisor: Supervisor) -> None:
    """Let workers close for a few seconds; how that ends no longer matters to the run."""
    import ray

    refs = [member.handle.close.remote() for member in supervisor.members]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=10)


def _set_environment(values: Mapping[str, str | None]) -> None:
    """Set variables (None: remove them), and have Ray read those again that it read when it was imported."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    from ray import _raylet
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", sys.platform == "linux"
    )
    if hasattr(_raylet, "Config"):
        _raylet.Config.initialize("")
    if hasattr(_raylet, "AuthenticationTokenLoader"):
        _raylet.AuthenticationTokenLoader.instance().reset_cache()
