"""Workers that fail, die or stop: one error with the first cause, in bounded time, and nobody left."""

import os
import signal
import threading
import time

import pytest
import torch

from tests.controller.conftest import alive, within
from tests.controller.workers import Echo, Light
from verlite.controller.columns import fetch
from verlite.controller.placement import reserve
from verlite.controller.supervise import StuckError, WorkerError
from verlite.controller.worker_group import group, ready, spawn, submit
from verlite.protocol.data import DataProto


@pytest.fixture
def light(fresh):
    worker = spawn(Light, reserve(fresh, {"light": [0, 1]}, devices_per_node=2), "light")
    ready(worker)
    return worker


@pytest.mark.parametrize(
    "how, kind, exception, says",
    [
        ("exception", "exception", "ValueError", "ValueError: bad batch"),
        ("unpicklable", "exception", "Unpicklable", "Unpicklable: cannot travel"),
        ("memory", "out of host memory", "MemoryError", "MemoryError: cannot allocate"),
        ("exit", "exception", "SystemExit", "SystemExit: 3"),
        ("terminate", "killed by SIGTERM", "Sigterm", "SIGTERM"),
        ("kill", "killed by SIGKILL or os._exit", None, "the process ended without a word"),
        ("segfault", "killed by SIGSEGV", None, 'workers.py", line [0-9]+ in fail'),
        ("abort", "killed by SIGABRT", None, 'workers.py", line [0-9]+ in fail'),
    ],
)
def test_the_cause_is_named_and_the_others_do_not_wait(light, how, kind, exception, says):
    pids = group(light).pids
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"light rank 1 failed in fail \({kind}\)") as caught:
        light.fail(1, how)
    error = caught.value
    assert (error.role, error.rank, error.method, error.kind, error.exception_type) == (
        "light",
        1,
        "fail",
        kind,
        exception,
    )
    caught.match(says)
    caught.match("light_1.log")
    assert time.monotonic() - start < 10 and within(10, lambda: not any(alive(pid) for pid in pids))
    if how == "exception":
        assert isinstance(error.__cause__, ValueError)
        caught.match(r'raise ValueError\("bad batch"\)')
    if how == "unpicklable":
        assert error.__cause__ is None
    with pytest.raises(RuntimeError, match="stopped after an earlier failure") as later:
        light.add(1)
    assert later.value.__cause__ is error


def test_a_peer_that_died_is_the_cause_and_not_the_broken_collective(fresh):
    echo = spawn(Echo, reserve(fresh, {"echo": [0, 1]}, devices_per_node=2), "echo")
    assert echo.all_reduce() == [3.0, 3.0]
    with pytest.raises(WorkerError, match="echo rank 1 failed in all_reduce .killed by SIGKILL"):
        echo.all_reduce(die_on=1)


def test_a_failure_that_looks_like_a_consequence_waits_for_its_cause(light):
    with pytest.raises(
        WorkerError, match="light rank 1 failed in lose .killed by SIGKILL"
    ) as caught:
        light.lose(1)
    caught.match("then light rank 0 in lose: RuntimeError: .*closed by peer")


def test_a_death_between_calls_is_named_when_its_columns_are_missed(fresh):
    """Who wants them only sees that their owner is gone."""
    placement = reserve(fresh, {"maker": [0], "reader": [1]}, devices_per_node=2)
    maker, reader = spawn(Echo, placement, "maker"), spawn(Echo, placement, "reader")
    spoken = maker.speak(DataProto.from_dict({"x": torch.tensor([[200_000, 0]])}))
    ready(reader)
    os.kill(group(maker).pids[0], signal.SIGKILL)
    with pytest.raises(
        WorkerError, match="maker rank 0 failed in no call .killed by SIGKILL"
    ) as caught:
        reader.listen_to(spoken)
    caught.match("then reader rank 0 in listen_to: OwnerDiedError")


def test_a_death_between_calls_is_named_when_the_driver_misses_its_columns(fresh):
    maker = spawn(Echo, reserve(fresh, {"maker": [0]}, devices_per_node=1), "maker")
    spoken = maker.speak(DataProto.from_dict({"x": torch.tensor([[200_000, 0]])}))
    os.kill(group(maker).pids[0], signal.SIGKILL)
    assert within(20, lambda: fresh.supervisor._dead()), "Ray has not seen it"
    time.sleep(2)  # until then the object store may still have the values
    with pytest.raises(WorkerError, match="maker rank 0 failed in no call .killed by SIGKILL"):
        fetch(spoken)


def test_construction_that_fails_is_the_failure_of_the_next_call(fresh):
    worker = spawn(
        Light, reserve(fresh, {"light": [0, 1]}, devices_per_node=2), "light", fail_on_rank=1
    )
    with pytest.raises(
        WorkerError, match="light rank 1 failed in construction.*FileNotFoundError: no such model"
    ) as caught:
        worker.seat()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_role_that_nobody_waits_for_is_watched_too(fresh):
    placement = reserve(fresh, {"a": [0], "b": [0]}, devices_per_node=1)
    a, b = spawn(Light, placement, "a"), spawn(Light, placement, "b")
    ready(a, b)
    submit(b.sleep, 1000)
    submit(b.sleep, 1000)
    threading.Timer(0.5, os.kill, (group(b).pids[0], signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(WorkerError, match="b rank 0 failed in sleep"):
        a.sleep(1000)
    assert time.monotonic() - start < 10


def test_a_frozen_rank_is_named_and_killed(light):
    pids = group(light).pids
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(
        StuckError,
        match=r"(?s)light.sleep did not finish within 2 s.*rank 1: process \d+ is stopped",
    ) as caught:
        submit(light.sleep, 0.0).result(timeout_s=2)
    assert (caught.value.finished, caught.value.unfinished) == ([0], [1])
    assert within(10, lambda: not any(alive(pid) for pid in pids))


def test_a_stuck_rank_shows_where_it_is(light, fresh):
    with pytest.raises(
        StuckError,
        match='(?s)not finished: 0, 1.*rank 0: process [0-9]+ is sleeping.*workers.py", line [0-9]+ in sleep',
    ):
        submit(light.sleep, 1000).result(timeout_s=1)
    assert "most recent call first" in (fresh.run_dir / "logs" / "light_1.log").read_text()


def test_ctrl_c_interrupts_a_wait_at_once(light):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        light.sleep(1000)
    assert time.monotonic() - start < 4
