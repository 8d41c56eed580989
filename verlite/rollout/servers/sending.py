"""How weights reach a server: it reads files, or it gets them over the network."""

import asyncio
import dataclasses
import os
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import urlsplit

import torch

from verlite.weights.buckets import BucketFiles
from verlite.weights.collective import WeightSender
from verlite.weights.transport import publish

SEND_S = 600.0
"""Longest time of one message."""


class Delivery(Protocol):
    """One version on its way to any number of servers, also to those that need it later."""

    def to(self, url: str) -> Any:
        """Return an asynchronous context: its value is the body's update_info for the server with
        this address, and within the context the server can get the weights."""
        ...

    def close(self) -> None:
        """Free what was kept for later."""
        ...


class SharedFiles:
    """Files in a folder that servers share with this machine."""

    def __init__(self, files: BucketFiles) -> None:
        self._sizes = {path: Path(path).stat().st_size for path in files.paths}

    @asynccontextmanager
    async def to(self, url: str) -> AsyncIterator[Mapping[str, Any]]:
        """See `Delivery`."""
        yield {"sizes": self._sizes}

    def close(self) -> None:
        """Nothing: the trainer keeps the newest two versions."""


class Network:
    """Buckets are sent to each server by a gloo group of two: this process, and the server.

    The files stay open until `close`, so that a server that was restarted can get them.

    Args:
        files: bucket files on this machine.
        bucket_bytes: size of a message.
    """

    def __init__(self, files: BucketFiles, bucket_bytes: int) -> None:
        self._open: list[BinaryIO] = [Path(path).open("rb") for path in files.paths]
        own = (f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._open)
        self._files = dataclasses.replace(files, paths=tuple(own))
        self._bucket_bytes = bucket_bytes

    @asynccontextmanager
    async def to(self, url: str) -> AsyncIterator[Mapping[str, Any]]:
        """See `Delivery`. A failure here makes the server's own call fail, which says why."""
        sender = WeightSender(address_towards(url), 1, torch.device("cpu"), SEND_S)
        rendezvous = sender.offer()
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The server's error is raised instead, if there is one.
        sent.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A daemon: it waits for a server that never comes longer than a run that ends.
        threading.Thread(target=self._send, args=(sender, sent), daemon=True).start()
        yield {"rendezvous": dataclasses.asdict(rendezvous)}
        await sent

    def _send(self, sender: WeightSender, sent: "asyncio.Future[None]") -> None:
        loop = sent.get_loop()
        error: BaseException | None = None
        try:
            sender.open()  # now the server can be told if a file cannot be read
            publish(self._files, [sender], self._bucket_bytes)
        except Exception as problem:  # `publish` has logged it and told the server
            error = problem
        finally:
            sender.abort("the weights were sent")  # drops the group; nobody waits any more

        def tell() -> None:
            if sent.done():
                return
            if error is None:
                sent.set_result(None)
            else:
                sent.set_exception(error)

        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell)

    def close(self) -> None:
        """Close the files."""
        for file in self._open:
            file.close()


def address_towards(url: str) -> str:
    """Return this machine's address on the route to a server."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    family, kind, _, _, address = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own
