"""The transport `collective`, with gloo between threads of this process."""

import threading
import time

import pytest
import torch

from tests.weights.test_buckets import NAMED, assert_equal
from verlite.weights import TransportError, collective
from verlite.weights.buckets import BucketFiles
from verlite.weights.collective import WeightReceiver, WeightSender
from verlite.weights.transport import publish

CPU = torch.device("cpu")


class Sync(threading.Thread):
    """One receiver's part of a sync."""

    def __init__(self, receiver, offer, rank):
        super().__init__(daemon=True)
        self.receiver, self.offer, self.rank = receiver, offer, rank
        self.result = None
        self.start()

    def run(self):
        try:
            self.result = self.receiver.receive(self.offer, self.rank)
        except Exception as error:
            self.result = error

    def finished(self):
        self.join(30)
        assert not self.is_alive()
        return self.result


@pytest.fixture
def pair():
    sender = WeightSender("127.0.0.1", 2, CPU, timeout_s=30)
    receivers = [WeightReceiver(CPU, timeout_s=30) for _ in range(2)]
    yield sender, receivers
    sender.abort("the test ends")
    for receiver in receivers:
        receiver.close()


def synced(sender, receivers, named):
    syncs = [Sync(r, sender.offer(), rank) for rank, r in enumerate(receivers, 1)]
    publish(named, [sender], 2000)
    for sync in syncs:
        files = sync.finished()
        assert_equal(BucketFiles(tuple(files.paths)), named)
        files.close()


def test_every_receiver_gets_every_bucket_in_each_sync(pair):
    sender, receivers = pair
    synced(sender, receivers, NAMED)
    first = sender.offer()
    assert first.address == "127.0.0.1"
    synced(sender, receivers, [(name, tensor.flip(0)) for name, tensor in NAMED if tensor.ndim])
    assert sender.offer() == first, "the group is kept"


def test_a_half_sync_fails_on_every_receiver_and_the_next_repairs_it(pair):
    sender, receivers = pair

    def broken():
        yield from NAMED[:3]
        raise ZeroDivisionError

    syncs = [Sync(r, sender.offer(), rank) for rank, r in enumerate(receivers, 1)]
    with pytest.raises(ZeroDivisionError):
        publish(broken(), [sender], 1)
    for sync in syncs:
        assert isinstance(sync.finished(), TransportError)
        assert "could not send all weights: ZeroDivisionError" in str(sync.result)
    synced(sender, receivers, NAMED)


def test_a_sender_does_not_wait_long_for_receivers_that_do_not_listen(pair, monkeypatch):
    monkeypatch.setattr(collective, "GOODBYE_S", 0.5)
    sender, receivers = pair
    synced(sender, receivers, NAMED)
    began = time.monotonic()
    sender.add([("w", torch.zeros(3))])  # nobody receives it
    sender.abort("it failed")
    assert time.monotonic() - began < 15


def test_the_sender_keeps_no_memory_between_syncs(pair):
    sender, receivers = pair
    synced(sender, receivers, NAMED)
    assert [buffer.numel() for buffer in sender._buffers] == [0, 0]


def test_a_receiver_that_leaves_fails_the_sync_of_all_without_waiting(pair):
    sender, receivers = pair
    synced(sender, receivers, NAMED)
    sync = Sync(receivers[0], sender.offer(), 1)
    receivers[1].close()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        publish(NAMED, [sender], 1)
    assert isinstance(sync.finished(), TransportError)
    assert time.monotonic() - began < 15, "the connection's end is noticed before the time limit"
    synced(sender, receivers, NAMED)
