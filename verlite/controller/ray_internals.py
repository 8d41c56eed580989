"""All uses of Ray's private modules. Ray has no public interface for these."""

import functools
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

CURRENT_CLUSTER = "ray_current_cluster"
"""File in Ray's folder with the address that the last `ray start` recorded."""


def running_cluster() -> str | None:
    """Return the address that the last `ray start` on this machine recorded.

    That cluster may have ended.
    """
    set_by = (os.environ.get(name, "/tmp") for name in ("RAY_TMPDIR", "TMPDIR"))
    folders = {*set_by, tempfile.gettempdir()}
    if not any(Path(folder, "ray", CURRENT_CLUSTER).exists() for folder in folders):
        return None  # importing Ray takes most of a second
    from ray._private.utils import read_ray_address

    address: str | None = read_ray_address()
    return address


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard what Ray's C++ code prints about a failed call: the exception says it, too."""
    before = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


class NodeView(NamedTuple):
    """A living node, as Ray's head lists it.

    Attributes:
        labels: what `ray start --labels` was given, and Ray's own.
        resources: total amounts, such as {"CPU": 8.0, "GPU": 8.0}.
    """

    address: str
    is_head: bool
    labels: dict[str, str]
    resources: dict[str, float]


class ClusterView(NamedTuple):
    """What Ray's head knows about its cluster. The id is new each time that the head starts."""

    cluster_id: str
    dashboard: str
    nodes: list[NodeView]


def hip_environment() -> dict[str, str]:
    """Return HIP_VISIBLE_DEVICES for a process where only ROCR's variable is set, as Slurm does it.

    Without it `import ray` fails on a machine with AMD GPUs. HIP numbers the GPUs that ROCR leaves.
    """
    rocr = os.environ.get("ROCR_VISIBLE_DEVICES")
    if not rocr or "HIP_VISIBLE_DEVICES" in os.environ:
        return {}
    return {"HIP_VISIBLE_DEVICES": ",".join(map(str, range(len(rocr.split(",")))))}


def view(address: str) -> ClusterView:
    """Ask Ray's head at host:port about its cluster, without joining it.

    The head must be known to answer (`head.answers`): Ray waits 50 s for one that does not.

    Raises:
        PermissionError: the head refuses the token in this process's environment, or none is set.
        ConnectionError: the head does not answer, or is not Ray's.
    """
    os.environ.update(hip_environment())
    import ray
    from ray import _raylet

    untyped: Any = _raylet
    try:
        with _without_stderr():
            client = untyped.GcsClient(address=address)
        dashboard = client.internal_kv_get(b"dashboard", namespace=b"dashboard", timeout=10)
        table = client.get_all_node_info(timeout=10).values()
        cluster_id = client.cluster_id.hex()
    except ray.exceptions.AuthenticationError as error:
        raise PermissionError(str(error)) from None
    except ray.exceptions.RayError as error:
        raise ConnectionError(str(error)) from None
    nodes = [
        NodeView(
            node.node_manager_address,
            node.is_head_node,
            dict(node.labels),
            dict(node.resources_total),
        )
        for node in table
        if node.state == 0  # GcsNodeInfo.ALIVE
    ]
    return ClusterView(cluster_id, (dashboard or b"").decode(), nodes)


@dataclass(frozen=True)
class HeadAnswer:
    """What the head of a cluster answered.

    Attributes:
        missing: why the cluster cannot be joined yet; None if it can.
        refusal: why it never can, with the remedy; None if it can.
    """

    missing: str | None = None
    refusal: str | None = None


def ask_head(address: str, timeout_s: float) -> HeadAnswer:
    """Ask the head at host:port whether this process can join its cluster.

    `ray.init` would find out too, but only after 20 to 60 s, and without saying the reason.
    """
    os.environ.update(hip_environment())
    import grpc
    import ray
    from ray._private import services
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    untyped_services: Any = services
    messages: Any = gcs_service_pb2
    stubs: Any = gcs_service_pb2_grpc
    raylets = [bytes.fromhex(name) for name in untyped_services.find_node_ids()]
    channel = init_grpc_channel(address)
    try:
        stub = stubs.NodeInfoGcsServiceStub(channel)
        answer = stub.CheckAlive(messages.CheckAliveRequest(node_ids=raylets), timeout=timeout_s)
    except grpc.RpcError as error:
        return _refused_or_missing(error.code().name, str(error.details()))
    finally:
        channel.close()
    if answer.ray_version != ray.__version__:
        return HeadAnswer(
            refusal=f"the cluster runs Ray {answer.ray_version}, and this process has Ray "
            f"{ray.__version__}. Use one environment on all nodes."
        )
    if not any(answer.raylet_alive):
        return HeadAnswer("its head answers, but this machine has not joined it")
    return HeadAnswer()


def _refused_or_missing(code: str, details: str) -> HeadAnswer:
    """Return what a failed question to a head means. `code` and `details` are gRPC's."""
    if code == "UNAUTHENTICATED":
        return HeadAnswer(
            refusal="the cluster refused this process's authentication token. Set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the cluster's token file (or "
            "RAY_AUTH_TOKEN to its content), as on its nodes."
        )
    if code == "UNIMPLEMENTED" or "HTTP/2" in details:
        return HeadAnswer(
            refusal="it does not answer as the head of a Ray cluster does. Give the host:port that "
            "`ray start --head` printed, not the dashboard's or the Ray client's."
        )
    if "Connection refused" in details:
        return HeadAnswer("connection refused")
    if code == "DEADLINE_EXCEEDED":
        return HeadAnswer("no answer in time")
    return HeadAnswer(details.rpartition(": ")[2].lower())


def set_environment(values: Mapping[str, str | None]) -> None:
    """Set environment variables, or remove those with None, and have Ray read them again."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    reload_environment()


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables, also for Ray, until the context ends."""
    if not values:
        yield
        return
    before = {name: os.environ.get(name) for name in values}
    set_environment(values)
    try:
        yield
    finally:
        set_environment(before)


def reload_environment() -> None:
    """Have Ray read again the environment variables that it read when it was imported."""
    from ray import _raylet
    from ray._private import ray_constants

    constants: Any = ray_constants
    constants.ENABLE_RAY_CLUSTER = constants.env_bool(
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", sys.platform == "linux"
    )
    constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = constants.env_bool(
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV", True
    )
    if hasattr(_raylet, "Config"):
        _raylet.Config.initialize("")
    if hasattr(_raylet, "AuthenticationTokenLoader"):
        _raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a class or module of Ray's until the context ends. Those that a version
    of Ray does not have are left out."""
    originals = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    try:
        for name in originals:
            setattr(owner, name, values[name])
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


@contextmanager
def lean_head() -> Iterator[None]:
    """Start a head node without the autoscaler, the log monitor and the dashboard.

    Ray has no option for it. A version of Ray without one of these functions starts as usual.

    On 2 cores this saves 4.9 of 10.9 s of CPU time from the start until 3 s after it (minima of
    alternating runs), 3 of 10 processes and 300 of 755 MiB of memory.
    """
    from ray import _raylet
    from ray._private import utils
    from ray._private.node import Node

    def start_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    servers = ("start_monitor", "start_log_monitor", "start_api_server")
    checks: dict[str, Any] = {}
    # With this the node's agent starts without servers, and the driver does not import the
    # dashboard. Versions without persist_port would print a warning about it.
    if hasattr(_raylet, "persist_port"):
        no_dashboard = ImportError("the dashboard is not used")
        checks["get_dashboard_dependency_error"] = lambda: no_dashboard
    with _replaced(Node, **dict.fromkeys(servers, start_nothing)), _replaced(utils, **checks):
        yield


@contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Have `ray.init` leave SIGTERM to the handler of this process.

    Ray installs two of its own: one in Python, which exits with code 15, and one in C, which prints
    a stack and aborts 3 s later by an alarm. The second cannot be prevented, so it is replaced.
    """
    from ray._private import utils

    try:
        with _replaced(utils, set_sigterm_handler=lambda handler: None):
            yield
    finally:
        restore_sigterm()
        if threading.current_thread() is threading.main_thread():
            signal.alarm(0)


def restore_sigterm() -> None:
    """Give SIGTERM to Python's handler again, if this is the main thread.

    `ray.init` replaces it in C, and `ray.shutdown` resets it to the default action, which kills the
    process. Python does not know of either.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that stop a run. Ray itself blocks the fourth one, SIGINT, in its processes."""


@contextmanager
def without_stop_signals() -> Iterator[None]:
    """Start Ray with the signals blocked on which only the driver acts: it needs Ray to save.

    A closed terminal, `timeout`, `scancel` and `systemctl stop` send them to all processes of a
    group, a job or a service. `ray.shutdown` would wait for the effect of SIGTERM in vain, so it
    ends these processes by SIGKILL.
    """
    from ray._private import worker

    untyped_worker: Any = worker
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
        ray_node = untyped_worker._global_node
        end = ray_node.kill_all_processes
        ray_node.kill_all_processes = lambda **options: end(**{**options, "allow_graceful": False})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # handles a signal that has come


def raylet_got(number: int) -> bool:
    """Return whether a signal waits at this worker's raylet, which blocks it. False if unknown."""
    try:
        status = Path("/proc", os.environ["RAY_RAYLET_PID"], "status").read_text()
    except (KeyError, OSError):
        return False
    pending = next(line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd"))
    return bool(int(pending, 16) >> (number - 1) & 1)


@contextmanager
def forked_workers(modules: Sequence[str]) -> Iterator[None]:
    """Let the node that starts here fork its workers from a process with these modules.

    See `worker_fork`. Without modules, on systems other than Linux, or in a version of Ray without
    this function, every worker starts as a new process.
    """
    from ray._private.node import Node

    from verlite.controller import worker_fork

    start_raylet = getattr(Node, "start_raylet", None)
    if not modules or sys.platform != "linux" or start_raylet is None:
        yield
        return

    def start_with_forks(self: Any, *args: Any, **kwargs: Any) -> None:
        settings = {
            # Ray imports the second one with a worker's first result. Not pyarrow, which it also
            # imports then: it starts a thread.
            "modules": ["ray", "ray._common.pydantic_compat", *modules],
            "python": sys.executable,
            "path": sys.path,
            "worker": self._ray_params.worker_path,
        }
        os.environ[worker_fork.SETTINGS] = json.dumps(settings)
        self._ray_params.worker_path = worker_fork.__file__
        try:
            start_raylet(self, *args, **kwargs)
        finally:
            del os.environ[worker_fork.SETTINGS]

    with _replaced(Node, start_raylet=start_with_forks):
        yield


def give_raylet_the_agents_port(port: int) -> None:
    """Let `ray start` in this process tell the raylet the port of the node's HTTP agent.

    Ray 2.60 tells it to the agent only. The raylet waits 15 s for the agent to write the port into
    a file, and aborts. On a busy machine, or with Python on a slow file system, that is too short.
    A version of Ray without this function starts as usual.
    """
    from ray._private import ray_constants, services

    start_process = getattr(services, "start_ray_process", None)
    if start_process is None:
        return

    def with_port(command: Sequence[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            command = [*command, f"--dashboard_agent_listen_port={port}"]
        return start_process(command, process_type, *args, **kwargs)

    untyped_services: Any = services
    untyped_services.start_ray_process = with_port


def redirect_messages(write: Callable[[Sequence[str]], None]) -> None:
    """Send the lines that Ray prints on the driver's output to `write`.

    Ray prints, for example, a paragraph for each process that has ended.
    """
    from ray._private import worker

    def print_to_stdstream(data: Mapping[str, Any], *args: object, **kwargs: object) -> None:
        write(data["lines"])

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = print_to_stdstream


def set_debugger_port(port: int) -> None:
    """Register the port where this worker listens for debugpy clients, for Ray's dashboard."""
    from ray._private.worker import global_worker

    untyped_worker: Any = global_worker
    untyped_worker.set_debugger_port(port)


def paused_by_debugger() -> AbstractContextManager[None]:
    """Let Ray's dashboard show this worker as paused, so that VS Code's extension lists it."""
    from ray._private.worker import global_worker

    untyped_worker: Any = global_worker
    context: AbstractContextManager[None] = untyped_worker.worker_paused_by_debugger()
    return context


def pdb_connector() -> Callable[[], Any]:
    """Return the function that waits for `ray debug` and returns its pdb.

    Ray lists the frame that called the caller of this function's result.
    """
    from ray._private.worker import global_worker
    from ray.util import rpdb

    untyped_pdb: Any = rpdb
    external = bool(getattr(global_worker, "ray_debugger_external", False))
    return functools.partial(untyped_pdb._connect_ray_pdb, debugger_external=external)


def free_resources() -> dict[str, dict[str, float]]:
    """Return {node id: {resource: amount that no one has reserved}}."""
    from ray._private import state

    untyped_state: Any = state
    free: dict[str, dict[str, float]] = untyped_state.available_resources_per_node()
    return free


def assigned_gpus() -> list[str]:
    """Return the ids of the GPUs that Ray gave to this actor or task."""
    import ray

    return ray.get_runtime_context().get_accelerator_ids()["GPU"]


def set_visible_gpus(gpu_ids: Sequence[str]) -> None:
    """Let this process and its children see exactly these GPUs of Ray's. Call it before torch.

    Ray sets one variable, that of the GPU's vendor, and none under
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES or its variant for HIP. On AMD, HIP also reads
    CUDA_VISIBLE_DEVICES, and vLLM refuses to start where the two differ. So both are always set;
    NVIDIA's libraries do not read HIP's.

    HIP numbers the GPUs that ROCR_VISIBLE_DEVICES leaves, and so do Ray's ids, unless both
    variables list the same GPUs: those are the machine's own numbers, and HIP must see them all.
    """
    rocr = os.environ.get("ROCR_VISIBLE_DEVICES")
    if rocr is not None and _visible_before() == rocr.split(","):
        del os.environ["ROCR_VISIBLE_DEVICES"]
    # An empty HIP_VISIBLE_DEVICES hides nothing; -1 hides all GPUs of both vendors.
    ids = ",".join(gpu_ids) or "-1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ids
    os.environ["HIP_VISIBLE_DEVICES"] = ids


def _visible_before() -> list[str] | None:
    """Return the ids in the vendor's variable when this process started; None if it was unset."""
    from ray._private.worker import global_worker

    ids: Mapping[str, list[str] | None] = global_worker.original_visible_accelerator_ids
    return ids.get("GPU")


def own_address() -> str:
    """Return the IP address by which the other nodes of the cluster reach this one."""
    import ray

    untyped_ray: Any = ray
    return str(untyped_ray.util.get_node_ip_address())


def local_daemons() -> list[tuple[str, int, list[str]]]:
    """Return (name, process id, log files) of the processes of Ray that this process has started,
    and of the agents that the raylet has started. [] before `ray.init` has started any."""
    import psutil
    from ray._private import worker

    untyped_worker: Any = worker
    ray_node = untyped_worker._global_node
    if ray_node is None:
        return []
    logs = os.path.join(ray_node.get_session_dir_path(), "logs")
    found = []
    for name, infos in list(ray_node.all_processes.items()):
        for info in infos:
            files = [os.path.join(logs, f"{name}.{end}") for end in ("err", "out")]
            found.append((name, info.process.pid, files))
    for name, pid, _ in list(found):
        if name != "raylet":
            continue
        try:
            children = psutil.Process(pid).children()
        except psutil.Error:
            continue
        for child in children:
            title = agent_name(child)
            if title:
                found.append((title, child.pid, [os.path.join(logs, f"{title}.log")]))
    return found


AGENTS = {
    "dashboard_agent": ("ray::DashboardAgent", "dashboard/agent.py"),
    "runtime_env_agent": ("ray::RuntimeEnv", "runtime_env/agent/main.py"),
}
"""Names of the raylet's agents, as of their logs, and texts in their command lines."""


def agent_name(process: Any) -> str | None:
    """Return the name of one of the raylet's agents, None for another process."""
    import psutil

    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return None
    return next((name for name, texts in AGENTS.items() if any(t in command for t in texts)), None)
