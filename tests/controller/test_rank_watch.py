"""Frozen, stuck and slow ranks among real workers."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from tests.controller.conftest import alive, pids, within
from tests.controller.workers import Echo, Light
from verlite.controller.failures import StuckError, WorkerError
from verlite.controller.placement import reserve
from verlite.controller.worker_group import group, ready, spawn

pytestmark = pytest.mark.process
PRELOAD = ["tests.controller.workers", "torch.distributed"]
TIMEOUT_S = 4.0


@pytest.fixture
def watched(fresh):
    """The cluster with a short time-out. `said` has the warnings."""
    fresh.said = []
    fresh.supervisor.ranks.timeout_s = TIMEOUT_S
    fresh.supervisor.warn = fresh.said.append
    return fresh


def workers(cluster, worker_class):
    worker = spawn(worker_class, reserve(cluster, {"w": [0, 1]}, devices_per_node=2), "w")
    ready(worker)
    heard = cluster.supervisor.ranks.heard
    assert within(60, lambda: all(one.heartbeat in heard for one in group(worker).workers))
    return worker


def stacks_in(text: str) -> str:
    return Path(re.search(r"\S+/stacks_\S+\.txt", text)[0]).read_text()


def test_a_stopped_rank_is_frozen(watched):
    light = workers(watched, Light)
    processes = pids(light)
    beats = watched.supervisor.ranks.heard
    name = group(light).workers[1].heartbeat

    def stop() -> None:
        if within(60, lambda: beats[name].beat.at.call == "turns"):
            os.kill(processes[1], signal.SIGSTOP)

    threading.Thread(target=stop).start()
    with pytest.raises(WorkerError, match="w rank 1 failed in turns .frozen.") as caught:
        light.turns(1000, 0.5)
    text = str(caught.value)
    assert "the process is stopped by a signal. Last position: turns, turn " in text
    assert f"process {processes[1]} on node" in text
    assert (caught.value.rank, caught.value.kind) == (1, "frozen")
    stacks = stacks_in(text)
    assert f"w rank 0: process {processes[0]} " in stacks and "in turns" in stacks
    assert "w.turns has run for" in stacks
    assert within(60, lambda: not any(alive(pid) for pid in processes))


def test_a_deadlock_is_named_and_ended_with_the_rank_that_did_not_enter(watched):
    echo = workers(watched, Echo)
    echo.all_reduce_late(0, 0.0)
    message = "(?s)w.all_reduce_late made no progress for 16 s.*The others wait for rank 1"
    with pytest.raises(StuckError, match=message) as caught:
        echo.all_reduce_late(1, 1000.0)
    assert caught.value.unfinished == [0, 1]
    (said,) = watched.said
    assert re.match(r"w.all_reduce_late: no progress of ranks 0-1 for [4-9] s", said)
    assert "The others wait for rank 1. Rank 1 (process " in said
    assert "The call is ended after 16 s without progress" in said
    assert "in all_reduce_late" in stacks_in(said)


def test_no_false_alarm(watched):
    """A call ten times longer than before, and native code that lets no thread run."""
    light = workers(watched, Light)
    light.turns(2, 0.5)
    light.turns(20, 0.5)
    assert watched.said == []
    logs = watched.run_dir / "logs"
    before = set(logs.glob("stacks_*"))
    light.hold_lock(60)  # until a signal comes
    assert set(logs.glob("stacks_*")) > before, "heartbeats did not stop, so nobody looked"
    assert light.add(2, b=3) == 5


def test_a_slow_rank_is_named_once_and_goes_on(watched):
    echo = workers(watched, Echo)
    echo.all_reduce_late(0, 0.0)
    for _ in range(4):
        echo.all_reduce_late(1, 2.5)
    (said,) = watched.said
    assert said.startswith("w rank 1 is a straggler: in the last 3 calls of all_reduce_late")
    assert 1.0 < watched.supervisor.ranks.stragglers.take("w") < 20.0
