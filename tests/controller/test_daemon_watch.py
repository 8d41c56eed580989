"""Processes of Ray, and the guardian, that end or are stopped. `sleep` stands in for Ray's."""

import errno
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.controller.conftest import within
from verlite.control import limits
from verlite.controller import cluster as cluster_module
from verlite.controller import guardian, node, ray_internals
from verlite.controller.cluster import Cluster, bounded
from verlite.controller.failures import RayLost
from verlite.controller.node_watch import Daemon, DaemonWatch
from verlite.controller.supervise import Supervisor


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "300"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def watch(sleeper, tmp_path, monkeypatch):
    """Return (watch of the sleeper, errors that the main thread did not raise in time)."""
    monkeypatch.setattr(limits, "DAEMONS_EVERY_S", 0.05)
    monkeypatch.setattr(limits, "REACT_S", 0.3)
    log = tmp_path / "raylet.out"
    log.write_text("first\nthe disk is on fire\n")
    daemon = Daemon("raylet", node.process(sleeper.pid), (str(tmp_path / "none"), str(log)))
    ignored = []
    watch = DaemonWatch(lambda: [daemon], ignored.append)
    yield watch, ignored
    watch.stop()


def test_the_end_of_a_daemon_is_named_with_the_end_of_its_log(watch, sleeper):
    watched, ignored = watch
    assert watched.check() is None
    sleeper.kill()
    assert within(60, watched.check)
    text = str(watched.check())
    assert f"Ray's process raylet (process {sleeper.pid}) has ended." in text
    assert "the disk is on fire" in text
    time.sleep(0.6)
    assert not ignored, "the main thread has raised it"


@pytest.mark.slow
def test_a_stopped_daemon_is_lost_and_one_that_goes_on_is_not(watch, sleeper):
    watched, _ = watch
    os.kill(sleeper.pid, signal.SIGSTOP)
    time.sleep(0.1)
    os.kill(sleeper.pid, signal.SIGCONT)
    time.sleep(1.0)
    assert watched.lost is None
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert within(60, lambda: watched.lost is not None)
    assert "is stopped by a signal (SIGSTOP)" in str(watched.lost)


def test_a_main_thread_that_hangs_is_reported_by_the_watch(watch, sleeper):
    watched, ignored = watch
    sleeper.kill()
    assert within(60, lambda: ignored)
    assert ignored == [watched.lost]


def test_a_watch_without_free_file_descriptors_goes_on(sleeper, monkeypatch):
    """A process whose state cannot be read is not lost, and polls go on."""
    monkeypatch.setattr(limits, "DAEMONS_EVERY_S", 0.02)
    monkeypatch.setattr(limits, "FIND_LOOKS", 1)
    daemon = Daemon("raylet", node.process(sleeper.pid))
    polls = []

    def refuse(*arguments):
        raise OSError(errno.EMFILE, "Too many open files")

    def others():
        polls.append(node.process_state(daemon.process))
        refuse()

    watched = DaemonWatch(lambda: refuse() if polls else [daemon], lambda error: None, others)
    with monkeypatch.context() as patched:
        patched.setattr(node, "Path", lambda path: SimpleNamespace(read_text=refuse))
        assert within(60, lambda: polls.count("unknown") > 10)
        assert watched.check() is None
    sleeper.kill()
    assert within(60, lambda: watched.lost is not None)
    watched.stop()


def test_calls_end_when_ray_is_lost(watch, sleeper):
    supervisor = Supervisor(60.0)
    supervisor.daemon_watch, _ = watch
    assert supervisor.daemon_watch.lost is None
    sleeper.kill()
    assert within(60, lambda: supervisor.daemon_watch.lost)
    with pytest.raises(RayLost):
        supervisor._raise_first([])
    assert isinstance(supervisor.failure, RayLost)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_guardian_is_replaced(number):
    cluster = Cluster(True, "", "id", Path("unused"), Supervisor(1.0))
    mark = f"VERLITE_TEST_GUARDIAN={os.getpid()}"
    warnings = []
    first = cluster._guardian = guardian.start(mark)
    try:
        cluster._check_guardian(mark, None, warnings.append)
        assert cluster._guardian is first and not warnings
        os.kill(first.pid, number)
        watched = node.process(first.pid)
        ends = ("dead", "gone", "stopped by a signal")
        assert within(60, lambda: node.process_state(watched) in ends)
        for _ in range(limits.FROZEN_LOOKS):
            cluster._check_guardian(mark, None, warnings.append)
        assert cluster._guardian is not first and cluster._guardian.poll() is None
        assert len(warnings) == 1 and f"(guardian, process {first.pid})" in warnings[0]
        assert first.returncode == -signal.SIGKILL
    finally:
        cluster._guardian.kill()
        cluster._guardian.wait()


def test_a_step_of_the_shutdown_cannot_take_longer_than_its_limit():
    release = threading.Event()
    assert not bounded(lambda: release.wait(60), 0.1)
    release.set()
    assert bounded(lambda: 1 / 0, 30), "an exception ends the step"


def test_the_handler_of_signals_is_set_again_however_fast_ray_ends(monkeypatch):
    done = []

    class Eager(threading.Thread):
        def start(self):
            self.run()

    monkeypatch.setattr(cluster_module.threading, "Thread", Eager)
    monkeypatch.setattr(ray_internals, "restore_sigterm", lambda: done.append("restored"))
    assert bounded(lambda: done.append("ended"), 30)
    assert done == ["ended", "restored"]


@pytest.mark.parametrize("hangs", [True, False])
def test_ray_is_not_started_beside_a_shutdown_that_hangs(monkeypatch, hangs):
    import ray

    starts, release = [], threading.Event()

    def start(**options):
        starts.append(options)
        raise RuntimeError("timed out")

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "shutdown", lambda: hangs and release.wait(60))
    monkeypatch.setattr(limits, "RAY_END_S", 0.2)
    with pytest.raises(RayLost, match="timed out"):
        cluster_module._start_local(1, None, (), lambda: None)
    release.set()
    assert len(starts) == (1 if hangs else 3)
