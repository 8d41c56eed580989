"""Transport `collective`: the trainer broadcasts buckets to one receiver on each other host.

Sender and receivers form a process group of their own: NCCL between GPUs, gloo between CPUs. While
a bucket travels, the trainer gathers the next one. A receiver stores what arrives in memory files,
which the engines of its host map. So a host receives the weights once, however many engines it has.

The group is kept between syncs. After a failure both sides drop it, and the next sync forms a new
one.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verlite.weights import GOODBYE_S, JOIN_S, TIMEOUT_S, TransportError
from verlite.weights.buckets import Bucket, fill, header_of
from verlite.weights.shared_memory import STAGING_BYTES, MemoryFiles, Staging

_REMEDY = (
    "All ports between the nodes must be open; actor_rollout_ref.rollout.weight_transport=files "
    "needs only a shared folder"
)
_END = 0
_ABORT = -1
_generations = count(1)


@dataclass(frozen=True)
class Rendezvous:
    """Where receivers meet the sender.

    size: ranks of the group: the sender, which is rank 0, and the receivers.
    generation: changes when a new group is needed.
    """

    address: str
    port: int
    size: int
    generation: int


class Group:
    """The process group of one rank. Every message goes from rank 0 to all others."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, limit_s: float
    ):
        self.device = device
        timeout = timedelta(seconds=limit_s)
        self._backend: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            # Without it, wait() only orders streams, and a lost peer ends the process.
            with _environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
                self._backend = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._backend = dist.ProcessGroupGloo(store, rank, size, timeout)

    def broadcast(self, tensor: Tensor) -> Any:
        """Start to send or receive a tensor on `device`. Return its work, for `wait`."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._backend.broadcast([tensor], options)

    def close(self) -> None:
        """Close the connections, so that the other side's calls fail.

        gloo closes them when it has given up its unfinished messages, so nobody waits for that.
        """
        held = [self._backend]
        self._backend = None
        threading.Thread(target=_end, args=(held,), daemon=True).start()


def _end(held: list[Any]) -> None:
    held[0].abort()
    held.clear()  # the last reference


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


class WeightSender:
    """The trainer's side.

    Args:
        address: of this host, on which it listens.
        receivers: number of receivers.
        device: where buckets are sent from.
        timeout_s: how long to wait for the receivers.
    """

    def __init__(
        self,
        address: str,
        receivers: int,
        device: torch.device,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.device = device
        self.timeout_s = timeout_s
        self._address = address
        self._size = receivers + 1
        self._rendezvous: Rendezvous | None = None
        self._store: dist.Store | None = None
        self._group: Group | None = None
        self._reset()

    def offer(self) -> Rendezvous:
        """Return where to meet. Listens there if no group exists."""
        if self._rendezvous is None:
            family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
            listener = socket.create_server((self._address, 0), family=family)
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                self._address,
                port,
                self._size,
                is_master=True,
                timeout=timedelta(seconds=JOIN_S),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            self._rendezvous = Rendezvous(self._address, port, self._size, next(_generations))
        return self._rendezvous

    def open(self) -> None:
        """Wait until all receivers have connected, as the first bucket does otherwise. From then on
        `abort` can tell them why no weights come.

        Raises:
            TransportError: they have not connected within JOIN_S.
        """
        if self._group is None:
            self.offer()
            assert self._store is not None
            try:
                self._group = Group(self._store, 0, self._size, self.device, self.timeout_s)
            except RuntimeError as error:
                raise TransportError(
                    f"not all {self._size - 1} receiving hosts connected within {JOIN_S:g} s: "
                    f"{error}. {_REMEDY}"
                ) from error
        self._is_open = True

    def add(self, bucket: Bucket) -> None:
        """Send a bucket. Returns while it travels."""
        header, size = header_of(bucket)
        self._wait(self._slot)
        if self._buffers[self._slot].numel() < size:
            self._buffers[self._slot] = torch.empty(size, dtype=torch.uint8, device=self.device)
        payload = self._buffers[self._slot][:size]
        fill(payload, bucket)
        text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._send(torch.tensor([len(header), size]), text, payload)

    def finish(self) -> None:
        """Tell the receivers that they have every bucket. Returns when they have received it."""
        self._send(torch.tensor([_END, 0]))
        for slot in range(2):
            self._wait(slot)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._reset()  # frees the buffers

    def abort(self, reason: str) -> None:
        """Tell the receivers, if they can be reached, why no more comes. Drops the group."""
        group, is_open = self._group, self._is_open
        self._group = self._rendezvous = self._store = None
        self._reset()
        if group is None:
            return
        try:
            if is_open:
                text = torch.frombuffer(bytearray(reason.encode()), dtype=torch.uint8)
                messages = (torch.tensor([_ABORT, text.numel()]), text)
                on_device = [message.to(self.device) for message in messages]
                works = [group.broadcast(message) for message in on_device]
                deadline = time.monotonic() + GOODBYE_S
                while time.monotonic() < deadline and not all(w.is_completed() for w in works):
                    time.sleep(0.02)
        except RuntimeError:
            pass  # the receivers are gone
        finally:
            group.close()

    def _reset(self) -> None:
        self._is_open = False  # whether receivers wait for more
        self._slot = 0
        self._sending: list[list[tuple[Any, Tensor]]] = [[], []]
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=self.device) for _ in range(2)]

    def _send(self, *tensors: Tensor) -> None:
        self.open()
        assert self._group is not None
        on_device = [tensor.to(self.device) for tensor in tensors]
        works = [(self._group.broadcast(tensor), tensor) for tensor in on_device]
        self._sending[self._slot] += works
        self._slot = 1 - self._slot

    def _wait(self, slot: int) -> None:
        works, self._sending[slot] = self._sending[slot], []
        try:
            while works:  # each tensor is kept until its work is done
                works[0][0].wait()
                works.pop(0)
        finally:
            works.clear()  # unfinished works would keep connections open as long as a traceback


class WeightReceiver:
    """One host's side.

    Args:
        device: where buckets arrive; its type must be that of the sender's.
        timeout_s: how long to wait for the next message.
    """

    def __init__(self, device: torch.device, timeout_s: float = TIMEOUT_S) -> None:
        self.device = device
        self.timeout_s = timeout_s
        self._rendezvous: Rendezvous | None = None
        self._group: Group | None = None
        self._store: dist.Store | None = None

    def receive(self, rendezvous: Rendezvous, rank: int) -> MemoryFiles:
        """Receive all buckets of one sync into memory files.

        Args:
            rendezvous: the sender's offer.
            rank: of this receiver, from 1.

        Raises:
            TransportError: the sender or the connection failed. Nothing is kept.
        """
        files = MemoryFiles()
        try:
            group = self._join(rendezvous, rank)
            while True:
                header_size, size = self._next(group, 2, torch.int64).tolist()
                if header_size == _END:
                    return files
                if header_size == _ABORT:
                    reason = bytes(self._next(group, size, torch.uint8).tolist()).decode()
                    raise TransportError(f"the trainer could not send all weights: {reason}")
                header = bytes(self._next(group, header_size, torch.uint8).tolist())
                self._receive_into(files.map_new(header, size), group)
        except BaseException as error:
            files.close()
            self.close()
            if isinstance(error, RuntimeError) and not isinstance(error, TransportError):
                raise TransportError(
                    f"the weights from {rendezvous.address}:{rendezvous.port} did not arrive: "
                    f"{error}. {_REMEDY}"
                ) from error
            raise

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
        self._group = self._rendezvous = self._store = None

    def _join(self, rendezvous: Rendezvous, rank: int) -> Group:
        if self._group is not None and self._rendezvous == rendezvous:
            return self._group
        self.close()
        self._store = dist.TCPStore(
            rendezvous.address,
            rendezvous.port,
            rendezvous.size,
            is_master=False,
            timeout=timedelta(seconds=JOIN_S),
            wait_for_workers=False,
        )
        self._group = Group(self._store, rank, rendezvous.size, self.device, self.timeout_s)
        self._rendezvous = rendezvous
        return self._group

    def _next(self, group: Group, count: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(count, dtype=dtype, device=self.device)
        group.broadcast(tensor).wait()
        return tensor.cpu()

    def _receive_into(self, payload: Tensor, group: Group) -> None:
        if self.device.type == "cpu":
            group.broadcast(payload).wait()
            return
        arrived = torch.empty(payload.numel(), dtype=torch.uint8, device=self.device)
        group.broadcast(arrived).wait()
        end = 0
        for part in Staging(self.device, STAGING_BYTES).to_host([arrived]):
            payload[end : end + part.numel()].copy_(part)
            end += part.numel()
        del arrived
        torch.cuda.empty_cache()  # the engine needs the memory next
