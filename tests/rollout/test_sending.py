"""Weights on their way to a generation server, without a server."""

import asyncio
import threading

import pytest
import torch

from verlite.rollout.servers.sending import Network
from verlite.weights import TransportError
from verlite.weights.buckets import BucketFiles
from verlite.weights.collective import Rendezvous, WeightReceiver


def test_a_file_that_cannot_be_read_is_told_to_the_server(tmp_path):
    """Without it the server would wait 120 s for the sender."""
    broken = tmp_path / "weights.safetensors"
    broken.write_bytes(b"no weights")
    delivery = Network(BucketFiles((str(broken),)), 1 << 20)
    told = []

    def receive(update):
        try:
            WeightReceiver(torch.device("cpu")).receive(Rendezvous(**update["rendezvous"]), 1)
        except TransportError as error:
            told.append(str(error))

    async def send():
        async with delivery.to("http://127.0.0.1:9") as update:
            server = threading.Thread(target=receive, args=(update,), daemon=True)
            server.start()
            await asyncio.to_thread(server.join, 150)

    with pytest.raises(Exception, match="header"):
        asyncio.run(send())
    delivery.close()
    assert len(told) == 1 and "the trainer could not send all weights: " in told[0]
