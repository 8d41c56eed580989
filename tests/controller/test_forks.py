"""Workers that are forks of one process, which has imported what they need."""

import os
import signal

import psutil
import pytest

from tests.controller.conftest import within
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
    assert within(10, lambda: not psutil.pid_exists(pid))  # no zombie stays


def test_workers_start_after_the_server_has_died(fresh):
    def start() -> list[tuple[int, int, int]]:
        placement = reserve(fresh, {"forked": [0]}, devices_per_node=1)
        return spawn(Forked, placement, "forked").origin()

    server = start()[0][1]
    os.kill(server, signal.SIGKILL)
    assert within(10, lambda: not psutil.pid_exists(server))
    pid, parent, importer = start()[0]
    assert parent == importer != server
