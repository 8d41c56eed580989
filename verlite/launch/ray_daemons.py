"""Run `ray start` on this machine, find the processes that it leaves, and end them."""

import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from verlite.controller import guardian, node, ray_node
from verlite.controller.cluster import daemon_environment
from verlite.controller.node import Process
from verlite.controller.ray_internals import CURRENT_CLUSTER
from verlite.controller.ray_node import MARK, RayNode
from verlite.launch import ClusterError

TRIES = 5
AGENT_PORTS = (
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
)
"""Ports of a node's agents. This command chooses those that the user did not, because a raylet of
Ray 2.60 that has to ask the agents waits 15 s, too short on a busy machine, and aborts."""
PORTS = range(20000, 32768)
"""Between the ports of Ray's workers and those that the kernel gives to connections."""
RETRY_PAUSE_S = 5.0
TRY_TIMEOUT_S = 240.0
TERM_S = 10.0
"""How long Ray's processes get to end after SIGTERM."""
OWN_OPTIONS = {
    "--head": "--rank 0",
    "--block": "--block before the --",
    "--address": "--head",
    "--port": "--port before the --",
    "--node-ip-address": "--address before the --",
}
"""Options of `ray start` that this command sets itself, and what to use instead."""
FINAL = ("Version mismatch", "No such option", "Usage: ")
"""Text in the output of a `ray start` that would fail again."""


def check_options(options: Sequence[str]) -> None:
    """Refuse options of `ray start` that this command sets itself.

    Raises:
        ClusterError: with what to use instead.
    """
    for option in options:
        name = option.partition("=")[0]
        if name in OWN_OPTIONS:
            raise ClusterError(f"{name} after -- is set by this command: use {OWN_OPTIONS[name]}")


def with_label(options: Sequence[str], label: str) -> list[str]:
    """Return the options with the label added to --labels, of which Ray takes only the last."""
    result: list[str] = []
    labels = [label]
    rest = iter(options)
    for option in rest:
        if option == "--labels":
            labels.append(next(rest, ""))
        elif option.startswith("--labels="):
            labels.append(option.partition("=")[2])
        else:
            result.append(option)
    return [*result, "--labels", ",".join(labels)]


def start(
    options: Sequence[str],
    environment: Mapping[str, str | None],
    mark: str,
    say: Callable[[str], None],
) -> None:
    """Run `ray start` until it succeeds, up to TRIES times.

    It may fail although all is well: the head does not know its own node yet, or a slow machine
    exceeds one of Ray's time limits.

    Args:
        environment: variables to set, or to unset (None).
        mark: see RayNode.mark.

    Raises:
        ClusterError: after the last try, or at once if another would fail in the same way.
    """
    command = [sys.executable, "-m", "verlite.launch.ray_start", "--disable-usage-stats"]
    command += ["--log-color=false", *options]
    values = {
        # The head takes a node that does not answer for lost after this many checks of 13 s. Ray's
        # default of 5 takes over a minute.
        "RAY_health_check_failure_threshold": "3",
        **os.environ,
        # Ray waits at least 30 s, and then to the end of one more period of this length.
        "RAY_raylet_start_wait_time_s": "5",
        # The raylet ends if it cannot reach an agent for so long. Ray's default is 30 s.
        "RAY_agent_register_timeout_ms": "300000",
        **daemon_environment(),
        **environment,
        MARK: f"{mark}/ray",
    }
    child_environment = {name: value for name, value in values.items() if value is not None}
    log = ray_node.make_folder() / "ray_start.log"
    for number in range(1, TRIES + 1):
        try:
            code, output = _run([*command, *agent_ports(options)], child_environment, log)
        except BaseException:
            kill(mark)
            raise
        if code == 0:
            return
        kill(mark)
        if number == TRIES or any(text in output for text in FINAL):
            raise ClusterError(
                f"`ray start` failed {number} time(s), at last with exit code {code}. The end of "
                f"its output ({log}):\n" + _indent(output)
            )
        say(f"ray start failed with exit code {code} (try {number} of {TRIES}): {_reason(output)}")
        time.sleep(RETRY_PAUSE_S)


def agent_ports(options: Sequence[str]) -> list[str]:
    """Return options of `ray start` with free ports for the agents without a port of the user's."""
    names = {option.partition("=")[0] for option in options}
    taken = {option.partition("=")[2] for option in options}
    candidates = random.sample(PORTS, len(PORTS))
    free = (port for port in candidates if str(port) not in taken and _is_free(port))
    return [f"{name}={next(free)}" for name in AGENT_PORTS if name not in names]


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True


def found(mark: str) -> tuple[list[tuple[str, int, int]], str]:
    """Return the daemons with this mark, as RayNode.daemons, and Ray's session folder."""
    daemons = []
    session_dir = ""
    pids = guardian.marked(f"{MARK}={mark}")
    for pid in pids:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        match = re.search(r"--session[-_]dir=([^\0]+)", arguments)
        session_dir = match[1] if match else session_dir
        if parent not in pids:
            daemons.append((_name(arguments.split("\0")), pid, node.process(pid).started))
    return sorted(daemons), session_dir


def end(ray: RayNode) -> int:
    """End the processes of this node, at first by SIGTERM. Return how many there were."""
    processes = {name: Process(pid, started) for name, pid, started in ray.daemons}
    living = [one for one in processes.values() if node.process_state(one) != "gone"]
    # Workers overwrite the mark in their environment by their title.
    children = _children(living)
    # The head's server last, so that the node can still unregister.
    server = processes.pop("gcs_server", None)
    node.send_signal(processes.values(), 15)
    _wait(list(processes.values()))
    if server is not None:
        node.send_signal([server], 15)
        _wait([server])
    node.send_signal(children, 9)
    # Another rank on this machine has the same folder. Its workers must live.
    is_shared = bool(ray.session_dir) and _raylets_using(ray.session_dir, ray.mark)
    kill(ray.mark, "" if is_shared else ray.session_dir)
    if ray.session_dir and not is_shared:
        current = Path(ray.session_dir).parent / CURRENT_CLUSTER
        try:
            if current.read_text().strip() == ray.address:
                current.unlink()
        except OSError:
            pass
    return len(living)


def _run(command: Sequence[str], environment: dict[str, str], log: Path) -> tuple[int, str]:
    """Run the command in a session of its own; return (exit code, output)."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(TRY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = -9
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")


def kill(mark: str, *folders: str) -> None:
    """Kill everything with this mark."""
    real = [os.path.realpath(folder) for folder in folders if folder]
    guardian.sweep(f"{MARK}={mark}", False, *real)


def _children(processes: Sequence[Process]) -> list[Process]:
    """Return the children of these processes, and theirs."""
    import psutil

    found = []
    for one in processes:
        try:
            found += psutil.Process(one.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    children = [node.process(child.pid) for child in found]
    return [child for child in children if child.started]


def _raylets_using(session_dir: str, mark: str) -> list[int]:
    """Return the process ids of raylets with this session folder that have another mark."""
    own = guardian.marked(f"{MARK}={mark}")
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        pid = int(path.parent.name)
        if _name(arguments) == "raylet" and f"--session_dir={session_dir}" in arguments:
            found += [pid] if pid not in own else []
    return found


def _wait(processes: Sequence[Process]) -> None:
    deadline = time.monotonic() + TERM_S
    while time.monotonic() < deadline:
        if all(node.process_state(one) in ("gone", "dead") for one in processes):
            return
        time.sleep(0.1)


def _name(arguments: Sequence[str]) -> str:
    """Return a daemon's name: its program, or its script or module if it is a Python process."""
    program = os.path.basename(arguments[0])
    if not program.startswith("python"):
        return program
    for before, argument in zip(arguments, arguments[1:], strict=False):
        if before == "-m" or argument.endswith(".py"):
            return os.path.basename(argument).removesuffix(".py")
    return program


def _lines(output: str) -> list[str]:
    """Return the lines that say something."""
    lines = [line.strip() for line in output.splitlines()]
    return [line for line in lines if line and "usage_lib.py" not in line]


def _reason(output: str) -> str:
    lines = _lines(output)
    return lines[-1] if lines else "no output"


def _indent(output: str) -> str:
    return "\n".join(f"  {line}" for line in _lines(output)[-12:])
