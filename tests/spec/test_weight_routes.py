"""Which transport each engine gets, from where actor and engines sit."""

import pytest

from verlite.spec.weight_routes import weight_routes, why_impossible


def routes(actor, rollout, per_engine=1, per_node=2, device="cuda", chosen="auto", inference=()):
    return weight_routes(actor, rollout, per_engine, per_node, device, chosen, inference)


def test_engines_beside_an_actor_rank_share_memory():
    tried = routes([0, 1, 2, 3], [0, 1, 2, 3])
    assert tried.transport == ("ipc",) * 4 and tried.is_streaming and tried.writers == ()
    assert str(tried) == "ipc. If its trial fails: shared_memory"
    found = tried.fallback
    assert found.transport == ("shared_memory",) * 4 and found.fallback is None
    assert found.writers == (0, 2), "the first actor rank of each node"
    assert not found.is_streaming and str(found) == "shared_memory"


def test_engines_on_other_nodes_receive_one_copy_a_node():
    """The actor is on node 0. Node 1 has two engines, node 2 one with two devices."""
    found = routes([0, 1], [2, 3, 4, 5])
    assert found.transport == ("collective",) * 4
    assert found.nodes == (1, 1, 2, 2)
    assert found.receivers == (0, 2) and found.writers == ()
    assert routes([0, 1], [2, 3, 4, 5], per_engine=2).receivers == (0, 1)


def test_only_nodes_with_engines_get_a_copy():
    found = routes([0, 1, 2, 3], [3, 4])
    assert found.transport == ("ipc", "collective")
    assert found.writers == () and found.receivers == (1,)
    found = found.fallback
    assert found.transport == ("shared_memory", "collective")
    assert found.writers == (2,) and found.receivers == (1,)
    assert str(found) == "shared_memory to 1, collective to 1 engines"


def test_ipc_publishes_on_every_device_of_an_engine():
    found = routes([0, 1, 2, 3], [2, 3], per_engine=2, per_node=4, chosen="ipc")
    assert found.publishers == {2: 2, 3: 3}
    assert found.is_streaming and found.writers == found.receivers == ()


def test_processes_of_a_cpu_device_stream(monkeypatch):
    """The second engine has a device without an actor rank; the third is on another node."""
    found = routes([0, 1, 2], [0, 3, 4], per_node=4, device="cpu", inference=[1])
    assert found.transport == ("ipc", "shared_memory", "collective", "shared_memory")
    assert found.publishers == {0: 0} and found.writers == (0,) and found.receivers == (2,)
    assert found.fallback is None, "memory files need no trial"
    assert routes([0], [0, 1], per_engine=2, device="cpu").transport == ("shared_memory",)
    assert routes([0, 1], [0, 1], per_engine=2, device="cpu").transport == ("ipc",)
    monkeypatch.setattr("sys.platform", "darwin")
    assert routes([0], [0], device="cpu").transport == ("shared_memory",), "no abstract sockets"


def test_only_streams_on_cpus_have_small_buckets():
    streams, mixed = routes([0], [0], device="cpu"), routes([0], [0, 1], device="cpu")
    assert streams.bucket_bytes("cpu", 512) == 4 << 20 and streams.bucket_bytes("cpu", 1) == 1 << 20
    assert streams.bucket_bytes("cuda", 512) == 512 << 20
    assert mixed.bucket_bytes("cpu", 512) == 512 << 20, "each bucket of shared_memory is a file"


def test_inference_ranks_are_readers_after_the_engines():
    """Node 0 has an engine and the actor, node 1 an engine and inference, node 2 inference."""
    found = routes([1], [0, 2], inference=[3, 4, 5])
    assert found.engines == 2 and found.reader("rollout", 1) == 1
    assert found.reader("inference", 0) == 2
    assert found.transport == ("shared_memory", *("collective",) * 4)
    assert found.nodes == (0, 1, 1, 2, 2)
    assert found.writers == (0,) and found.receivers == (1, 3), "one of each node"
    words = "shared_memory to 1, collective to 1 engines; inference: collective"
    assert str(found) == words


def test_a_node_of_inference_beside_the_actor_gets_a_copy_too():
    found = routes([2, 3], [0, 1], inference=[4, 5], per_node=4, chosen="auto")
    assert found.writers == (0,) and found.receivers == (2,)
    found = routes([0, 1], [0, 1], inference=[2, 3], per_node=4, chosen="ipc")
    assert found.transport == ("ipc", "ipc", "shared_memory", "shared_memory")
    assert found.writers == (0,) and found.publishers == {0: 0, 1: 1}
    assert routes([0], [1], inference=[2], chosen="files").transport == ("files", "files")


def test_shared_memory_needs_an_actor_rank_beside_inference():
    found = why_impossible([0, 1], [0, 1], 1, 2, "cpu", "shared_memory", [2])
    assert found.startswith("node 1 has inference ranks but no actor rank")


@pytest.mark.parametrize(
    "actor, rollout, device, chosen, why",
    [
        ([0, 1], [2, 3], "cpu", "shared_memory", "node 1 has engines but no actor rank"),
        ([0, 1], [1, 2], "cuda", "ipc", "device 2 has an engine but no actor rank"),
        ([0, 1], [0, 1], "cuda", "collective", "device 0 would be two ranks"),
        ([0, 1], [0, 1], "cpu", "collective", ""),
        ([0, 1], [1], "cuda", "collective", ""),
        ([0, 1], [0, 1], "cuda", "ipc", ""),
        ([0], [2, 3], "cuda", "files", ""),
        ([0], [2, 3], "cuda", "auto", ""),
    ],
)
def test_impossible_transports_are_named(actor, rollout, device, chosen, why):
    found = why_impossible(actor, rollout, 1, 2, device, chosen)
    assert found.startswith(why) if why else found == ""
