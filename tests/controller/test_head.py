"""Which cluster is joined, and what stands in for its head. No Ray is started."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import ray
from ray._private.utils import write_ray_address
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from verlite.controller import head, ray_internals
from verlite.controller.head import NoCluster, find, wait_for


class Head(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
    """A gRPC server that answers the driver's question as the head of a cluster does."""

    def __init__(self, version=ray.__version__, joined=True, code=None, details=""):
        self.version, self.joined, self.code, self.details = version, joined, code, details

    def CheckAlive(self, request, context):  # noqa: N802 (Ray's name)
        if self.code is not None:
            context.abort(self.code, self.details)
        alive = [self.joined] * len(request.node_ids)
        return gcs_service_pb2.CheckAliveReply(ray_version=self.version, raylet_alive=alive)

    def serve(self, port=0):
        self.server = grpc.server(ThreadPoolExecutor(2))
        gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.server.start()
        return f"127.0.0.1:{self.port}"


@pytest.fixture(autouse=True)
def one_raylet(monkeypatch):
    """This machine runs one raylet."""
    monkeypatch.setattr("ray._private.services.find_node_ids", lambda: {"ab" * 28})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def serve():
    heads = []

    def start(port=0, **fields):
        heads.append(Head(**fields))
        return heads[-1].serve(port)

    yield start
    for one in heads:
        one.server.stop(None)


@pytest.fixture
def closed_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound but not listening
        yield bound.getsockname()[1]


@pytest.mark.parametrize("address", ["ray://head:10001", "http://127.0.0.1:8265"])
def test_addresses_of_other_services_name_the_right_command(address):
    with pytest.raises(NoCluster, match=f"address={address}.*ray job submit --address={address}"):
        find(address)


REFUSALS = [
    ({"code": grpc.StatusCode.UNAUTHENTICATED, "details": "InvalidAuthToken"}, "RAY_AUTH_MODE"),
    ({"code": grpc.StatusCode.UNIMPLEMENTED}, "does not answer as the head of a Ray cluster"),
    ({"version": "2.1.0"}, "the cluster runs Ray 2.1.0, and this process has"),
]


@pytest.mark.parametrize(("fields", "text"), REFUSALS, ids=["token", "other service", "version"])
def test_what_can_never_be_joined_is_told_at_once(fields, text, serve):
    address = serve(**fields)
    start = time.monotonic()
    with pytest.raises(NoCluster) as caught:
        wait_for(address, address, 60)
    assert text in str(caught.value)
    assert f"ray_kwargs.ray_init.address={address}" in str(caught.value)
    assert time.monotonic() - start < 10


def test_an_http_server_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            while True:
                server.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(NoCluster, match="not the dashboard's"):
            find(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("address", ["127.0.0.1:port", "127.0.0.1:99999"])
def test_an_address_that_is_not_host_and_port_is_refused(address):
    with pytest.raises(NoCluster, match="Give host:port"):
        find(address)


@pytest.mark.slow
def test_a_head_that_starts_later_is_waited_for(serve, closed_port, capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert find(None) == address, "that nothing answers yet is left to wait_for"
    threading.Timer(1.5, serve, [port]).start()
    assert wait_for(address, None, 60) == address
    text = f"waiting for the Ray cluster at RAY_ADDRESS={address}: connection refused, giving up"
    assert text in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["connection refused", "this machine has not joined", "nosuch"])
def test_the_wait_for_a_head_ends_with_what_is_missing(reason, serve, closed_port):
    address = {
        "connection refused": f"127.0.0.1:{closed_port}",
        "this machine has not joined": serve(joined=False),
        "nosuch": "nosuch.invalid:6379",
    }[reason]
    start = time.monotonic()
    with pytest.raises(NoCluster) as caught:
        wait_for(address, address, 1.2)
    assert reason in str(caught.value)
    assert "ray_kwargs.wait_s (here 1.2 s)" in str(caught.value)
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_running_cluster_is_where_ray_start_recorded_it(variable, tmp_path, monkeypatch):
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / "ray").mkdir()
    assert ray_internals.running_cluster() is None
    write_ray_address("127.0.0.1:6379")
    assert ray_internals.running_cluster() == "127.0.0.1:6379"


def test_which_cluster_is_joined_without_an_address(serve, closed_port, monkeypatch):
    running = serve()
    monkeypatch.setattr(ray_internals, "running_cluster", lambda: running)
    assert find(None) == running
    assert find("local") is None
    assert find("auto") == "auto"
    assert wait_for("auto", "auto", 0) == running
    # The address that a crashed `ray start` left behind is ignored, unless a cluster is asked for.
    monkeypatch.setattr(ray_internals, "running_cluster", lambda: f"127.0.0.1:{closed_port}")
    assert find(None) is None
    with pytest.raises(NoCluster, match="address=auto: connection refused"):
        wait_for("auto", "auto", 0)
    monkeypatch.setattr(ray_internals, "running_cluster", lambda: None)
    assert find(None) is None
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(NoCluster, match="RAY_ADDRESS=auto: no cluster runs on this machine"):
        wait_for(head.find(None), None, 0)
