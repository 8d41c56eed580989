"""A lost node is noticed by connections that fail several times in a row. No Ray is started."""

import socket
import time

import pytest

from tests.controller.conftest import within
from verlite.control import limits
from verlite.controller import node_watch
from verlite.controller.failures import NodeLost, node_lost
from verlite.controller.node_watch import NodeWatch, Watched
from verlite.controller.supervise import Future, Supervisor
from verlite.controller.worker_handle import WorkerHandle


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(limits, "PROBE_EVERY_S", 0.02)


def test_a_node_is_lost_after_several_failures_in_a_row(monkeypatch):
    answers = {"a": iter(["x"] * 3 + [""] + ["x"] * 3 + [""] * 10**6), "b": iter(["timed out"] * 9)}
    monkeypatch.setattr(node_watch, "probe", lambda one: next(answers[one.name], "gone"))
    a, b = (Watched(name, ("192.0.2.1", 1), name) for name in "ab")
    watch = NodeWatch([a, b])
    assert within(60, lambda: bool(watch.lost))
    time.sleep(0.3)
    watch.stop()
    assert watch.lost == {b: "timed out"}


def test_a_wait_ends_with_the_lost_node_and_its_workers(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert node_watch.probe(Watched("x", ("127.0.0.1", port), "x")) == ""
    workers = [
        WorkerHandle(None, "actor", rank, name, name, f"/run/logs/actor_{rank}.log", None)
        for rank, name in enumerate("ab")
    ]
    supervisor = Supervisor(60.0)
    supervisor.workers = workers
    stopped = []
    monkeypatch.setattr(supervisor, "stop", stopped.append)
    monkeypatch.setattr(supervisor, "poll", time.sleep)
    supervisor.node_watch = NodeWatch([Watched("node 10.0.0.2 (rank 1)", ("127.0.0.1", port), "b")])
    future = Future(supervisor, "actor", "update", {"ref": workers[1]}, list)
    with pytest.raises(NodeLost) as caught:
        supervisor.wait(future, 20)
    text = str(caught.value)
    assert text.startswith("node 10.0.0.2 (rank 1) is lost: no connection to Ray there (Connection")
    assert "its workers: actor rank 1\n" in text
    assert stopped == [workers]
    assert "its workers" not in str(node_lost("the head", "timed out", []))
