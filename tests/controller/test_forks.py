"""Workers that are forks of one process, which has imported what they need."""

import json
import os
import shutil
import signal
import socket
import tempfile
import time

import psutil
import pytest

from tests.controller.conftest import alive, processes_of, within
from tests.other_user import as_nobody
from verlite.controller import ray_internals, worker_fork
from verlite.controller.dispatch import register
from verlite.controller.failures import WorkerError
from verlite.controller.placement import reserve
from verlite.controller.worker import Worker
from verlite.controller.worker_group import spawn

pytestmark = pytest.mark.process
PRELOAD = [
    "numpy",
    "tests.controller.test_forks",
    "tests.controller.imported",
    "tests.no_such_module",
]


class Forked(Worker):
    """A worker that tells where it comes from."""

    @register("all")
    def origin(self) -> tuple[int, int, int]:
        from tests.controller import imported

        return os.getpid(), os.getppid(), imported.PID

    @register("all")
    def state(self) -> dict[str, object]:
        import numpy as np

        with open("/proc/self/oom_score_adj") as file:
            oom_score_adj = int(file.read())
        return {
            "session": os.getsid(0) == os.getpid(),
            "folder": os.getcwd(),
            "home": os.environ.get("HOME"),
            "threads": os.environ["OMP_NUM_THREADS"],
            "spins": os.environ["GOMP_SPINCOUNT"],
            "argument": __import__("sys").argv[1].partition("=")[0],
            "children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            "oom_score_adj": oom_score_adj,
            "drawn": float(np.random.random()),
        }


@pytest.fixture
def forked(fresh):
    """Three ranks for one test."""
    return spawn(Forked, reserve(fresh, {"forked": [0, 1, 2]}, devices_per_node=3), "forked")


def test_workers_share_the_imports_of_one_process(forked):
    pids, parents, importers = zip(*forked.origin(), strict=True)
    assert len(set(pids)) == 3
    assert len(set(parents)) == 1
    assert set(importers) == set(parents)


def test_a_fork_finds_what_a_new_process_would(forked):
    states = forked.state()
    drawn = {state.pop("drawn") for state in states}
    assert len(drawn) == 3  # not three times the numbers of the common parent
    assert states == 3 * [
        {
            "session": True,
            "folder": os.getcwd(),
            "home": os.environ.get("HOME"),
            "threads": states[0]["threads"],
            "spins": os.environ["GOMP_SPINCOUNT"],
            "argument": "--node-ip-address",
            "children": True,
            "oom_score_adj": 1000,  # Ray's default
        }
    ]


def test_a_killed_fork_is_named(forked):
    pid = forked.origin()[1][0]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="forked rank 1"):
        forked.origin()
    assert within(60, lambda: not psutil.pid_exists(pid))  # no zombie stays


def test_workers_start_after_the_server_has_died(fresh):
    def start() -> list[tuple[int, int, int]]:
        placement = reserve(fresh, {"forked": [0]}, devices_per_node=1)
        return spawn(Forked, placement, "forked").origin()

    server = start()[0][1]
    os.kill(server, signal.SIGKILL)
    assert within(60, lambda: not psutil.pid_exists(server))
    pid, parent, importer = start()[0]
    assert parent == importer != server


def test_a_signal_to_the_process_group_does_not_end_ray_and_workers(forked, fresh):
    """A closed terminal sends SIGHUP, `timeout` SIGTERM; the driver then stops the run."""
    forked.origin()
    group = os.getpgid(0)
    processes = {
        one: " ".join(one.cmdline())
        for one in processes_of(fresh.run_id)
        if one.pid != os.getpid() and os.getpgid(one.pid) == group
    }
    assert any("raylet" in command for command in processes.values())
    assert any("gcs_server" in command for command in processes.values())
    for process in processes:
        for number in ray_internals.STOP_SIGNALS:
            process.send_signal(number)
    time.sleep(0.5)
    assert [command for one, command in processes.items() if not alive(one.pid)] == []
    forked.origin()


TRY_EACH = """
def reached(path):
    try:
        if os.path.isdir(path):
            return os.access(path, os.W_OK) or len(os.listdir(path)) >= 0
        if path.startswith("@") or stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(path.replace("@", chr(0), 1))
        else:
            open(path, "rb").close()
    except OSError:
        return False
    return True

print(json.dumps([path for path in sys.stdin.read().splitlines() if reached(path)]))
"""


def test_another_user_reaches_no_socket_and_no_file_of_a_run(forked, fresh):
    forked.origin()
    sockets = {
        connection.laddr
        for process in processes_of(fresh.run_id)
        for connection in process.net_connections("unix")
        if connection.laddr
    }
    folders = {os.path.join("/", *path.split("/")[:3]) for path in sockets}
    assert any("/fork-" in path for path in sockets), "the server of the forks"
    assert any("plasma" in path for path in sockets), "Ray's"
    files = {
        os.path.join(place, name)
        for folder in folders
        for place, inner, names in os.walk(folder)
        for name in inner + names
    }
    assert len(files) > 20
    assert max(map(len, sockets)) < 107, "the limit of the system, where a socket was made"
    tried = "\n".join(sorted(sockets | folders | files))
    assert json.loads(as_nobody(TRY_EACH).communicate(tried, timeout=60)[0]) == []


def test_a_server_of_another_user_gets_nothing(monkeypatch, capfd):
    """A worker's environment may have secrets."""
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    folder = tempfile.mkdtemp(dir="/tmp")
    os.chmod(folder, 0o777)
    path = f"{folder}/fork-{worker_fork._environment_key()}"
    impostor = as_nobody(
        """
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
connection, _ = listener.accept()
print(repr(connection.recv(1 << 16)))
""",
        path,
    )
    assert impostor.stdout.readline() == "ready\n"
    assert not worker_fork._ask_for_fork([f"--raylet-name={folder}/raylet"])
    assert impostor.communicate(timeout=60)[0] == "b''\n"
    assert "belongs to another user; nothing was sent" in capfd.readouterr().err
    shutil.rmtree(folder)


def test_a_request_of_another_user_is_not_forked(monkeypatch):
    forks = []
    monkeypatch.setattr(os, "fork", lambda: forks.append(1) or 1)
    with socket.socket(socket.AF_UNIX) as listener:
        address = f"\0verlite-test-{os.getpid()}"
        listener.bind(address)
        listener.listen()
        requester = as_nobody(
            """
peer = socket.socket(socket.AF_UNIX)
peer.connect(chr(0) + sys.argv[1])
socket.send_fds(peer, [b"\\0"], [0, 1, 2])
peer.sendall(b'{"arguments": []}')
peer.shutdown(socket.SHUT_WR)
""",
            address[1:],
        )
        connection, _ = listener.accept()
        with connection:
            assert worker_fork._answer(connection) is None
        requester.communicate(timeout=60)
    assert not forks
