"""A joined cluster of two nodes: device discovery, stable ranks, bounded waits, a lost node."""

import time

import pytest

from tests.controller.conftest import alive, pids, processes_of, within
from tests.controller.workers import Light
from verlite.controller.cluster import RUN_MARK, connect
from verlite.controller.failures import WorkerError
from verlite.controller.placement import ResourcesMissing, reserve
from verlite.controller.ray_internals import lean_head
from verlite.controller.ray_node import RANK_LABEL
from verlite.controller.worker_group import group, ready, spawn

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def nodes(monkeypatch_module):
    """Two Ray nodes on this machine, on loopback, not announced to other programs. The head has the
    higher rank."""
    monkeypatch_module.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch_module.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
    monkeypatch_module.setattr("ray._private.utils.write_ray_address", lambda *args, **kwargs: None)
    from ray.cluster_utils import Cluster as Nodes

    with lean_head():
        head_args = {"num_cpus": 2, "include_dashboard": False, "labels": {RANK_LABEL: "10"}}
        nodes = Nodes(initialize_head=True, head_node_args=head_args)
        nodes.add_node(num_cpus=2, labels={RANK_LABEL: "9"})
    yield nodes
    nodes.shutdown()


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def joined(nodes, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    variables = {"VERLITE_TEST_PLAIN": "plain", "VERLITE_TEST_TOKEN": "canary"}
    with connect(
        run_dir, address=nodes.address, call_timeout_s=120, environment=variables
    ) as cluster:
        yield cluster


def test_too_few_nodes_are_reported_after_a_bounded_wait(joined, capsys):
    start = time.monotonic()
    with pytest.raises(ResourcesMissing) as caught:
        reserve(joined, {"a": [0]}, nodes=3, devices_per_node=2, wait_s=1.5)
    assert 1.5 <= time.monotonic() - start < 10
    caught.match(r"needs 3 node\(s\) with 2 CPU each")
    lines = [line.split() for line in str(caught.value).splitlines()]
    assert lines[1] == ["node", "CPU", "needed", "CPU", "total", "CPU", "free"]
    assert lines[2] == lines[3] == ["127.0.0.1", "2", "2", "2"]
    assert lines[4][:4] == ["(node", "3:", "has", "not"]
    assert "waiting for devices: 2 of 3 nodes" in capsys.readouterr().err


def test_devices_of_another_run_are_not_free(joined):
    import ray

    first = reserve(joined, {"a": [0]}, nodes=1, devices_per_node=1, wait_s=10)
    start = time.monotonic()
    with pytest.raises(ResourcesMissing, match="127.0.0.1 +2 +2 +1"):
        reserve(joined, {"a": [0]}, nodes=2, devices_per_node=2, wait_s=1)
    assert time.monotonic() - start < 9  # Ray waits longer if it is asked for what is not free
    ray.util.remove_placement_group(first.group)


def test_ranks_are_ordered_by_node_and_a_lost_node_ends_the_run(joined, nodes):
    roles = {"a": [0, 1, 2, 3], "b": [3]}
    placement = reserve(joined, roles, nodes=2, devices_per_node=2, wait_s=30)
    node_ids = [device.node_id for device in placement.devices]
    other = next(node for node in nodes.list_all_nodes() if node is not nodes.head_node)
    assert node_ids == [other.node_id] * 2 + [nodes.head_node.node_id] * 2
    a = spawn(Light, placement, "a")
    b = spawn(Light, placement, "b")
    ready(a, b)
    specs = a.spec()
    assert [spec[:3] for spec in specs] == [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)]
    assert [spec[3] for spec in specs] == node_ids
    assert [worker.node_id for worker in group(a).workers] == node_ids
    marks = [mark for [mark] in a.environment(RUN_MARK)]
    assert marks == [f"{joined.run_id}/a/{rank}" for rank in range(4)]
    assert a.environment("VERLITE_TEST_PLAIN", "VERLITE_TEST_TOKEN") == [["plain", "canary"]] * 4
    assert all("plain" in text and "canary" not in text for text in a.runtime_env())
    processes = [*pids(a), *pids(b)]
    children = a.child()
    future = group(a).submit("sleep", 1000)
    start = time.monotonic()
    nodes.remove_node(other, allow_graceful=False)
    with pytest.raises(WorkerError) as caught:
        future.result()
    assert time.monotonic() - start < 60
    assert caught.value.kind in ("node lost", "killed by SIGTERM")
    assert within(60, lambda: not any(alive(pid) for pid in processes))
    joined.shutdown()
    assert within(60, lambda: not any(alive(pid) for pid in children))
    assert within(60, lambda: not processes_of(joined.run_id))
