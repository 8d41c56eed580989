"""The transport `ipc`. On a CPU its buffers are memory files; the protocol is the same."""

import os
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.other_user import as_nobody
from tests.weights.test_buckets import NAMED, assert_equal
from verlite.weights import TransportError, ipc
from verlite.weights.ipc import (
    BucketStream,
    Publisher,
    publish_trial,
    read_trial,
    without_expandable,
)
from verlite.weights.transport import publish

CPU = torch.device("cpu")


@pytest.fixture
def publisher():
    publisher = Publisher(CPU, timeout_s=10)
    yield publisher
    publisher.close()


class Publishing(threading.Thread):
    """The trainer's part of a sync."""

    def __init__(self, publisher, named, bucket_bytes):
        super().__init__(daemon=True)
        self.arguments = named, [publisher], bucket_bytes
        self.error = None
        self.start()

    def run(self):
        try:
            publish(*self.arguments)
        except Exception as error:
            self.error = error


def open_buffers():
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += "verlite-weights" in os.readlink(f"/proc/self/fd/{name}")
    return count


@pytest.mark.parametrize("bucket_bytes", [1, 2000, 1 << 20])
def test_the_engine_gets_every_bucket_and_may_keep_its_tensors(publisher, bucket_bytes):
    """Two buffers are reused for all buckets, and they are freed afterwards."""
    for _ in range(2):
        publishing = Publishing(publisher, NAMED, bucket_bytes)
        assert_equal(list(BucketStream((publisher.address,), timeout_s=10)))
        publishing.join(10)
        assert publishing.error is None
    assert open_buffers() == 0


def test_buckets_may_grow(publisher):
    """A larger bucket needs a new buffer, whose handle may be that of the old one."""
    named = [(f"w{i}", torch.randn(100 * (i + 1))) for i in range(12)]
    publishing = Publishing(publisher, named, 1)
    assert_equal(list(BucketStream((publisher.address,), timeout_s=10)), named)
    publishing.join(10)
    assert publishing.error is None


def test_buffers_are_freed_after_the_engine_has_closed_them(publisher, monkeypatch):
    """A GPU's shared memory is not freed while another process has it open."""
    mapped = []
    original = ipc.open_buffer

    def open_buffer(handle):
        memory = original(handle)
        mapped.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(ipc, "open_buffer", open_buffer)
    open_at_free = []
    free = publisher._free
    monkeypatch.setattr(
        publisher,
        "_free",
        lambda: (open_at_free.append(sum(ref() is not None for ref in mapped)), free()),
    )
    publishing = Publishing(publisher, NAMED, 2000)
    assert_equal(list(BucketStream((publisher.address,), timeout_s=10)))
    publishing.join(10)
    assert len(mapped) > 1 and open_at_free == [0]


def test_each_device_of_an_engine_has_its_own_publisher(publisher):
    stream = BucketStream(("/nowhere", publisher.address), rank=1, timeout_s=10)
    publishing = Publishing(publisher, NAMED, 2000)
    assert_equal(list(stream))
    publishing.join(10)


def test_a_trainer_that_fails_fails_the_engine(publisher):
    def broken():
        yield from NAMED[:3]
        raise ZeroDivisionError

    publishing = Publishing(publisher, broken(), 1)
    with pytest.raises(TransportError, match="could not send all weights: ZeroDivisionError"):
        list(BucketStream((publisher.address,), timeout_s=10))
    publishing.join(10)
    assert isinstance(publishing.error, ZeroDivisionError)
    publishing = Publishing(publisher, NAMED, 2000)
    assert_equal(BucketStream((publisher.address,), timeout_s=10))
    publishing.join(10)


def test_an_engine_that_stops_reading_fails_the_trainer(publisher):
    publishing = Publishing(publisher, NAMED, 1)
    reading = iter(BucketStream((publisher.address,), timeout_s=10))
    list(islice(reading, 2))
    reading.close()
    publishing.join(10)
    assert isinstance(publishing.error, TransportError)


def test_the_trainer_waits_for_a_connection_only_so_long(monkeypatch):
    monkeypatch.setattr(ipc, "JOIN_S", 0.2)
    publisher = Publisher(CPU)
    with pytest.raises(TransportError, match=r"no engine asked for the weights within 0\.2 s"):
        publish(NAMED, [publisher], 2000)
    publisher.close()


def test_an_engine_waits_for_a_place_in_the_queue_only_so_long(publisher, monkeypatch):
    monkeypatch.setattr(ipc, "JOIN_S", 0.2)
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
        one.connect(publisher.address)
        other.connect(publisher.address)
        with pytest.raises(TransportError, match=r"the trainer took no connection within 0\.2 s"):
            list(BucketStream((publisher.address,), timeout_s=10))


def test_other_settings_of_the_allocator_are_kept():
    given = "max_split_size_mb:512,expandable_segments:True,garbage_collection_threshold:0.8"
    kept = "max_split_size_mb:512,garbage_collection_threshold:0.8,expandable_segments:False"
    assert without_expandable(given) == kept
    assert without_expandable("") == "expandable_segments:False"


def test_allocator_settings_of_torch_2_11_are_read_from_a_snapshot(monkeypatch):
    """It has no function that returns them."""
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "max_split_size": -1}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": settings})
    assert ipc._allocator_settings() == "expandable_segments:True"


TRIAL = """
import sys
from verlite.weights import ipc
if sys.argv[2] == "other values":
    opened = ipc.open_buffer
    ipc.open_buffer = lambda handle: opened(handle) + 1
print(ipc.read_trial(ipc.BucketStream(("\\0" + sys.argv[1],), timeout_s=120)))
"""


@pytest.mark.parametrize("how", ["", "other values"])
def test_another_process_reads_a_trial(how):
    """It compares each value."""
    publisher = Publisher(CPU, timeout_s=120)
    command = [sys.executable, "-c", TRIAL, publisher.address[1:], how]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert publish_trial(publisher) == ""
    expected = "the engine read other values than the actor had written" if how else ""
    assert reader.communicate(timeout=60)[0] == f"{expected}\n"
    assert open_buffers() == 0


def test_a_trial_ends_where_no_engine_connects():
    """As one in another network namespace, which has other addresses."""
    publisher = Publisher(CPU, timeout_s=0.1)
    expected = "TransportError: no engine asked for the weights within 0.1 s"
    assert publish_trial(publisher) == expected
    found = read_trial(BucketStream((publisher.address,), timeout_s=1))
    assert found.startswith("TransportError: the other side of a weight sync is gone")


def test_the_engine_has_closed_its_mappings_when_the_trainer_is_done(publisher):
    """Memory of a GPU is not freed before that."""
    stream = iter(BucketStream((publisher.address,), timeout_s=10))
    before = Path("/proc/self/maps").read_text().count("memfd:verlite-weights")
    publishing = Publishing(publisher, NAMED, 1)
    mapped = []
    for _ in stream:
        maps = Path("/proc/self/maps").read_text()
        mapped.append(maps.count("memfd:verlite-weights"))
    publishing.join(10)
    assert max(mapped) > before
    assert Path("/proc/self/maps").read_text().count("memfd:verlite-weights") <= before


def test_an_engine_waits_while_others_fill_the_queue(publisher):
    """Every user can connect, and the trainer takes connections at its first bucket."""
    others = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for other in others:
        other.connect(publisher.address)
    full = socket.socket(socket.AF_UNIX)
    full.settimeout(1)
    with pytest.raises(BlockingIOError):
        full.connect(publisher.address)
    found = []
    stream = BucketStream((publisher.address,), timeout_s=10)
    reading = threading.Thread(target=lambda: found.extend(stream), daemon=True)
    reading.start()
    for other in others:  # the trainer drops strangers
        publisher._listener.accept()[0].close()
        other.close()
    publishing = Publishing(publisher, NAMED, 2000)
    reading.join(60)
    publishing.join(60)
    assert publishing.error is None
    assert_equal(found)


def test_a_trainer_that_is_gone_is_named(publisher):
    publisher.close()
    with pytest.raises(TransportError, match="the other side of a weight sync is gone"):
        list(BucketStream((publisher.address,), timeout_s=10))


def test_another_user_gets_no_weights_and_does_not_disturb(publisher):
    """Every user can see the address."""
    curious = as_nobody(
        """
with socket.socket(socket.AF_UNIX) as peer:
    peer.connect(chr(0) + sys.argv[1])
    print("connected", flush=True)
    print(repr(peer.recv(100)))
""",
        publisher.address[1:],
    )
    assert curious.stdout.readline() == "connected\n"
    publishing = Publishing(publisher, NAMED, 2000)
    assert_equal(list(BucketStream((publisher.address,), timeout_s=10)))
    publishing.join(10)
    assert publishing.error is None
    assert curious.communicate(timeout=60)[0] == "b''\n"


def test_weights_of_another_user_are_refused():
    impostor = as_nobody(
        """
listener = socket.socket(socket.AF_UNIX)
listener.bind(chr(0) + sys.argv[1])
listener.listen()
print("ready", flush=True)
listener.accept()[0].recv(1)
""",
        address := f"verlite-test-{os.getpid()}",
    )
    assert impostor.stdout.readline() == "ready\n"
    with pytest.raises(TransportError, match="belongs to another user"):
        list(BucketStream((f"\0{address}",), timeout_s=10))
    impostor.communicate(timeout=60)
