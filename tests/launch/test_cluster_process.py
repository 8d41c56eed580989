"""`verlite cluster start`, `check` and `stop` with a real Ray on loopback."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.controller.conftest import alive, within
from verlite.controller import guardian, ray_node
from verlite.controller.node import free_listener

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A shell without Ray's variables, and a cluster folder of its own."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables["VERLITE_CLUSTER_DIR"] = str(tmp_path_factory.mktemp("node") / "private")
    return variables


SLOW_AGENTS = """
import time
with open("/proc/self/cmdline") as file:
    program = file.read()
if "dashboard/agent.py" in program or "runtime_env/agent/main.py" in program:
    time.sleep(17)
"""
"""A machine on which Ray's agents need longer than the 15 s that its raylet would wait for them."""


def cluster(environment, *arguments):
    command = [sys.executable, "-m", "verlite", "cluster", *arguments]
    return subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.fixture(scope="module")
def head(environment, tmp_path_factory):
    """A blocking head on loopback: (process, its output so far, the shared folder)."""
    shared = tmp_path_factory.mktemp("shared")
    slow = tmp_path_factory.mktemp("slow")
    (slow / "sitecustomize.py").write_text(SLOW_AGENTS)
    path = f"{slow}:{environment.get('PYTHONPATH', '')}"
    # In /tmp, because the paths of sockets must be short.
    with free_listener("127.0.0.1") as listener:
        port = str(listener.getsockname()[1])
    ray_dir = f"/tmp/verlite-test-{port}"
    arguments = ["start", "--rank", "0", "--shared", str(shared), "--address", "127.0.0.1"]
    arguments += ["--port", port, "--num-cpus", "3", "--num-gpus", "0", "--block", "--"]
    arguments += ["--include-dashboard=false", f"--temp-dir={ray_dir}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "verlite", "cluster", *arguments],
        env=environment | {"PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if lines[-1] == "Ray started":
            break
    try:
        yield process, lines, shared
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        subprocess.run(["rm", "-rf", ray_dir])


def test_start_says_where_the_head_is_and_keeps_the_token_private(head, environment):
    process, lines, shared = head
    assert lines[-1] == "Ray started" and process.poll() is None, lines
    assert not any("ray start failed" in line for line in lines), "slow agents must not matter"
    assert (shared / "ray_head_ip.txt").read_text().startswith("127.0.0.1\n")
    token = (shared / "ray_token").read_text()
    assert (shared / "ray_token").stat().st_mode & 0o777 == 0o600
    assert token not in "\n".join(lines)
    commands = psutil.process_iter(["cmdline"])
    assert not any(token in " ".join(each.info["cmdline"] or ()) for each in commands)


def test_check_finds_the_cluster_without_any_variable(head, environment):
    enough = cluster(environment, "check", "3", "--wait", "20")
    assert enough.returncode == 0, enough.stdout
    assert enough.stdout.splitlines() == [
        "Available GPUs: 3 (Required: 3) [CPU slots: no node has a GPU]",
        "Success: Required GPU count (3) is now available.",
    ]
    elsewhere = environment | {"VERLITE_CLUSTER_DIR": environment["VERLITE_CLUSTER_DIR"] + "2"}
    too_few = cluster(elsewhere, "check", "6", "--wait", "0", "--shared", str(head[2]))
    assert too_few.returncode == 1
    assert "not joined: rank 1 of 2 nodes (for 6 with 3 per node)" in too_few.stdout


def test_wrong_token_is_refused(head, environment):
    address = "127.0.0.1:" + (head[2] / "ray_head_ip.txt").read_text().split("port: ")[1].split()[0]
    elsewhere = environment | {
        "VERLITE_CLUSTER_DIR": environment["VERLITE_CLUSTER_DIR"] + "3",
        "RAY_AUTH_TOKEN": "wrong",
    }
    result = cluster(elsewhere, "start", "--rank", "1", "--head", address)
    assert result.returncode == 1 and "the cluster there refuses this token" in result.stdout


def test_stop_in_a_second_shell_ends_a_blocking_rank_and_spares_the_other(head, environment):
    """Both ranks on this machine have one session folder, and the agents of both have its files
    open."""
    process, _, shared = head
    second = environment | {"VERLITE_CLUSTER_DIR": environment["VERLITE_CLUSTER_DIR"] + "4"}
    own = subprocess.Popen(
        [sys.executable, "-m", "verlite", "cluster", "start", "--rank", "1", "--block"]
        + ["--shared", str(shared), "--address", "127.0.0.1", "--num-cpus", "1", "--num-gpus", "0"],
        env=second,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines = iter(own.stdout.readline, "")
    assert any(line.startswith("Ray started") for line in lines)
    record = json.loads(Path(second["VERLITE_CLUSTER_DIR"], "node.json").read_text())
    of_head = ray_processes(environment)
    of_second = ray_processes(second)
    assert {"gcs_server", "raylet"} <= of_head.keys() and "raylet" in of_second
    session_dir = os.path.realpath(record["session_dir"])
    # Ray's agents have titles of their own: two on each rank.
    assert within(60, lambda: len(guardian.ray_processes_using(session_dir)) == 4)
    agents = guardian.ray_processes_using(session_dir)

    result = cluster(second, "stop")
    assert result.returncode == 0 and "Stopped rank 1 of the cluster" in result.stdout
    rest = own.communicate(timeout=60)[0]
    assert own.returncode == 0 and "stopped by `verlite cluster stop`" in rest, rest
    assert not any(map(alive, of_second.values()))
    assert guardian.marked(f"{ray_node.MARK}={record['mark']}") == []
    time.sleep(1)
    assert all(map(alive, of_head.values())) and process.poll() is None
    left = guardian.ray_processes_using(session_dir)
    assert len(left) == 2 and set(left) < set(agents)
    assert cluster(environment, "check", "3", "--wait", "20").returncode == 0


def ray_processes(environment):
    """Return {name: process id} of the daemons of a rank."""
    record = json.loads(Path(environment["VERLITE_CLUSTER_DIR"], "node.json").read_text())
    return {name: pid for name, pid, _ in record["daemons"]}


def test_block_ends_all_when_ray_dies(head, environment, monkeypatch):
    process, lines, shared = head
    monkeypatch.setenv("VERLITE_CLUSTER_DIR", environment["VERLITE_CLUSTER_DIR"])
    node = ray_node.load()
    mark = f"{ray_node.MARK}={node.mark}"
    assert guardian.marked(mark)
    raylet = next(pid for name, pid, _ in node.daemons if name == "raylet")
    os.kill(raylet, signal.SIGKILL)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "Ray has died on this node (rank 0): raylet has ended" in rest
    deadline = time.monotonic() + 10
    while guardian.marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert guardian.marked(mark) == []
    assert list(shared.iterdir()) == [] and ray_node.load() is None
