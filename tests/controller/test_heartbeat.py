"""Heartbeats between a sender and a receiver of this process."""

import dataclasses
import sys
import time

import pytest

from tests.controller.conftest import within
from verlite import progress
from verlite.control import limits
from verlite.control.watch import Beat, Watch
from verlite.controller import heartbeat
from verlite.controller.heartbeat import Receiver, Sender, in_collective, pack, unpack
from verlite.progress import Progress


@pytest.fixture
def receiver():
    receiver = Receiver("127.0.0.1", Watch(45.0))
    yield receiver
    receiver.stop()


@pytest.fixture
def here(monkeypatch):
    """This process's position, as if it had just started."""
    position = Progress()
    monkeypatch.setattr(progress, "here", position)
    return position


def test_only_the_holder_of_the_key_can_send(receiver):
    target = receiver.target("actor", 1)
    forged = dataclasses.replace(target, key=bytes(32))
    beat = Beat(1, Progress("update"))
    datagram = pack(target, beat)
    for bad in (pack(forged, beat), datagram[:-1], datagram + b" ", b"", b"{}", bytes(4000)):
        receiver.receive(bad)
    assert receiver.watch.heard == {}
    receiver.receive(datagram)
    assert receiver.watch.heard[target.name].beat == beat
    assert unpack(target.key, datagram) == (target.name, beat)
    assert repr(target.key) not in repr(target)


def test_an_old_datagram_does_not_keep_a_worker_alive(receiver):
    target = receiver.target("actor", 0)
    first, second = (pack(target, Beat(i, Progress(ticks=i))) for i in (1, 2))
    receiver.receive(first)
    receiver.receive(second)
    receiver.watch.clock += 100.0
    receiver.receive(first)
    receiver.receive(second)
    heard = receiver.watch.heard[target.name]
    assert (heard.beat.number, heard.heard < 90.0, heard.moved < 90.0) == (2, True, True)


def test_two_processes_of_one_rank_have_two_names(receiver):
    assert receiver.target("rollout", 0).name != receiver.target("rollout", 0).name


def test_the_receivers_clock_does_not_run_while_it_is_suspended(receiver, monkeypatch):
    """After a suspension every worker would otherwise seem to have been silent."""
    jump = 1000.0
    real = time.monotonic
    before = receiver.watch.clock
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: real() + jump)
    assert within(60, lambda: receiver.watch.clock > before)
    assert receiver.watch.clock < before + 100.0


def test_a_sender_is_heard_without_any_call(receiver, here, monkeypatch):
    monkeypatch.setattr(limits, "BEAT_S", 0.1)
    monkeypatch.setattr(limits, "SAMPLE_S", 0.05)
    sender = Sender(receiver.target("actor", 0))
    name = sender.target.name
    assert within(60, lambda: name in receiver.watch.heard)
    progress.begin("update")
    here.part = "mini-batch 2 of 4"
    progress.tick("micro-batch 1 of 8")
    assert within(60, lambda: receiver.watch.heard[name].beat.at == here)
    assert here.calls == 1 and here.ticks == 1
    number = receiver.watch.heard[name].beat.number
    assert within(60, lambda: receiver.watch.heard[name].beat.number > number + 1)
    assert not receiver.watch.heard[name].beat.in_collective


def test_positions(here):
    progress.begin("update")
    assert list(progress.ticking("abc")) == ["a", "b", "c"]
    assert (here.call, here.ticks) == ("update", 3)
    with pytest.raises(ValueError), progress.waiting_for("the disk"):
        assert here.waits_for == "the disk"
        raise ValueError
    assert (here.waits_for, here.ticks) == ("", 4)
    here.requests = 2
    progress.end()
    assert (here.call, here.requests, here.calls) == ("", None, 1)
    progress.begin("update")
    assert (here.ticks, here.calls) == (0, 2)


def test_a_frame_of_a_collective_is_recognized_near_the_innermost_one():
    def frame(depth: int):
        source = "def call(f):\n    return f()\n"
        space: dict = {}
        exec(compile(source, "/x/torch/distributed/distributed_c10d.py", "exec"), space)

        def inner(more: int):
            return inner(more - 1) if more else sys._getframe()

        return space["call"](lambda: inner(depth))

    assert in_collective(frame(0))
    assert not in_collective(frame(5))
    assert not in_collective(None)
