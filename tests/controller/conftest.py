"""One local Ray per test file."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from verlite.controller.cluster import RUN_ID, Cluster, connect
from verlite.controller.supervise import Supervisor


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Eight CPU slots, however many cores there are. Leaving it restores what connecting changed."""
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    with connect(
        tmp_path_factory.mktemp("run"), address="local", num_cpus=8, call_timeout_s=120
    ) as cluster:
        yield cluster
    after = dict(os.environ), signal.getsignal(signal.SIGTERM)
    changed = {
        name
        for name in before[0].keys() | after[0].keys()
        if before[0].get(name) != after[0].get(name)
    }
    assert before[1] == after[1] and not [
        name for name in changed if name.startswith(("RAY_AUTH", "RAY_ENABLE", "VERLITE"))
    ]
    assert not processes_of(cluster.run_id)


@pytest.fixture
def fresh(cluster: Cluster) -> Iterator[Cluster]:
    """The file's cluster with no workers and no devices taken; what the test leaves is ended after it."""
    import ray

    cluster.supervisor = Supervisor(cluster.supervisor.call_timeout_s)
    yield cluster
    cluster.supervisor.end_all()
    while cluster.reserved:
        ray.util.remove_placement_group(cluster.reserved.pop())


def processes_of(run_id: str) -> list[psutil.Process]:
    """Living processes of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_ID) == run_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
