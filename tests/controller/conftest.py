"""One local Ray cluster per test file, and helpers to look at processes."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from verlite.control.watch import Watch
from verlite.controller.cluster import RUN_MARK, Cluster, connect
from verlite.controller.supervise import Supervisor
from verlite.controller.worker_group import group
from verlite.controller.worker_handle import process_infos


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A local cluster with eight CPU slots. Leaving it must restore environment and processes.

    The workers are forks if the test file has a list PRELOAD.
    """
    preload = getattr(request.module, "PRELOAD", ())
    environment_before = dict(os.environ)
    sigterm_before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    run_dir = tmp_path_factory.mktemp("run")
    with connect(
        run_dir, address="local", num_cpus=8, call_timeout_s=120, preload=preload
    ) as cluster:
        yield cluster
    changed = [
        name
        for name in environment_before.keys() | os.environ.keys()
        if environment_before.get(name) != os.environ.get(name)
        and name.startswith(("RAY_AUTH", "RAY_ENABLE", "VERLITE"))
    ]
    assert not changed
    assert has_handler(signal.SIGTERM), "ray.shutdown resets it to the default action"
    signal.signal(signal.SIGTERM, sigterm_before)
    assert within(60, lambda: not processes_of(cluster.run_id))


def has_handler(number: int) -> bool:
    """Return whether the operating system knows a handler of this process for a signal."""
    status = Path("/proc/self/status").read_text().splitlines()
    caught = next(line.split()[1] for line in status if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.fixture
def fresh(cluster: Cluster) -> Iterator[Cluster]:
    """The file's cluster without workers and reserved devices. It is cleaned after the test."""
    import ray

    supervisor_before = cluster.supervisor
    ranks = cluster.heartbeats.watch = Watch()
    cluster.supervisor = Supervisor(supervisor_before.call_timeout_s, ranks)
    reserved_before = list(cluster.reserved)
    cluster.reserved.clear()
    yield cluster
    cluster.supervisor.stop_all()
    for placement_group in cluster.reserved:
        ray.util.remove_placement_group(placement_group)
    cluster.reserved[:] = reserved_before
    cluster.supervisor = supervisor_before
    cluster.heartbeats.watch = supervisor_before.ranks


def pids(worker: object) -> list[int]:
    """Process ids of a role's ranks."""
    infos = process_infos(group(worker).workers)
    return [info.process.pid for info in infos if info is not None]


def processes_of(run_id: str) -> list[psutil.Process]:
    """Living processes of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(RUN_MARK, "")
            if mark.partition("/")[0] == run_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether the condition becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
